"""Tests a disk that fills up, and a clock that jumps.

A full disk gives one error and loses no saved file. With space again the run ends with the same
numbers. A time of day that jumps does not change a number.
"""

import dataclasses
import math
import re

import pytest

from support.faults import KILLED, assert_equal_runs, few_or_all, finished
from txl_jax.runtime.checkpoint import find_damage, find_steps
from txl_jax.runtime.environment import duration
from txl_jax.runtime.log import read_metrics


@dataclasses.dataclass
class Moment:
    """A moment at which the disk fills up."""

    at: str  # A pattern of the file operation before it.
    limit: dict[str, int]  # How large files may still become, as `victim.py` takes it.
    words: list[str]  # Further words of the error.


# Arrays take more than LOG, and the lines of the rest of a run less. How long the log is by then
# depends on the number of starts and the length of the paths in it.
LOG = {"more": 3_000}
FULL = {"largest": 0}
PREPARING = {
    "records": Moment("os.mkdir *tfds*incomplete*", FULL, ["Penn Treebank", "--cache_dir"]),
    "tokens": Moment("open *tokens/*/train.npy", {"largest": 100_000}, ["/tokens", "--cache_dir"]),
    "config.json": Moment("open */.config.json.*", {"largest": 100}, ["config.json"]),
    "metrics": Moment("os.mkdir */tensorboard", {"largest": 300}, ["/run/log.txt"]),
}
SAVING = {
    "a checkpoint": Moment("os.mkdir *latest/12.orbax-checkpoint-tmp", LOG, ["step 12"]),
    # The next save, and the log, fail too: it is a matter of time which error is reported.
    "digests": Moment("open *latest/18/.digests.json.*", FULL, []),
    "best parameters": Moment("os.mkdir *best/24.orbax-checkpoint-tmp", LOG, ["step 24"]),
    "results": Moment("open */.results.json.*", FULL, ["results.json"]),
}
MOMENTS = PREPARING | SAVING
FAST = ("a checkpoint", "results")


def whole_steps(workdir):
    """The step of the latest whole checkpoint of each kind, or 0."""
    steps = {"latest": 0, "best": 0}
    for kind in steps:
        for step, path in find_steps(workdir / "checkpoints" / kind):
            if find_damage(path) is None:
                steps[kind] = max(steps[kind], step)
    return steps


@pytest.mark.parametrize("moments", few_or_all(FAST, tuple(MOMENTS)))
def test_no_file_may_grow(moments, place, undisturbed):
    """A full disk gives one error and loses no checkpoint, and the run resumes with space again."""
    name = f"full-{len(moments)}"
    for moment in moments:
        fault = MOMENTS[moment]
        before = whole_steps(place.workdir(name))

        ended = place.train(name, fault="full", at=fault.at, **fault.limit).end()

        assert ended.returncode == 1, (moment, ended.stdout)
        assert ended.stderr.startswith("error: "), (moment, ended.stderr)
        assert ended.stderr.count("\n") == 1, (moment, ended.stderr)
        for words in ["File too large", *fault.words]:
            assert words in ended.stderr, (moment, words, ended.stderr)
        after = whole_steps(place.workdir(name))
        for kind, step in before.items():
            assert after[kind] >= step, (moment, kind)

    finished(place.train(name))
    assert_equal_runs(place.workdir(name), undisturbed)


HOUR = 3600  # Seconds.
DAY = 86400


@pytest.mark.full
def test_the_clock_jumps_forward_a_day_and_back_an_hour(place, undisturbed):
    """A time of day that jumps changes neither the numbers nor the order of checkpoints.

    The times of files jump with it. By them, the latest checkpoint is the oldest after the first
    jump. The first jump comes while arrays are being written: Orbax gives a save 20 minutes by this
    clock, unless its options have another limit.
    """
    forward = {
        "fault": "clock",
        "at": "* *latest/12.orbax-checkpoint-tmp*",
        "count": 8,
        "jump": DAY,
    }
    # Jumps add up: after this one the clock is an hour behind.
    back = {"fault": "clock", "at": "os.mkdir *best/24.orbax-checkpoint-tmp", "jump": -DAY - HOUR}
    kill = {"fault": "kill", "at": "os.rename *latest/24.orbax-checkpoint-tmp*"}

    killed = place.train("clock", forward, back, kill).end()
    assert killed.returncode == KILLED
    resumed = finished(place.train("clock"))

    assert re.search(r"resum\w+\D*\b18\b", resumed.stdout)
    assert_equal_runs(place.workdir("clock"), undisturbed)
    out = killed.stdout + resumed.stdout
    # No duration that is printed is negative or infinite.
    assert not re.search(r"(ETA|in|,|s/) +-\d", out), out
    assert not re.search(rf"(ETA|in|,|s/) +{duration(math.inf)}", out), out
    # Speeds are of a clock that does not jump.
    records = read_metrics(place.workdir("clock"))
    speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    assert speeds
    assert min(speeds) > 0
