"""Waiting for other threads and processes."""

import time


def wait_until(condition, seconds=120.0):
    """Returns once `condition()` holds, and fails if that takes longer than these seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(0.01)
