"""Tests a time of day that jumps in the middle of a run: no number of it changes, and none is negative."""

import math
import re

import pytest

from support.faults import KILLED, assert_equal_runs, finished
from txl_jax.runtime.environment import duration
from txl_jax.runtime.log import read_metrics

HOUR, DAY = 3600, 86400


@pytest.mark.full
def test_the_clock_jumps_forward_a_day_and_back_an_hour(place, undisturbed):
    """Times of files jump with it, so that after the first jump the newest checkpoint is the oldest by them.

    The first jump comes while arrays are being written: Orbax gives a save 20 minutes by this clock, unless its options
    have another limit.
    """
    forward = {"fault": "clock", "at": "* *latest/12.orbax-checkpoint-tmp*", "count": 8, "jump": DAY}
    back = {"fault": "clock", "at": "os.mkdir *best/24.orbax-checkpoint-tmp", "jump": -DAY - HOUR}
    kill = {"fault": "kill", "at": "os.rename *latest/24.orbax-checkpoint-tmp*"}
    killed = place.train("clock", forward, back, kill).end()
    assert killed.code == KILLED
    resumed = finished(place.train("clock"))
    assert re.search(r"resum\w+\D*\b18\b", resumed.out)
    assert_equal_runs(place.workdir("clock"), undisturbed)
    out = killed.out + resumed.out
    assert not re.search(r"(ETA|in|,|s/) +-\d", out) and duration(math.inf) not in out, out
    assert all(record.get("tokens_per_second", 1) > 0 for record in read_metrics(place.workdir("clock")))
