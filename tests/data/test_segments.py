"""Tests dealing out tokens: what each segment holds, against loops, for any text, batch and segment length."""

import doctest
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from txl_jax.data import segments
from txl_jax.data.segments import evaluation_segments, training_segments

SIZES = {"length": st.integers(2, 120), "batch_size": st.integers(1, 7), "segment_len": st.integers(1, 9)}
for_any_sizes = given(**SIZES)
CONSTRUCTORS = [training_segments, evaluation_segments]


def numbered(length):
    """A text whose tokens say where they stand."""
    return np.arange(length)


def make(constructor, length, batch_size, segment_len):
    """A reader of a numbered text; texts too short for it are left to the tests of errors."""
    if constructor is training_segments:
        assume(length - 1 >= batch_size * segment_len)
    return constructor(numbered(length), batch_size=batch_size, segment_len=segment_len)


def rows_of(values):
    """[S, B, L] to the B rows in reading order, [B, S * L]."""
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)


def assert_equal(first, second):
    for name, a, b in zip(first._fields, first, second, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@for_any_sizes
def test_evaluation_scores_every_token_but_the_first_once_and_in_order(length, batch_size, segment_len):
    reader = make(evaluation_segments, length, batch_size, segment_len)
    got = reader.segments(0, reader.n_segments)
    weights = rows_of(got.weights).astype(bool)
    assert rows_of(got.targets)[weights].tolist() == list(range(1, length)), "rows end to end are the text"
    assert rows_of(got.inputs)[weights].tolist() == list(range(length - 1))
    assert (weights[:, 1:] <= weights[:, :-1]).all(), "padding stands only at the ends of rows"
    assert not got.targets[got.weights == 0].any() and not got.inputs[got.weights == 0].any()
    assert (reader.tokens_per_epoch, reader.skipped_tokens) == (length - 1, 0)


@for_any_sizes
def test_evaluation_takes_as_few_steps_as_its_longest_row(length, batch_size, segment_len):
    reader = make(evaluation_segments, length, batch_size, segment_len)
    longest = -(-(length - 1) // batch_size)
    assert (reader.n_segments - 1) * segment_len < longest <= reader.n_segments * segment_len
    assert reader.segments(0, reader.n_segments).weights[:, 0].sum() == longest


@given(**SIZES, steps_beyond=st.integers(0, 20))
def test_evaluation_is_padding_past_the_end(steps_beyond, length, batch_size, segment_len):
    reader = make(evaluation_segments, length, batch_size, segment_len)
    got = reader.segments(reader.n_segments + steps_beyond, 3)
    assert got.targets.shape == (3, batch_size, segment_len)
    assert not got.weights.any() and not got.targets.any() and not got.inputs.any()
    assert got.reset.all()


@for_any_sizes
def test_training_reads_the_first_whole_segments_of_each_row(length, batch_size, segment_len):
    reader = make(training_segments, length, batch_size, segment_len)
    n = (length - 1) // batch_size // segment_len * segment_len
    got = reader.segments(0, reader.n_segments)
    for row, targets in enumerate(rows_of(got.targets)):
        assert targets.tolist() == list(range(1 + row * n, 1 + (row + 1) * n))
    assert (got.weights == 1).all()
    assert reader.tokens_per_epoch == got.targets.size
    assert reader.skipped_tokens == length - 1 - got.targets.size
    assert reader.skipped_tokens < batch_size * segment_len, "less than one more step is left over"


@given(**SIZES, epochs=st.integers(1, 3))
def test_training_epochs_are_alike(epochs, length, batch_size, segment_len):
    reader = make(training_segments, length, batch_size, segment_len)
    n = reader.n_segments
    assert_equal(reader.segments(epochs * n, n), reader.segments(0, n))


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@for_any_sizes
def test_inputs_are_the_targets_one_place_later_across_segment_borders(constructor, length, batch_size, segment_len):
    reader = make(constructor, length, batch_size, segment_len)
    got = reader.segments(0, reader.n_segments)
    inputs, targets, weights = map(rows_of, got[:3])
    both = weights[:, 1:] == 1
    np.testing.assert_array_equal(inputs[:, 1:][both], targets[:, :-1][both])
    np.testing.assert_array_equal(inputs[weights == 1] + 1, targets[weights == 1])


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@for_any_sizes
def test_rows_are_reset_where_a_pass_begins_and_nowhere_else(constructor, length, batch_size, segment_len):
    reader = make(constructor, length, batch_size, segment_len)
    reset = reader.segments(0, reader.n_segments + 1).reset
    assert reset[0].all() and reset[-1].all() and not reset[1:-1].any()


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@given(**SIZES, first_step=st.integers(0, 300), count=st.integers(1, 12))
def test_a_block_is_its_single_steps_from_anywhere(constructor, first_step, count, length, batch_size, segment_len):
    reader = make(constructor, length, batch_size, segment_len)
    block = reader.segments(first_step, count)
    singles = [reader.segments(step, 1) for step in range(first_step, first_step + count)]
    assert_equal(block, segments.Segments(*map(np.concatenate, zip(*singles, strict=True))))


@given(**SIZES, stop=st.integers(1, 60))
def test_a_resumed_run_reads_on_where_it_stopped(stop, length, batch_size, segment_len):
    whole = make(training_segments, length, batch_size, segment_len).segments(0, stop + 5)
    resumed = make(training_segments, length, batch_size, segment_len).segments(stop, 5)
    assert_equal(resumed, segments.Segments(*(values[stop:] for values in whole)))


@settings(max_examples=30)
@given(**SIZES, first_step=st.integers(0, 40))
def test_training_against_a_loop(first_step, length, batch_size, segment_len):
    text = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    assume(length - 1 >= batch_size * segment_len)
    got = training_segments(text, batch_size=batch_size, segment_len=segment_len).segments(first_step, 4)
    n_segments = (length - 1) // batch_size // segment_len
    for s in range(4):
        index = (first_step + s) % n_segments
        for b in range(batch_size):
            start = b * n_segments * segment_len + index * segment_len
            assert got.inputs[s, b].tolist() == text[start : start + segment_len].tolist()
            assert got.targets[s, b].tolist() == text[start + 1 : start + 1 + segment_len].tolist()
            assert got.reset[s, b] == (index == 0)


def test_a_case_drawn_by_hand():
    reader = evaluation_segments(np.array([10, 11, 12, 13, 14, 15, 16, 17]), batch_size=3, segment_len=2)
    got = reader.segments(0, 2)
    assert got.inputs.tolist() == [[[10, 11], [13, 14], [16, 0]], [[12, 0], [15, 0], [0, 0]]]
    assert got.targets.tolist() == [[[11, 12], [14, 15], [17, 0]], [[13, 0], [16, 0], [0, 0]]]
    assert got.weights.tolist() == [[[1, 1], [1, 1], [1, 0]], [[1, 0], [1, 0], [0, 0]]]
    assert got.reset.tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_types_and_shapes(constructor):
    got = constructor(np.zeros(200, np.uint8), batch_size=3, segment_len=5).segments(2, 4)
    assert [values.dtype for values in got] == [np.int32, np.int32, np.float32, bool]
    assert [values.shape for values in got] == [(4, 3, 5)] * 3 + [(4, 3)]
    assert all(type(values) is np.ndarray and values.flags.c_contiguous for values in got)


def test_a_memory_mapped_text_reads_the_same(tmp_path):
    text = np.random.default_rng(0).integers(0, 256, 1000, dtype=np.uint8)
    text.tofile(tmp_path / "ids")
    mapped = np.memmap(tmp_path / "ids", np.uint8, "r")
    for constructor in CONSTRUCTORS:
        in_memory, on_disk = (constructor(ids, batch_size=3, segment_len=7).segments(5, 9) for ids in (text, mapped))
        assert_equal(in_memory, on_disk)
        assert all(type(values) is np.ndarray for values in on_disk)


def test_reading_is_faster_than_any_model():
    reader = training_segments(np.zeros(2_000_000, np.uint8), batch_size=22, segment_len=512)
    start = time.perf_counter()
    tokens = sum(reader.segments(step, 1).targets.size for step in range(100))
    assert tokens / (time.perf_counter() - start) > 1e6  # Some 200 times slower than measured on two cores.


def test_a_text_of_exactly_one_segment_and_one_token_less():
    assert training_segments(numbered(31), batch_size=5, segment_len=6).n_segments == 1
    with pytest.raises(ValueError) as caught:
        training_segments(numbered(30), batch_size=5, segment_len=6)
    for part in ("30 tokens", "5 x 6 = 30", "--train.batch_size", "--train.segment_len"):
        assert part in str(caught.value)


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize("shape", [(0,), (1,), (4, 5)])
def test_tokens_must_be_one_axis_of_two_or_more(constructor, shape):
    with pytest.raises(ValueError, match="give one axis of at least 2 tokens"):
        constructor(np.zeros(shape, np.uint8), batch_size=1, segment_len=1)


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize("sizes", [{"batch_size": 0, "segment_len": 3}, {"batch_size": 3, "segment_len": -1}])
def test_sizes_must_be_positive(constructor, sizes):
    with pytest.raises(ValueError, match=f"batch_size is {sizes['batch_size']} and segment_len is"):
        constructor(numbered(50), **sizes)


@pytest.mark.parametrize(("first_step", "count"), [(-1, 2), (0, 0)])
def test_positions_must_exist(first_step, count):
    reader = training_segments(numbered(50), batch_size=2, segment_len=3)
    with pytest.raises(ValueError, match=f"{count} segments from step {first_step}"):
        reader.segments(first_step, count)


def test_docstring_examples():
    assert doctest.testmod(segments) == (0, 4)
