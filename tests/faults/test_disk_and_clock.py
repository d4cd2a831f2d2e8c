"""Tests a disk that fills up, and a clock that jumps.

A full disk gives one error, nothing that was there is lost, and with space again the same numbers.
A time of day that jumps changes no number.
"""

import math
import re

import pytest

from support.faults import KILLED, assert_equal_runs, few_or_all, finished
from txl_jax.runtime.checkpoint import find_damage, find_steps
from txl_jax.runtime.environment import duration
from txl_jax.runtime.log import read_metrics

# When the disk fills up: before which file operation, how large files may still become, and words
# of the error. Arrays take more than LOG, and the lines of the rest of a run less. How long the log
# is by then depends on the number of starts and the length of the paths in it.
LOG = {"more": 3_000}
MOMENTS = {
    "records": (
        "os.mkdir *tfds*incomplete*",
        {"largest": 0},
        ("Penn Treebank", "File too large", "--cache_dir"),
    ),
    "tokens": (
        "open *tokens/*/train.npy",
        {"largest": 100_000},
        ("/tokens", "File too large", "--cache_dir"),
    ),
    "config.json": ("open */.config.json.*", {"largest": 100}, ("config.json", "File too large")),
    "metrics": ("os.mkdir */tensorboard", {"largest": 300}, ("/run/log.txt", "File too large")),
    "a checkpoint": (
        "os.mkdir *latest/12.orbax-checkpoint-tmp",
        LOG,
        ("step 12", "File too large"),
    ),
    # The next save, and the log, fail too: which of them is reported is a matter of time.
    "digests": ("open *latest/18/.digests.json.*", {"largest": 0}, ("File too large",)),
    "best parameters": (
        "os.mkdir *best/24.orbax-checkpoint-tmp",
        LOG,
        ("step 24", "File too large"),
    ),
    "results": ("open */.results.json.*", {"largest": 0}, ("results.json", "File too large")),
}
FAST = ("a checkpoint", "results")


def whole_steps(workdir):
    """The latest checkpoint of each kind that is whole, or 0."""
    found = (find_steps(workdir / "checkpoints" / kind) for kind in ("latest", "best"))
    return [
        max((step for step, path in steps if find_damage(path) is None), default=0)
        for steps in found
    ]


@pytest.mark.parametrize("moments", few_or_all(FAST, tuple(MOMENTS)))
def test_no_file_may_grow(moments, place, undisturbed):
    name = f"full-{len(moments)}"
    for moment in moments:
        at, limit, expected = MOMENTS[moment]
        before = whole_steps(place.workdir(name))
        ended = place.train(name, fault="full", at=at, **limit).end()
        assert ended.returncode == 1, (moment, ended.stdout)
        assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1, ended.stderr
        assert all(words in ended.stderr for words in expected), ended.stderr
        assert all(
            new >= old for new, old in zip(whole_steps(place.workdir(name)), before, strict=True)
        )
    finished(place.train(name))
    assert_equal_runs(place.workdir(name), undisturbed)


HOUR, DAY = 3600, 86400


@pytest.mark.full
def test_the_clock_jumps_forward_a_day_and_back_an_hour(place, undisturbed):
    """Times of files jump with it, so that after the first jump the latest checkpoint is the oldest
    by them.

    The first jump comes while arrays are being written: Orbax gives a save 20 minutes by this
    clock, unless its options have another limit.
    """
    forward = {
        "fault": "clock",
        "at": "* *latest/12.orbax-checkpoint-tmp*",
        "count": 8,
        "jump": DAY,
    }
    back = {"fault": "clock", "at": "os.mkdir *best/24.orbax-checkpoint-tmp", "jump": -DAY - HOUR}
    kill = {"fault": "kill", "at": "os.rename *latest/24.orbax-checkpoint-tmp*"}
    killed = place.train("clock", forward, back, kill).end()
    assert killed.returncode == KILLED
    resumed = finished(place.train("clock"))
    assert re.search(r"resum\w+\D*\b18\b", resumed.stdout)
    assert_equal_runs(place.workdir("clock"), undisturbed)
    out = killed.stdout + resumed.stdout
    assert not re.search(r"(ETA|in|,|s/) +-\d", out), out
    assert not re.search(rf"(ETA|in|,|s/) +{duration(math.inf)}", out), out
    records = read_metrics(place.workdir("clock"))
    speeds = [record["tokens_per_second"] for record in records if "tokens_per_second" in record]
    assert speeds and min(speeds) > 0
