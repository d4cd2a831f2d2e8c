"""Tests batching by hand-drawn cases, its arrays, how a text is read, and what is refused."""

import re

import numpy as np
import pytest

from support.segment_readers import CONSTRUCTORS, KINDS, assert_equal, numbered, rows_of
from txl_jax.config import Roll
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.errors import UserError


def test_a_case_drawn_by_hand():
    reader = evaluation_segments(np.array([10, 11, 12, 13, 14, 15, 16, 17]), batch_size=3, segment_len=2)
    got = reader.segments(0, 2)
    assert got.inputs.tolist() == [[[10, 11], [13, 14], [16, 0]], [[12, 0], [15, 0], [0, 0]]]
    assert got.targets.tolist() == [[[11, 12], [14, 15], [17, 0]], [[13, 0], [16, 0], [0, 0]]]
    assert got.weights.tolist() == [[[1, 1], [1, 1], [1, 0]], [[1, 0], [1, 0], [0, 0]]]
    assert got.reset.tolist() == [[True] * 3, [False] * 3]


def test_warm_up_drawn_by_hand():
    """The picture of the module's docstring."""
    reader = evaluation_segments(numbered(12), batch_size=2, segment_len=3, warmup_tokens=2)
    got = reader.segments(0, 3)
    assert rows_of(got.targets).tolist() == [[1, 2, 3, 4, 5, 6, 0, 0, 0], [5, 6, 7, 8, 9, 10, 11, 0, 0]]
    assert rows_of(got.inputs).tolist() == [[0, 1, 2, 3, 4, 5, 0, 0, 0], [4, 5, 6, 7, 8, 9, 10, 0, 0]]
    assert rows_of(got.weights).tolist() == [[1, 1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 0, 0]]
    assert reader.n_segments == 3


def words(*turns):
    return lambda seed, epoch, count: np.array(turns[:count], np.uint64)


def test_rolls_drawn_by_hand(monkeypatch):
    """The pictures of the module's docstring."""
    sizes = {"batch_size": 2, "segment_len": 3}
    monkeypatch.setattr("txl_jax.data.epoch_order.random_words", words(8 + 11, 1))
    got = training_segments(numbered(12), **sizes, roll=Roll.STREAM).segments(0, 1)
    assert got.targets.tolist() == [[[9, 10, 11], [1, 2, 3]]]
    monkeypatch.setattr("txl_jax.data.epoch_order.random_words", words(3 + 5, 1 + 6))
    got = training_segments(numbered(12), **sizes, roll=Roll.ROWS).segments(0, 1)
    assert got.targets.tolist() == [[[4, 5, 1], [7, 8, 9]]]


@pytest.mark.parametrize("kind", KINDS)
def test_types_and_shapes(kind):
    constructor, given_beside = KINDS[kind]
    for dtype in (np.uint8, np.uint16, np.int32, np.int64):
        got = constructor(np.zeros(200, dtype), batch_size=3, segment_len=5, **given_beside(200)).segments(2, 4)
        assert [values.dtype for values in got] == [np.int32, np.int32, np.float32, bool]
        assert [values.shape for values in got] == [(4, 3, 5)] * 3 + [(4, 3)]
        assert all(type(values) is np.ndarray and values.flags.c_contiguous for values in got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_a_memory_mapped_text_reads_the_same(kind, dtype, tmp_path):
    text = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, dtype=dtype)
    text.tofile(tmp_path / "ids")
    mapped = np.memmap(tmp_path / "ids", dtype, "r")
    constructor, given_beside = KINDS[kind]
    others = {"batch_size": 3, "segment_len": 7, **given_beside(1000)}
    in_memory, on_disk = (constructor(ids, **others).segments(5, 99) for ids in (text, mapped))
    assert_equal(in_memory, on_disk)
    assert all(type(values) is np.ndarray for values in on_disk)


class IndexingForbidden(np.ndarray):
    """Tokens that record which places were taken, and refuse any other way of reading."""

    def take(self, indices, *args, **kwargs):
        self.taken = indices
        return np.zeros(np.shape(indices), self.dtype)

    def __getitem__(self, key):
        raise AssertionError(f"read {key} of a text that may lie on disk")


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_places_asked_for_are_read(kind):
    text = np.zeros(1000, np.uint8).view(IndexingForbidden)
    constructor, given_beside = KINDS[kind]
    constructor(text, batch_size=3, segment_len=7, **given_beside(1000)).segments(2, 4)
    assert text.taken.size == 4 * 3 * 7


def test_a_text_of_exactly_one_segment_and_one_token_less():
    for roll in Roll:
        assert training_segments(numbered(31), batch_size=5, segment_len=6, roll=roll).n_segments == 1
    with pytest.raises(UserError) as caught:
        training_segments(numbered(30), batch_size=5, segment_len=6)
    assert {"5", "6", "30"} <= set(re.findall(r"\d+", str(caught.value)))
    assert "--train.batch_size" in str(caught.value) and "--train.segment_len" in str(caught.value)


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize(
    ("shape", "sizes", "named"),
    [
        ((0,), {}, r"\(0,\)"),
        ((1,), {}, r"\(1,\)"),
        ((4, 5), {}, r"\(4, 5\)"),
        ((50,), {"batch_size": 0}, r"batch_size\D*\b0\b"),
        ((50,), {"segment_len": -1}, "segment_len.*-1"),
        ((50,), {"own": [6]}, r"\[6\].*batch_size.*\b6\b"),
        ((50,), {"own": [-1, 2]}, r"\[-1, 2\]"),
        ((50,), {"own": [2, 1]}, r"\[2, 1\]"),
        ((50,), {"own": [3, 3]}, r"\[3, 3\]"),
    ],
)
def test_texts_sizes_and_rows_that_cannot_be(constructor, shape, sizes, named):
    with pytest.raises(ValueError, match=named):
        constructor(np.zeros(shape, np.uint8), **{"batch_size": 6, "segment_len": 2} | sizes)


def test_other_settings_that_cannot_be():
    sizes = {"batch_size": 2, "segment_len": 2}
    with pytest.raises(ValueError, match=r"warmup_tokens.*-1\b"):
        evaluation_segments(numbered(50), **sizes, warmup_tokens=-1)
    for roll in (Roll.STREAM, Roll.ROWS):
        with pytest.raises(ValueError, match=rf"sentence_starts.*\broll\b.*\b{roll}\b"):
            training_segments(numbered(50), **sizes, roll=roll, sentence_starts=np.array([0, 50]))
    for stride in (-1, 3):
        with pytest.raises(ValueError, match=rf"stride\D*{stride}\b.*segment_len.*\b2\b"):
            training_segments(numbered(50), **sizes, stride=stride)
    for first_step, count in ((-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=rf"\b{count}\b.*{first_step}\b"):
            training_segments(numbered(50), **sizes).segments(first_step, count)
