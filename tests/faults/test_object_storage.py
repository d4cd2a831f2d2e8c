"""Tests runs on object storage: kills between two writes, and server errors, do not change numbers.

In one process, and in two with four devices each, of which one is killed and both resume.
"""

import random

import pytest

from support import BUCKET, processes, programs
from support.compiled_programs import cache_in
from support.faults import KILLED, NIGHTLY, Place, assert_equal_runs, command_of_two, finished
from support.remote import Remote
from support.waiting import wait_until

pytestmark = NIGHTLY
# Fewer than a whole run makes after its probe, so that most kills come before the end.
WRITES = 120
# Starts of a run that are killed, at most.
STARTS = 6


class Bucket(Place):
    """Runs whose workdirs are in a bucket. Text and tokens are local, and shared."""

    def workdir(self, name):
        return Remote(f"gs://{BUCKET}/{name}")

    def cache(self, name):
        return self.folder / "undisturbed" / "cache"


@pytest.fixture
def runs(storage, place, undisturbed):
    yield Bucket(place.folder, place.environment | storage.environment)
    storage.calm()


def killed_at(storage, victim, number):
    """Kills a start at its write of this number. Returns whether it came so far."""
    victim.wait_for("ready")
    storage.kill_at_write(victim.pid, number)
    code = victim.end().returncode
    was_killed = storage.killed
    storage.calm()
    if not was_killed:
        assert code == 0
        return False
    assert code == KILLED
    return True


@pytest.mark.parametrize("wanted", [1, 30])
def test_kills_and_errors(wanted, runs, storage, undisturbed, fault_seed):
    """Each run is killed until it ends. Every thirtieth request of its last start fails."""
    rng = random.Random(fault_seed)
    kills = 0
    errors = 0
    count = 0
    while kills < wanted or errors < wanted:
        name = f"{wanted}-{count}"
        for _ in range(min(STARTS, wanted)):
            if not killed_at(storage, runs.train(name), rng.randrange(WRITES)):
                break  # It has ended. Later starts would hardly write anything.
            kills += 1
        storage.errors = 0
        storage.fail_every(30)
        finished(runs.train(name))
        errors += storage.errors
        storage.calm()
        assert_equal_runs(runs.workdir(name), undisturbed)
        assert not (runs.workdir(name) / ".lock").exists()
        count += 1
        print(f"{name}: {kills} kills, {errors} errors so far", flush=True)
    print(
        f"seed {fault_seed}: {kills} kills between writes and {errors} errors in {count} runs, "
        "all curves equal"
    )


@pytest.fixture
def start(tmp_path, storage):
    """Starts a run, or resumes it, in two processes that have eight devices together."""
    programs.write_words(tmp_path, 2_000)
    variables = cache_in(tmp_path / "compiled") | storage.environment
    return lambda workdir: processes.start(*command_of_two(tmp_path, workdir), **variables)


def exit_codes(started):
    return [code for code, _, _ in processes.finish(started)]


def test_one_of_two_processes_is_killed(start, storage, fault_seed, tmp_path):
    """Each process is killed once, at a random write, and the third start ends.

    The undisturbed run is in a directory, where sums have the same order.
    """
    rng = random.Random(fault_seed)
    workdir = Remote(f"gs://{BUCKET}/two-processes")
    assert exit_codes(start(tmp_path / "undisturbed")) == [0, 0]

    for victim in (1, 0):
        started = start(workdir)
        number = rng.randrange(20, 100)  # A write in the middle of the run.
        storage.kill_at_write(started[victim].pid, number)
        wait_until(lambda: storage.killed or started[victim].poll() is not None)  # noqa: B023
        assert storage.killed, processes.finish(started)
        storage.calm()  # The other process can write again.
        codes = exit_codes(started)
        assert codes[victim] == KILLED
        assert codes[1 - victim] not in (0, KILLED)
        print(
            f"process {victim} killed at write {number}; the other ended with {codes[1 - victim]}"
        )

    assert exit_codes(start(workdir)) == [0, 0]
    assert_equal_runs(workdir, tmp_path / "undisturbed")
    assert not (workdir / ".lock").exists()
