"""Tests making segments ahead: which blocks are made when, errors and the end."""

import queue
import threading

import pytest

from txl_jax.data.prefetch import Prefetcher

SECONDS = 20.0  # Long enough for any machine; only a failure waits so long.


class Recorder:
    """Makes blocks that contain their number, and records which were begun; those from `hold_from` on wait for `go`."""

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
        """The first `n` steps for which a block was begun, waiting for them."""
        return [self.begun.get(timeout=SECONDS) for _ in range(n)]


@pytest.mark.parametrize(("start", "steps"), [(0, 18), (6, 18), (0, 20)])
def test_a_run_makes_each_block_once_and_none_past_its_end(start, steps):
    recorder = Recorder()
    with Prefetcher(recorder, segments_per_call=3, steps=steps) as prefetcher:
        assert [prefetcher(step) for step in range(start, 18, 3)] == [(step, 3) for step in range(start, 18, 3)]
    assert recorder.calls == list(range(start, 18, 3))


def test_the_following_blocks_are_made_while_the_caller_does_something_else():
    recorder = Recorder()
    with Prefetcher(recorder, segments_per_call=2, steps=100) as prefetcher:
        assert prefetcher(10) == (10, 2)
        assert recorder.await_calls(3) == [10, 12, 14]
        assert prefetcher(12) == (12, 2)
        assert recorder.await_calls(1) == [16]
        assert recorder.begun.empty(), "no more than two ahead"
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
