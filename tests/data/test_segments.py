"""Tests segments of a text against lists in plain Python: batches, orders, processes, resuming,
random numbers, and segments that are made ahead.
"""

import itertools
import queue
import re
import threading
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from support.tiny_run import assert_equal
from txl_jax.config import Roll
from txl_jax.data import epoch_order
from txl_jax.data.epoch_order import ShuffledSentences, random_permutation, random_words
from txl_jax.data.prefetch import Prefetcher
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.recurrence import Segments


def numbered(length):
    return np.arange(length)


def sentence_starts(length):
    """Any sentences of a text of this length. Some are empty, and up to 3 tokens precede the
    first.
    """
    cuts = np.random.default_rng(length).integers(0, length + 1, length // 4)
    first = min(length % 4, *cuts, length)
    return np.sort(np.concatenate([[first], cuts, [length]]))


# Ways to cut a text, by name: the constructor, and the arguments that depend on the text's length.
KINDS = {
    "sequential": (training_segments, lambda length: {}),
    "stream rolled": (training_segments, lambda length: {"roll": Roll.STREAM}),
    "rows rolled": (training_segments, lambda length: {"roll": Roll.ROWS}),
    "sentences": (training_segments, lambda length: {"sentence_starts": sentence_starts(length)}),
    "evaluation": (evaluation_segments, lambda length: {}),
    "warm-up": (evaluation_segments, lambda length: {"warmup_tokens": 1 + length // 7}),
}
TRAINING = ("sequential", "stream rolled", "rows rolled", "sentences")


def make(kind, length, batch_size, segment_len, **others):
    """A reader of a numbered text. Texts too short for it are left to the tests of errors."""
    constructor, arguments_for = KINDS[kind]
    if kind in TRAINING and length - 1 < batch_size * segment_len:
        reject()
    others = arguments_for(length) | others
    return constructor(numbered(length), batch_size=batch_size, segment_len=segment_len, **others)


def rows_of(values):
    """[S, B, L] to the B rows in reading order, [B, S * L]."""
    return values.transpose(1, 0, 2).reshape(values.shape[1], -1)


def epoch_of(reader, epoch):
    return reader.segments(epoch * reader.n_segments, reader.n_segments)


SIZES = {
    "length": st.integers(2, 120),
    "batch_size": st.integers(1, 7),
    "segment_len": st.integers(1, 9),
}


def turned(values, by):
    """The values from place `by` on, and then those before it."""
    by = by % len(values)
    return values[by:] + values[:by]


def row_length(length, batch_size, segment_len, stride):
    """How many places each row reads in an epoch."""
    row_len = segment_len
    while row_len + stride <= (length - 1) // batch_size:
        row_len += stride
    return row_len


def rolled_rows(length, batch_size, row_len, words):
    """The rows of stretches of the text, each turned by a random word."""
    pairs = list(itertools.pairwise(range(length)))
    rows = []
    for b in range(batch_size):
        begin = b * (length - 1) // batch_size
        end = (b + 1) * (length - 1) // batch_size
        rows.append(turned(pairs[begin:end], words[b])[:row_len])
    return rows


def shuffled_sentences(length, seed, epoch):
    """The places of a text in the order of its shuffled sentences."""
    starts = sentence_starts(length).tolist()
    places = list(range(starts[0]))
    for i in random_permutation(seed, epoch, len(starts) - 1).tolist():
        places += range(starts[i], starts[i + 1])
    return places


def training_by_hand(kind, length, batch_size, segment_len, stride, *, seed, epoch):
    """The (input, target) places that each row reads in an epoch, once each, in plain lists: B
    lists.
    """
    row_len = row_length(length, batch_size, segment_len, stride)
    if kind == "rows rolled":
        words = random_words(seed, epoch, batch_size).tolist()
        return rolled_rows(length, batch_size, row_len, words)

    places = list(range(length))
    if kind == "sentences":
        places = shuffled_sentences(length, seed, epoch)
    pairs = list(itertools.pairwise(places))
    if kind == "stream rolled":
        pairs = turned(pairs, random_words(seed, epoch, 1).item())
    return [pairs[b * row_len : (b + 1) * row_len] for b in range(batch_size)]


class Place(NamedTuple):
    """What a row reads at a place of the text."""

    input: int
    target: int
    weight: int


PADDING = Place(0, 0, 0)


def evaluation_by_hand(length, batch_size, segment_len, warmup):
    """The places that each row reads, padded to whole segments: B lists."""
    n = -(-(length - 1) // batch_size)
    rows = []
    for b in range(batch_size):
        first = 1 + b * n
        row = []
        if first < length:
            for target in range(max(1, first - warmup), first):
                row.append(Place(target - 1, target, weight=0))
        for target in range(first, min(first + n, length)):
            row.append(Place(target - 1, target, weight=1))
        rows.append(row)

    n_segments = -(-max(map(len, rows)) // segment_len)
    for row in rows:
        row += [PADDING] * (n_segments * segment_len - len(row))
    return rows


@pytest.mark.parametrize("kind", TRAINING)
@given(
    **SIZES,
    stride=st.integers(1, 12),
    # Seeds are taken modulo 2^64, so negative ones and 2^64 itself are legal.
    seed=st.integers(-(2**31), 2**64),
    epoch=st.integers(0, 10),
)
def test_training_against_lists(kind, stride, seed, epoch, length, batch_size, segment_len):
    """With a stride below L, segments begin with places that the one before has scored."""
    stride = min(stride, segment_len)
    reader = make(kind, length, batch_size, segment_len, stride=stride, seed=seed)
    segments = epoch_of(reader, epoch)

    rows = training_by_hand(kind, length, batch_size, segment_len, stride, seed=seed, epoch=epoch)
    expected = []
    for first in range(0, len(rows[0]) - segment_len + 1, stride):
        expected.append([row[first : first + segment_len] for row in rows])
    expected = np.array(expected)
    np.testing.assert_array_equal(segments.inputs, expected[..., 0], err_msg="inputs")
    np.testing.assert_array_equal(segments.targets, expected[..., 1], err_msg="targets")
    assert segments.reset[0].all()
    assert not segments.reset[1:].any()

    # Every segment but the first begins with places that were scored before.
    n_repeated = segment_len - stride
    assert segments.weights[0].all()
    assert segments.weights[1:, :, n_repeated:].all()
    assert not segments.weights[1:, :, :n_repeated].any()
    scored = segments.targets[segments.weights > 0].tolist()
    assert len(set(scored)) == len(scored), "none counts twice"
    assert len(scored) == reader.tokens_per_epoch
    assert reader.skipped_tokens == length - 1 - len(scored)
    assert reader.skipped_tokens < batch_size * stride


@given(**SIZES, warmup=st.integers(0, 30), beyond=st.integers(0, 20))
# The last row has no target of its own.
@example(length=6, batch_size=4, segment_len=3, warmup=2, beyond=0)
def test_evaluation_against_lists(warmup, beyond, length, batch_size, segment_len):
    """After the end of the text there is only padding."""
    reader = make("evaluation", length, batch_size, segment_len, warmup_tokens=warmup)
    segments = reader.segments(0, reader.n_segments)

    expected = np.array(evaluation_by_hand(length, batch_size, segment_len, warmup))
    np.testing.assert_array_equal(rows_of(segments.inputs), expected[..., 0], err_msg="inputs")
    np.testing.assert_array_equal(rows_of(segments.targets), expected[..., 1], err_msg="targets")
    np.testing.assert_array_equal(rows_of(segments.weights), expected[..., 2], err_msg="weights")
    assert segments.reset[0].all()
    assert not segments.reset[1:].any()
    assert reader.tokens_per_epoch == length - 1
    assert reader.skipped_tokens == 0

    padding = reader.segments(reader.n_segments + beyond, 3)
    assert padding.targets.shape == (3, batch_size, segment_len)
    assert padding.reset.all()
    assert not padding.weights.any()
    assert not padding.targets.any()
    assert not padding.inputs.any()


@pytest.mark.parametrize("kind", KINDS)
@given(
    **SIZES,
    calls=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 12)), min_size=1, max_size=6),
)
def test_a_resumed_run_reads_on_where_it_stopped(kind, calls, length, batch_size, segment_len):
    """From any step, in blocks of any size, whatever was read before."""
    # As many steps as the last block of `calls` can end at.
    whole = make(kind, length, batch_size, segment_len).segments(0, 300 + 12)
    reader = make(kind, length, batch_size, segment_len)
    for step, count in calls:
        expected = Segments(*(values[step : step + count] for values in whole))
        assert_equal(reader.segments(step, count), expected)


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, n_processes=st.integers(1, 4), first_step=st.integers(0, 20), data=st.data())
def test_processes_share_the_rows_of_a_single_process(
    kind, n_processes, first_step, data, length, batch_size, segment_len
):
    """Each reads the rows that it owns. Sizes and counts are for all processes together."""
    whole = make(kind, length, batch_size, segment_len)
    segments = whole.segments(first_step, 4)
    owner = st.integers(0, n_processes - 1)
    owners = np.array(data.draw(st.lists(owner, min_size=batch_size, max_size=batch_size)))

    for process in np.unique(owners):
        rows = np.flatnonzero(owners == process)
        share = make(kind, length, batch_size, segment_len, own=rows)
        expected = Segments(*(values[:, rows] for values in segments))
        assert_equal(share.segments(first_step, 4), expected)
        for name in ("batch_size", "n_segments", "tokens_per_epoch", "skipped_tokens"):
            assert getattr(share, name) == getattr(whole, name), name


def construct(constructor, **changes):
    """Constructs a reader of valid settings with some of them changed."""
    settings = {"tokens": numbered(50), "batch_size": 6, "segment_len": 2}
    return constructor(**settings | changes)


@pytest.mark.parametrize("constructor", [training_segments, evaluation_segments])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"tokens": np.zeros(0, np.uint8)}, re.escape("(0,)"), id="no tokens"),
        pytest.param({"tokens": np.zeros(1, np.uint8)}, re.escape("(1,)"), id="one token"),
        pytest.param({"tokens": np.zeros((4, 5), np.uint8)}, re.escape("(4, 5)"), id="two axes"),
        pytest.param({"batch_size": 0}, r"batch_size\D*\b0\b", id="no rows"),
        pytest.param({"segment_len": -1}, "segment_len.*-1", id="negative length"),
        pytest.param({"own": [6]}, re.escape("[6]"), id="row beyond the last"),
        pytest.param({"own": [-1, 2]}, re.escape("[-1, 2]"), id="negative row"),
        pytest.param({"own": [2, 1]}, re.escape("[2, 1]"), id="unsorted rows"),
        pytest.param({"own": [3, 3]}, re.escape("[3, 3]"), id="a row twice"),
    ],
)
def test_texts_and_settings_that_cannot_be(constructor, changes, named):
    with pytest.raises(ValueError, match=named):
        construct(constructor, **changes)


def test_a_negative_warm_up_is_an_error():
    with pytest.raises(ValueError, match=r"warmup_tokens.*-1\b"):
        construct(evaluation_segments, warmup_tokens=-1)


def test_a_text_of_one_token_less_than_a_segment_needs_is_an_error():
    """The first of the 50 tokens is no target, so 5 rows of 10 targets need 51."""
    with pytest.raises(ValueError, match=r"5 x 10, got 50\b.*--train\.batch_size"):
        construct(training_segments, segment_len=10, batch_size=5)


@pytest.mark.parametrize("stride", [-1, 3])
def test_a_stride_below_1_or_above_the_segments_length_is_an_error(stride):
    with pytest.raises(ValueError, match=rf"segment_len=2\b.*stride={stride}\b"):
        construct(training_segments, stride=stride)


@pytest.mark.parametrize("roll", [Roll.STREAM, Roll.ROWS])
def test_shuffled_sentences_cannot_be_rolled(roll):
    with pytest.raises(ValueError, match=rf"sentence_starts.*\broll\b.*\b{roll}\b"):
        construct(training_segments, roll=roll, sentence_starts=np.array([0, 50]))


@pytest.mark.parametrize(("first_step", "count"), [(-1, 2), (0, 0)])
def test_steps_that_cannot_be(first_step, count):
    reader = construct(training_segments)
    with pytest.raises(ValueError, match=rf"\b{count}\b.*{first_step}\b"):
        reader.segments(first_step, count)


class Untouchable(np.ndarray):
    """Tokens on disk, from which only places may be taken. `n_taken` has their number at each
    call.
    """

    def take(self, places, **options):
        self.n_taken.append(places.size)
        return np.zeros(places.shape, self.dtype)

    def __getitem__(self, key):
        raise AssertionError(f"read {key}")


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_places_asked_for_are_read(kind):
    constructor, arguments_for = KINDS[kind]
    text = np.zeros(1000, np.uint8).view(Untouchable)
    text.n_taken = []
    constructor(text, batch_size=3, segment_len=7, **arguments_for(1000)).segments(2, 4)
    n_places = 4 * 3 * 7
    assert text.n_taken == [n_places, n_places], "inputs, and targets"


def test_the_order_of_an_epoch_is_kept(monkeypatch):
    """It is computed once."""
    starts = np.cumsum([2, *np.random.default_rng(0).integers(0, 6, 20)])
    sentences = ShuffledSentences(starts, n_tokens=starts[-1], seed=4)
    whole = sentences(1, np.array(0), starts[-1] - 1)

    monkeypatch.setattr(epoch_order, "random_permutation", None)  # Computing again would fail.
    assert_equal(sentences(1, np.array(0), starts[-1] - 1), whole)


# All starts but the first, and the last one, which is the length of the text.
@pytest.mark.parametrize("i", range(1, 20))
def test_sentence_starts_that_decrease_anywhere_are_an_error(i):
    starts = np.cumsum([2, *np.random.default_rng(0).integers(0, 6, 20)])
    starts[i] = starts[i - 1] - 1
    with pytest.raises(ValueError, match="decrease"):
        ShuffledSentences(starts, n_tokens=starts[-1], seed=4)


def test_the_numbers_are_those_of_runs_that_exist():
    """Other numbers would make a resumed run read another text.

    The numbers are what these calls returned when the runs began. They must be the same with every
    version of numpy.
    """
    assert random_words(1111, 0, 2).tolist() == [9149335232105706365, 13657752410413150597]
    assert random_words(-1, 7, 1).tolist() == [4692318544024626926]
    assert random_permutation(1111, 0, 12).tolist() == [9, 7, 0, 11, 8, 2, 5, 1, 6, 3, 10, 4]
    assert random_permutation(1111, 1, 12).tolist() == [3, 0, 6, 10, 7, 8, 11, 1, 9, 5, 4, 2]


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(np.array(0), id="a number"),
        pytest.param(np.array([0]), id="one start"),
        pytest.param(np.zeros((3, 4), int), id="two axes"),
        pytest.param(np.zeros(3, np.uint64), id="unsigned"),
        pytest.param(np.array([0, 5, 9]), id="ends early"),
        pytest.param(np.array([0, 11]), id="ends late"),
        pytest.param(np.array([-1, 10]), id="begins early"),
    ],
)
def test_starts_are_one_axis_of_signed_integers_that_span_the_text(starts):
    shape = re.escape(str(starts.shape))
    with pytest.raises(ValueError, match=rf"\b10, got {starts.dtype} of shape {shape}"):
        ShuffledSentences(starts, n_tokens=10, seed=0)


SECONDS = 20.0  # Long enough for any machine. Only a failure waits so long.


class Recorder:
    """Makes blocks that contain their number, and records which were begun.

    Blocks from `hold_from` on wait for `go`.
    """

    def __init__(self, hold_from=None, fail_at=()):
        self.hold_from = hold_from
        self.fail_at = set(fail_at)
        self.go = threading.Event()
        self.begun = queue.Queue()
        self.calls = []
        self.threads = set()

    def __call__(self, first_step, count):
        self.calls.append(first_step)
        self.threads.add(threading.current_thread())
        self.begun.put(first_step)
        if self.hold_from is not None and first_step >= self.hold_from:
            assert self.go.wait(SECONDS)
        if first_step in self.fail_at:
            raise OSError(f"no block {first_step}")
        return first_step, count

    def await_calls(self, n):
        return [self.begun.get(timeout=SECONDS) for _ in range(n)]


def test_blocks_are_made_once_while_the_caller_does_something_else_and_none_past_the_end():
    recorder = Recorder()
    # A block from step 18 on would end after the last step, 19.
    with Prefetcher(recorder, segments_per_call=2, steps=19) as prefetcher:
        assert prefetcher(10) == (10, 2)
        assert recorder.await_calls(3) == [10, 12, 14]
        assert prefetcher(12) == (12, 2)
        assert recorder.await_calls(1) == [16]
        assert recorder.begun.empty(), "no more than two ahead"
        assert prefetcher(14) == (14, 2)
        assert prefetcher(16) == (16, 2)
        assert not prefetcher._pending, "every block that was begun has been returned"

    assert recorder.calls == [10, 12, 14, 16]
    assert recorder.threads.isdisjoint([threading.current_thread()])
    assert len(recorder.threads) == 1


def test_an_error_is_raised_where_its_block_is_asked_for_and_only_there():
    """Asking again tries again."""
    recorder = Recorder(fail_at=[4])
    with Prefetcher(recorder, segments_per_call=2, steps=10) as prefetcher:
        assert prefetcher(0) == (0, 2)
        assert prefetcher(2) == (2, 2)
        assert recorder.await_calls(3) == [0, 2, 4]
        for _ in range(2):
            with pytest.raises(OSError, match="no block 4"):
                prefetcher(4)

        recorder.fail_at.clear()
        assert prefetcher(4) == (4, 2)
        assert prefetcher(6) == (6, 2)
        assert prefetcher(8) == (8, 2)


def test_closing_drops_the_queue_and_waits_for_the_block_in_the_making():
    recorder = Recorder(hold_from=1)
    prefetcher = Prefetcher(recorder, segments_per_call=1, steps=100)
    prefetcher(0)
    # Block 1 is in the making, and block 2 is in the queue.
    assert recorder.await_calls(2) == [0, 1]

    # Block 1 is finished while `close` waits for it.
    threading.Timer(0.05, recorder.go.set).start()
    prefetcher.close()
    assert recorder.calls == [0, 1]
    assert not any(thread.is_alive() for thread in recorder.threads)

    # Closing twice is allowed, and reading after it is not.
    prefetcher.close()
    with pytest.raises(RuntimeError):
        prefetcher(1)
    assert recorder.calls == [0, 1], "nothing more is read"
