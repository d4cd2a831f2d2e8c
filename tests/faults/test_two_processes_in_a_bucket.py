"""Tests two processes of four devices whose workdir is in a bucket: one is killed between two writes, both resume.

What nothing happened to is the same run in a folder: equal to the last bit, as sums are made in the same order.
"""

import random
import signal

import numpy as np
import pytest

from support import BUCKET, processes, programs
from support.compiled_programs import cache_in
from support.faults import NIGHTLY, assert_equal_runs
from support.remote import Remote
from support.waiting import wait_until

STEPS = 12
TINY = [*programs.TINY, *programs.steps(STEPS, every=2), "--train.eval_every=6", "--train.checkpoint_every=4"]
TINY += ["--model.dropout.rate=0.2", "--train.batch_size=8", "--eval.batch_size=8"]


@pytest.fixture(scope="module")
def start(tmp_path_factory, storage):
    """Starts a run, or resumes it, in two processes that have eight devices together."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "words.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], 2_000)))

    def start(workdir):
        flags = [*TINY, f"--data.file={text}", f"--cache_dir={folder}", f"--workdir={workdir}"]
        return processes.start("-m", "experiments.text", *flags, **cache_in(folder / "compiled"), **storage.environment)

    return start


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert [code for code, _, _ in processes.finish(start(workdir))] == [0, 0]
    return workdir


def killed_at(storage, started, victim, number):
    """Kills one of the processes at the write of this number that either makes; returns how the processes ended."""
    storage.kill_at_write(started[victim].pid, number)
    wait_until(lambda: storage.killed or started[victim].poll() is not None)
    assert storage.killed, processes.finish(started)
    storage.calm()  # What the other one writes is done.
    return processes.finish(started)


@NIGHTLY
def test_one_of_two_processes_is_killed(start, undisturbed, storage, fault_seed):
    """Each process once, at a drawn write; the third start ends."""
    rng = random.Random(fault_seed)
    workdir = Remote(f"gs://{BUCKET}/two-processes")
    for victim in (1, 0):
        number = rng.randrange(20, 100)
        codes = [code for code, _, _ in killed_at(storage, start(workdir), victim, number)]
        assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, -signal.SIGKILL)
        print(f"process {victim} killed at write {number}; the other ended with {codes[1 - victim]}")
    assert [code for code, _, _ in processes.finish(start(workdir))] == [0, 0]
    assert_equal_runs(workdir, undisturbed)
    assert not (workdir / ".lock").exists()
