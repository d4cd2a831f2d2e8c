"""Tests the order of an epoch: its chunks and the random numbers; test_segments has it against plain lists."""

import re
from unittest import mock

import numpy as np
import pytest

from txl_jax.data import epoch_order
from txl_jax.data.epoch_order import ShuffledSentences, random_permutation, random_words


def shuffled(starts, seed):
    return ShuffledSentences(starts, n_tokens=int(starts[-1]), seed=seed)


def stream(made, epoch, length):
    """The places of an epoch's whole stream."""
    inputs, targets = made(epoch, np.array(0), length - 1)
    return [*inputs.tolist(), int(targets[-1])]


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_long_lists_are_handled_in_chunks(chunk, monkeypatch):
    starts = np.cumsum([2, *np.random.default_rng(0).integers(0, 6, 20)])
    whole = stream(shuffled(starts, 4), 1, starts[-1])
    monkeypatch.setattr(epoch_order, "CHUNK", chunk)
    assert stream(shuffled(starts, 4), 1, starts[-1]) == whole
    for i in range(1, 20):
        wrong = starts.copy()
        wrong[i] = wrong[i - 1] - 1
        with pytest.raises(ValueError, match="decrease"):
            shuffled(wrong, 4)


def test_an_epoch_is_prepared_once_and_one_is_kept(monkeypatch):
    prepared = mock.Mock(wraps=random_permutation)
    monkeypatch.setattr(epoch_order, "random_permutation", prepared)
    made = shuffled(np.arange(31), seed=9)
    streams = {epoch: stream(made, epoch, 30) for epoch in (0, 0, 1, 1, 0)}
    assert [epoch for (_, epoch, _), _ in prepared.call_args_list] == [0, 1, 0]
    assert streams[0] == stream(shuffled(np.arange(31), seed=9), 0, 30) != streams[1]


def test_the_numbers_are_those_of_runs_that_exist():
    """Other numbers would make a resumed run read another text.

    Made by `random_words(1111, 0, 2).tolist()` and so on; they may change with no version of numpy.
    """
    assert random_words(1111, 0, 2).tolist() == [9149335232105706365, 13657752410413150597]
    assert random_words(-1, 7, 1).tolist() == [4692318544024626926]
    assert random_permutation(1111, 0, 12).tolist() == [9, 7, 0, 11, 8, 2, 5, 1, 6, 3, 10, 4]
    assert random_permutation(1111, 1, 12).tolist() == [3, 0, 6, 10, 7, 8, 11, 1, 9, 5, 4, 2]


@pytest.mark.parametrize(
    "starts", [np.array(0), np.array([0]), np.zeros((3, 4), int), np.zeros(3, np.uint64), [0, 5, 9], [0, 11], [-1, 10]]
)
def test_starts_are_one_axis_of_signed_integers_that_span_the_text(starts):
    starts = np.array(starts)
    with pytest.raises(ValueError, match=rf"\b10, got {starts.dtype} of shape {re.escape(str(starts.shape))}"):
        ShuffledSentences(starts, n_tokens=10, seed=0)
