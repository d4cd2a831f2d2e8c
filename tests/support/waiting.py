"""Waiting for what other threads and processes do."""

import time


def wait_until(condition, seconds=120.0):
    """Returns once `condition()` holds; fails if that takes longer than some seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(0.01)
