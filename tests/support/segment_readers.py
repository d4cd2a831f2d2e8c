"""Readers of numbered texts, of every kind."""

import numpy as np
from hypothesis import reject

from txl_jax.config import EpochMemory, Roll
from txl_jax.data.segments import evaluation_segments, training_segments

CONSTRUCTORS = [training_segments, evaluation_segments]


def numbered(length):
    """A text whose tokens are their positions."""
    return np.arange(length)


def sentence_starts(length):
    """Any sentences of a text of this length: some are empty, and up to 3 tokens precede the first."""
    cuts = np.random.default_rng(length).integers(0, length + 1, length // 4)
    return np.sort(np.concatenate([[min(length % 4, *cuts, length)], cuts, [length]]))


# Ways to cut a text, by a name: the constructor, and what it is given beside the sizes (from the text's length).
KINDS = {
    "sequential": (training_segments, lambda length: {}),
    "memory carried": (training_segments, lambda length: {"epoch_memory": EpochMemory.CARRIED}),
    "stream rolled": (training_segments, lambda length: {"roll": Roll.STREAM}),
    "rows rolled": (training_segments, lambda length: {"roll": Roll.ROWS, "epoch_memory": EpochMemory.CARRIED}),
    "sentences": (training_segments, lambda length: {"sentence_starts": sentence_starts(length)}),
    "evaluation": (evaluation_segments, lambda length: {}),
    "warm-up": (evaluation_segments, lambda length: {"warmup_tokens": 1 + length // 7}),
}


def make(kind, length, batch_size, segment_len, **others):
    """A reader of a numbered text; texts too short for it are left to the tests of errors."""
    constructor, given_beside = KINDS[kind]
    if constructor is training_segments and length - 1 < batch_size * segment_len:
        reject()
    others = given_beside(length) | others
    return constructor(numbered(length), batch_size=batch_size, segment_len=segment_len, **others)


def rows_of(values):
    """[S, B, L] to the B rows in reading order, [B, S * L]."""
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)


def epoch_of(reader, epoch):
    """All segments of one epoch."""
    return reader.segments(epoch * reader.n_segments, reader.n_segments)


def assert_equal(first, second):
    for name, a, b in zip(first._fields, first, second, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
