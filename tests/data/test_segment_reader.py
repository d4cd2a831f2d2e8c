"""Tests batching: what each segment holds, against lists, for any text, batch, segment, order and process."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from support.segment_readers import KINDS, assert_equal, epoch_of, make, numbered, rows_of, sentence_starts
from txl_jax.config import Roll
from txl_jax.data.epoch_order import random_permutation, random_words
from txl_jax.data.segments import training_segments
from txl_jax.segments import Segments

SIZES = {"length": st.integers(2, 120), "batch_size": st.integers(1, 7), "segment_len": st.integers(1, 9)}
WARMUP = st.integers(0, 30)
for_any_sizes = given(**SIZES)
TRAINING = [name for name, (constructor, _) in KINDS.items() if constructor is training_segments]
MOVING = ["stream rolled", "rows rolled", "sentences"]


@given(**SIZES, stride=st.integers(1, 9), rolled=st.booleans())
def test_segments_with_a_stride_read_again_what_they_do_not_score(length, batch_size, segment_len, stride, rolled):
    if length - 1 < batch_size * segment_len or stride > segment_len:
        reject()
    roll = Roll.ROWS if rolled else Roll.NONE
    sizes = {"batch_size": batch_size, "segment_len": segment_len}
    reader = training_segments(numbered(length), **sizes, stride=stride, roll=roll)
    again, seen = segment_len - stride, []
    for epoch in range(2):
        read = epoch_of(reader, epoch)
        assert read.reset[0].all() and not read.reset[1:].any()
        np.testing.assert_array_equal(read.inputs[1:, :, :again], read.inputs[:-1, :, stride:])
        np.testing.assert_array_equal(read.targets[1:, :, :again], read.targets[:-1, :, stride:])
        assert read.weights[0].all() and read.weights[1:, :, again:].all() and not read.weights[1:, :, :again].any()
        assert read.weights.sum() == reader.tokens_per_epoch
        scored = np.sort(read.targets[read.weights > 0])
        assert len(set(scored)) == len(scored)
        seen.append(scored.tolist())
        # What is left out fills no stride.
        assert (length - 1) // batch_size - reader.tokens_per_epoch // batch_size < stride
    assert rolled or seen[0] == seen[1]


def pairs_of_stream(stream):
    """Inputs with their targets."""
    return list(itertools.pairwise(stream))


def turned(values, by):
    return values[by % len(values) :] + values[: by % len(values)]


def training_by_hand(kind, length, batch_size, segment_len, *, seed, epoch):
    """The (input, target) places that each row reads in an epoch, in plain lists: B lists."""
    row_len = (length - 1) // batch_size // segment_len * segment_len
    pairs = pairs_of_stream(range(length))
    if kind == "rows rolled":
        edges = [b * (length - 1) // batch_size for b in range(batch_size + 1)]
        turns = random_words(seed, epoch, batch_size).tolist()
        stretches = [pairs[a:b] for a, b in itertools.pairwise(edges)]
        return [turned(stretch, by)[:row_len] for stretch, by in zip(stretches, turns, strict=True)]
    if kind == "stream rolled":
        pairs = turned(pairs, random_words(seed, epoch, 1).item())
    if kind == "sentences":
        starts = sentence_starts(length).tolist()
        sentences = [range(a, b) for a, b in itertools.pairwise(starts)]
        order = random_permutation(seed, epoch, len(sentences)).tolist()
        pairs = pairs_of_stream([*range(starts[0]), *(place for i in order for place in sentences[i])])
    return [pairs[b * row_len : (b + 1) * row_len] for b in range(batch_size)]


def evaluation_by_hand(length, batch_size, segment_len, warmup):
    """Inputs, targets and weights of each row, padded to whole segments: three nested lists [B, S * L]."""
    n = -(-(length - 1) // batch_size)
    rows = []
    for b in range(batch_size):
        own = range(1 + b * n, min(1 + (b + 1) * n, length))
        before = range(max(1, 1 + b * n - warmup), 1 + b * n) if own else ()
        rows.append([(t - 1, t, 0) for t in before] + [(t - 1, t, 1) for t in own])
    width = -(-max(map(len, rows)) // segment_len) * segment_len
    padded = [row + [(0, 0, 0)] * (width - len(row)) for row in rows]
    return [[[place[part] for place in row] for row in padded] for part in range(3)]


@pytest.mark.parametrize("kind", TRAINING)
@given(**SIZES, seed=st.integers(-5, 2**40), epoch=st.integers(0, 4))
def test_training_against_lists(kind, seed, epoch, length, batch_size, segment_len):
    reader = make(kind, length, batch_size, segment_len, seed=seed)
    got = epoch_of(reader, epoch)
    expected = training_by_hand(kind, length, batch_size, segment_len, seed=seed, epoch=epoch)
    assert rows_of(got.inputs).tolist() == [[pair[0] for pair in row] for row in expected]
    assert rows_of(got.targets).tolist() == [[pair[1] for pair in row] for row in expected]
    assert (got.weights == 1).all()


@given(**SIZES, warmup=WARMUP)
@example(length=6, batch_size=4, segment_len=3, warmup=2)  # The last row has no target of its own.
def test_evaluation_against_lists(warmup, length, batch_size, segment_len):
    reader = make("evaluation", length, batch_size, segment_len, warmup_tokens=warmup)
    got = reader.segments(0, reader.n_segments)
    expected = evaluation_by_hand(length, batch_size, segment_len, warmup)
    assert [rows_of(values).tolist() for values in got[:3]] == expected


@given(**SIZES, warmup=WARMUP)
def test_evaluation_scores_every_token_but_the_first_once_and_in_order(warmup, length, batch_size, segment_len):
    reader = make("evaluation", length, batch_size, segment_len, warmup_tokens=warmup)
    got = reader.segments(0, reader.n_segments)
    scored = rows_of(got.weights).astype(bool)
    assert rows_of(got.targets)[scored].tolist() == list(range(1, length)), "rows end to end are the text"
    assert rows_of(got.inputs)[scored].tolist() == list(range(length - 1))
    assert (reader.tokens_per_epoch, reader.skipped_tokens) == (length - 1, 0)


@given(**SIZES, warmup=WARMUP, hosts=st.integers(1, 3), first=st.integers(0, 20), count=st.integers(1, 20))
def test_the_token_that_each_position_of_evaluation_scores(
    warmup, hosts, first, count, length, batch_size, segment_len
):
    """The same in steps past the end, which are padding."""
    for host in range(hosts):
        sizes = {"length": length, "batch_size": batch_size * hosts, "segment_len": segment_len}
        reader = make("evaluation", **sizes, warmup_tokens=warmup, own=range(host, batch_size * hosts, hosts))
        got = reader.segments(first, count)
        # The text is numbered, so a target is its own position.
        np.testing.assert_array_equal(reader.scored(first, count), np.where(got.weights == 1, got.targets, 0))


@pytest.mark.parametrize("kind", ["evaluation", "warm-up"])
@given(**SIZES, steps_beyond=st.integers(0, 20))
def test_evaluation_is_padding_past_the_end(kind, steps_beyond, length, batch_size, segment_len):
    reader = make(kind, length, batch_size, segment_len)
    got = reader.segments(reader.n_segments + steps_beyond, 3)
    assert got.targets.shape == (3, batch_size, segment_len)
    assert not got.weights.any() and not got.targets.any() and not got.inputs.any()
    assert got.reset.all()


@pytest.mark.parametrize("kind", TRAINING)
@given(**SIZES, epoch=st.integers(0, 3))
def test_no_target_counts_twice_in_an_epoch_and_less_than_a_step_is_left_out(
    kind, epoch, length, batch_size, segment_len
):
    reader = make(kind, length, batch_size, segment_len)
    got = epoch_of(reader, epoch)
    assert (got.weights == 1).all()
    assert len(set(got.targets.ravel().tolist())) == got.targets.size == reader.tokens_per_epoch
    assert reader.skipped_tokens == length - 1 - got.targets.size < batch_size * segment_len


@pytest.mark.parametrize("kind", ["stream rolled", "rows rolled"])
@given(**SIZES, epoch=st.integers(0, 3))
def test_a_roll_invents_no_transition(kind, epoch, length, batch_size, segment_len):
    got = epoch_of(make(kind, length, batch_size, segment_len), epoch)
    np.testing.assert_array_equal(got.inputs + 1, got.targets)


@pytest.mark.parametrize("kind", MOVING)
@settings(max_examples=10)
@given(length=st.integers(6, 40), batch_size=st.integers(1, 3), segment_len=st.integers(1, 5))
def test_every_target_is_read_in_the_long_run(kind, length, batch_size, segment_len):
    """Short sentences: where one fills most of a row, its end may be left out in any order."""
    short = {"sentence_starts": np.array([*range(0, length, 2), length])} if kind == "sentences" else {}
    reader = make(kind, length, batch_size, segment_len, **short)
    read = set(reader.segments(0, 60 * reader.n_segments).targets.ravel().tolist())
    assert read >= set(range(1, length))


@pytest.mark.parametrize("kind", MOVING)
def test_epochs_and_seeds_differ_and_the_same_again_is_the_same(kind):
    texts = {}
    for seed, epoch in itertools.product((0, 1), (0, 1, 2)):
        targets = epoch_of(make(kind, 118, 3, 5, seed=seed), epoch).targets.tolist()
        assert targets == epoch_of(make(kind, 118, 3, 5, seed=seed), epoch).targets.tolist()
        texts[str(targets)] = seed, epoch
    assert len(texts) == 6


@pytest.mark.parametrize("kind", KINDS)
@for_any_sizes
def test_rows_are_reset_where_a_pass_begins_and_nowhere_else(kind, length, batch_size, segment_len):
    reader = make(kind, length, batch_size, segment_len)
    carried = kind in ("memory carried", "rows rolled")
    for passes in range(3):
        reset = reader.segments(passes * reader.n_segments, reader.n_segments).reset
        begins = passes == 0 or not carried
        past_the_end = kind in ("evaluation", "warm-up") and passes > 0
        assert (reset[0] == begins).all() and (reset[1:] == past_the_end).all()


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, first_step=st.integers(0, 300), count=st.integers(1, 12))
def test_a_block_is_its_single_steps_from_anywhere(kind, first_step, count, length, batch_size, segment_len):
    block = make(kind, length, batch_size, segment_len).segments(first_step, count)
    reader = make(kind, length, batch_size, segment_len)
    singles = [reader.segments(step, 1) for step in range(first_step, first_step + count)]
    assert_equal(block, Segments(*map(np.concatenate, zip(*singles, strict=True))))


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, stop=st.integers(1, 60))
def test_a_resumed_run_reads_on_where_it_stopped(kind, stop, length, batch_size, segment_len):
    whole = make(kind, length, batch_size, segment_len).segments(0, stop + 5)
    resumed = make(kind, length, batch_size, segment_len).segments(stop, 5)
    assert_equal(resumed, Segments(*(values[stop:] for values in whole)))


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, steps=st.lists(st.integers(0, 40), min_size=2, max_size=6))
def test_what_was_asked_before_does_not_matter(kind, steps, length, batch_size, segment_len):
    reader = make(kind, length, batch_size, segment_len)
    for step in steps:
        assert_equal(reader.segments(step, 2), make(kind, length, batch_size, segment_len).segments(step, 2))


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, n_processes=st.integers(1, 4), first_step=st.integers(0, 20), data=st.data())
def test_processes_share_the_rows_of_one(kind, n_processes, first_step, data, length, batch_size, segment_len):
    """Whichever rows each has."""
    whole = make(kind, length, batch_size, segment_len)
    expected = whole.segments(first_step, 4)
    owners = np.array(data.draw(st.lists(st.integers(0, n_processes - 1), min_size=batch_size, max_size=batch_size)))
    for process in np.unique(owners):
        own = np.flatnonzero(owners == process)
        share = make(kind, length, batch_size, segment_len, own=own)
        assert_equal(share.segments(first_step, 4), Segments(*(array[:, own] for array in expected)))
        for name in ("batch_size", "n_segments", "tokens_per_epoch", "skipped_tokens"):
            assert getattr(share, name) == getattr(whole, name), "numbers of all processes together"
