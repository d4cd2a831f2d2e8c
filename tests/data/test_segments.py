"""Tests batching: lists for any text, batch, segment, order and process, random numbers, segments
made ahead.
"""

import itertools
import queue
import re
import threading

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
    """Any sentences of a text of this length: some are empty, and up to 3 tokens precede the
    first.
    """
    cuts = np.random.default_rng(length).integers(0, length + 1, length // 4)
    return np.sort(np.concatenate([[min(length % 4, *cuts, length)], cuts, [length]]))


# Ways to cut a text, by a name: the constructor, and what it is given beside the sizes (from the
# text's length).
KINDS = {
    "sequential": (training_segments, lambda length: {}),
    "stream rolled": (training_segments, lambda length: {"roll": Roll.STREAM}),
    "rows rolled": (training_segments, lambda length: {"roll": Roll.ROWS}),
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
    return reader.segments(epoch * reader.n_segments, reader.n_segments)


SIZES = {
    "length": st.integers(2, 120),
    "batch_size": st.integers(1, 7),
    "segment_len": st.integers(1, 9),
}
TRAINING = [name for name, (constructor, _) in KINDS.items() if constructor is training_segments]


def turned(values, by):
    return values[by % len(values) :] + values[: by % len(values)]


def training_by_hand(kind, length, batch_size, segment_len, stride, *, seed, epoch):
    """The (input, target) places that each row reads in an epoch, once each, in plain lists: B
    lists.
    """
    row_len = segment_len
    while row_len + stride <= (length - 1) // batch_size:
        row_len += stride
    pairs = list(itertools.pairwise(range(length)))
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
        pairs = list(
            itertools.pairwise(
                [*range(starts[0]), *(place for i in order for place in sentences[i])]
            )
        )
    return [pairs[b * row_len : (b + 1) * row_len] for b in range(batch_size)]


def evaluation_by_hand(length, batch_size, segment_len, warmup):
    """Inputs, targets and weights of each row, padded to whole segments: three nested lists [B, S *
    L].
    """
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
@given(
    **SIZES, stride=st.integers(1, 12), seed=st.integers(-(2**31), 2**64), epoch=st.integers(0, 10)
)
def test_training_against_lists(kind, stride, seed, epoch, length, batch_size, segment_len):
    """With a stride below L, segments begin with places that the one before has scored."""
    stride = min(stride, segment_len)
    reader = make(kind, length, batch_size, segment_len, stride=stride, seed=seed)
    got = epoch_of(reader, epoch)
    expected = training_by_hand(
        kind, length, batch_size, segment_len, stride, seed=seed, epoch=epoch
    )
    firsts = range(0, len(expected[0]) - segment_len + 1, stride)
    segments = np.array(
        [[row[first : first + segment_len] for row in expected] for first in firsts]
    )
    np.testing.assert_array_equal(got.inputs, segments[..., 0])
    np.testing.assert_array_equal(got.targets, segments[..., 1])
    assert got.reset[0].all() and not got.reset[1:].any()
    again = segment_len - stride
    assert (
        got.weights[0].all()
        and got.weights[1:, :, again:].all()
        and not got.weights[1:, :, :again].any()
    )
    scored = got.targets[got.weights > 0].tolist()
    assert len(set(scored)) == len(scored) == reader.tokens_per_epoch, "none counts twice"
    assert reader.skipped_tokens == length - 1 - len(scored) < batch_size * stride


@given(**SIZES, warmup=st.integers(0, 30), beyond=st.integers(0, 20))
# The last row has no target of its own.
@example(length=6, batch_size=4, segment_len=3, warmup=2, beyond=0)
def test_evaluation_against_lists(warmup, beyond, length, batch_size, segment_len):
    reader = make("evaluation", length, batch_size, segment_len, warmup_tokens=warmup)
    got = reader.segments(0, reader.n_segments)
    expected = evaluation_by_hand(length, batch_size, segment_len, warmup)
    assert [rows_of(values).tolist() for values in got[:3]] == expected
    assert got.reset[0].all() and not got.reset[1:].any()
    assert (reader.tokens_per_epoch, reader.skipped_tokens) == (length - 1, 0)
    padding = reader.segments(reader.n_segments + beyond, 3)
    assert padding.targets.shape == (3, batch_size, segment_len) and padding.reset.all()
    assert not padding.weights.any() and not padding.targets.any() and not padding.inputs.any()


@pytest.mark.parametrize("kind", KINDS)
@given(
    **SIZES,
    calls=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 12)), min_size=1, max_size=6),
)
def test_a_resumed_run_reads_on_where_it_stopped(kind, calls, length, batch_size, segment_len):
    """From any step, in blocks of any size, whatever was asked before."""
    whole = make(kind, length, batch_size, segment_len).segments(0, 312)
    reader = make(kind, length, batch_size, segment_len)
    for step, count in calls:
        assert_equal(
            reader.segments(step, count),
            Segments(*(values[step : step + count] for values in whole)),
        )


@pytest.mark.parametrize("kind", KINDS)
@given(**SIZES, n_processes=st.integers(1, 4), first_step=st.integers(0, 20), data=st.data())
def test_processes_share_the_rows_of_one(
    kind, n_processes, first_step, data, length, batch_size, segment_len
):
    whole = make(kind, length, batch_size, segment_len)
    expected = whole.segments(first_step, 4)
    owners = np.array(
        data.draw(
            st.lists(st.integers(0, n_processes - 1), min_size=batch_size, max_size=batch_size)
        )
    )
    for process in np.unique(owners):
        own = np.flatnonzero(owners == process)
        share = make(kind, length, batch_size, segment_len, own=own)
        assert_equal(
            share.segments(first_step, 4), Segments(*(array[:, own] for array in expected))
        )
        for name in ("batch_size", "n_segments", "tokens_per_epoch", "skipped_tokens"):
            assert getattr(share, name) == getattr(whole, name), "numbers of all processes together"


WRONG = [
    *(
        ({"tokens": np.zeros(shape, np.uint8)}, re.escape(str(shape)))
        for shape in ((0,), (1,), (4, 5))
    ),
    ({"batch_size": 0}, r"batch_size\D*\b0\b"),
    ({"segment_len": -1}, "segment_len.*-1"),
    *(({"own": own}, re.escape(str(own))) for own in ([6], [-1, 2], [2, 1], [3, 3])),
]
WRONG = [
    (constructor, *case)
    for constructor in (training_segments, evaluation_segments)
    for case in WRONG
]
WRONG += [
    (evaluation_segments, {"warmup_tokens": -1}, r"warmup_tokens.*-1\b"),
    # One token less than a segment has.
    (
        training_segments,
        {"segment_len": 10, "batch_size": 5},
        r"5 x 10, got 50\b.*--train\.batch_size",
    ),
    *(
        (training_segments, {"stride": stride}, rf"segment_len=2\b.*stride={stride}\b")
        for stride in (-1, 3)
    ),
]


@pytest.mark.parametrize(("constructor", "settings", "named"), WRONG)
def test_texts_and_settings_that_cannot_be(constructor, settings, named):
    with pytest.raises(ValueError, match=named):
        constructor(**{"tokens": numbered(50), "batch_size": 6, "segment_len": 2} | settings)


def test_orders_and_steps_that_cannot_be():
    sizes = {"batch_size": 2, "segment_len": 2}
    for roll in (Roll.STREAM, Roll.ROWS):
        with pytest.raises(ValueError, match=rf"sentence_starts.*\broll\b.*\b{roll}\b"):
            training_segments(numbered(50), **sizes, roll=roll, sentence_starts=np.array([0, 50]))
    for first_step, count in ((-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=rf"\b{count}\b.*{first_step}\b"):
            training_segments(numbered(50), **sizes).segments(first_step, count)


class Untouchable(np.ndarray):
    """Tokens that lie on disk: only places are taken of them."""

    def take(self, places, **options):
        self.taken = places.size
        return np.zeros(places.shape, self.dtype)

    def __getitem__(self, key):
        raise AssertionError(f"read {key}")


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_places_asked_for_are_read(kind):
    constructor, given_beside = KINDS[kind]
    text = np.zeros(1000, np.uint8).view(Untouchable)
    constructor(text, batch_size=3, segment_len=7, **given_beside(1000)).segments(2, 4)
    assert text.taken == 4 * 3 * 7


def test_the_order_of_an_epoch_is_kept(monkeypatch):
    starts = np.cumsum([2, *np.random.default_rng(0).integers(0, 6, 20)])
    made = ShuffledSentences(starts, n_tokens=starts[-1], seed=4)
    whole = made(1, np.array(0), starts[-1] - 1)
    monkeypatch.setattr(epoch_order, "random_permutation", None)
    assert_equal(made(1, np.array(0), starts[-1] - 1), whole)
    for i in range(1, 20):
        wrong = starts.copy()
        wrong[i] = wrong[i - 1] - 1
        with pytest.raises(ValueError, match="decrease"):
            ShuffledSentences(wrong, n_tokens=starts[-1], seed=4)


def test_the_numbers_are_those_of_runs_that_exist():
    """Other numbers would make a resumed run read another text.

    Made by `random_words(1111, 0, 2).tolist()` and so on; they may change with no version of numpy.
    """
    assert random_words(1111, 0, 2).tolist() == [9149335232105706365, 13657752410413150597]
    assert random_words(-1, 7, 1).tolist() == [4692318544024626926]
    assert random_permutation(1111, 0, 12).tolist() == [9, 7, 0, 11, 8, 2, 5, 1, 6, 3, 10, 4]
    assert random_permutation(1111, 1, 12).tolist() == [3, 0, 6, 10, 7, 8, 11, 1, 9, 5, 4, 2]


@pytest.mark.parametrize(
    "starts",
    [
        np.array(0),
        np.array([0]),
        np.zeros((3, 4), int),
        np.zeros(3, np.uint64),
        [0, 5, 9],
        [0, 11],
        [-1, 10],
    ],
)
def test_starts_are_one_axis_of_signed_integers_that_span_the_text(starts):
    starts = np.array(starts)
    with pytest.raises(
        ValueError, match=rf"\b10, got {starts.dtype} of shape {re.escape(str(starts.shape))}"
    ):
        ShuffledSentences(starts, n_tokens=10, seed=0)


SECONDS = 20.0  # Long enough for any machine; only a failure waits so long.


class Recorder:
    """Makes blocks that contain their number, and records which were begun; those from `hold_from`
    on wait for `go`.
    """

    def __init__(self, hold_from=None, fail_at=()):
        self.begun, self.calls, self.threads = queue.Queue(), [], set()
        self.go, self.hold_from, self.fail_at = threading.Event(), hold_from, set(fail_at)

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
    with Prefetcher(recorder, segments_per_call=2, steps=19) as prefetcher:
        assert prefetcher(10) == (10, 2)
        assert recorder.await_calls(3) == [10, 12, 14]
        assert prefetcher(12) == (12, 2)
        assert recorder.await_calls(1) == [16]
        assert recorder.begun.empty(), "no more than two ahead"
        assert [prefetcher(14), prefetcher(16)] == [(14, 2), (16, 2)]
        assert not prefetcher._pending
    assert recorder.calls == [10, 12, 14, 16]
    assert recorder.threads.isdisjoint([threading.current_thread()]) and len(recorder.threads) == 1


def test_an_error_is_raised_where_its_block_is_asked_for_and_only_there():
    recorder = Recorder(fail_at=[4])
    with Prefetcher(recorder, segments_per_call=2, steps=10) as prefetcher:
        assert [prefetcher(0), prefetcher(2)] == [(0, 2), (2, 2)]
        assert recorder.await_calls(3) == [0, 2, 4]
        for _ in range(2):
            with pytest.raises(OSError, match="no block 4"):
                prefetcher(4)
        recorder.fail_at.clear()
        assert [prefetcher(4), prefetcher(6), prefetcher(8)] == [(4, 2), (6, 2), (8, 2)]


def test_closing_drops_the_queue_and_waits_for_the_block_in_the_making():
    recorder = Recorder(hold_from=1)
    prefetcher = Prefetcher(recorder, segments_per_call=1, steps=100)
    prefetcher(0)
    assert recorder.await_calls(2) == [0, 1]
    threading.Timer(0.05, recorder.go.set).start()
    prefetcher.close()
    assert recorder.calls == [0, 1] and not any(thread.is_alive() for thread in recorder.threads)
    prefetcher.close()
    with pytest.raises(RuntimeError):
        prefetcher(1)
    assert recorder.calls == [0, 1], "nothing more is read"
