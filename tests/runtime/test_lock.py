"""Tests locks of workdirs on object storage: one holder renews a lock, and another holder takes it
over only if nobody renews it.
"""

import os
import socket
import subprocess
import sys

import pytest

from support import drawn_run, runs
from support.waiting import wait_until
from txl_jax.errors import UserError
from txl_jax.runs.run import Run
from txl_jax.runtime import gcs_lock
from txl_jax.runtime.gcs_lock import GcsLock
from txl_jax.runtime.lock import NAME, RunLock, is_held
from txl_jax.training.hooks import Hook

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(gcs_lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(gcs_lock, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(gcs_lock, "_LOOK_SECONDS", 0.05)


@pytest.fixture
def elsewhere(bucket):
    """The lock of a holder on another machine, not taken yet."""
    lock = RunLock(bucket)
    lock._object._record["machine"] = "another"
    return lock


def test_one_holder_at_a_time(bucket, elsewhere, monkeypatch):
    """A holder on this machine holds the lock while its process lives, and a holder on another
    machine for as long as it renews the lock.

    A sweep asks for the same.
    """
    assert not is_held(str(bucket))
    monkeypatch.setattr(gcs_lock, "STALE_SECONDS", 60.0)  # A busy machine may renew late.
    for lock, named in (
        (RunLock(bucket), f"process {os.getpid()} on {socket.gethostname()}"),
        (elsewhere, "another"),
    ):
        with lock:
            lock.acquire()
            with pytest.raises(UserError, match=named):
                RunLock(bucket).acquire()
            lock.confirm()
            assert is_held(str(bucket))
            # With this limit no beat is new enough. A holder on this machine counts by its process.
            with monkeypatch.context() as patch:
                patch.setattr(gcs_lock, "STALE_SECONDS", -1.0)
                assert is_held(str(bucket)) == (lock is not elsewhere)
        assert not is_held(str(bucket))
        assert not bucket.exists()
    with RunLock(bucket) as second:
        second.acquire()
        second.close()  # The end of the block may follow, and closes it again.


@pytest.mark.parametrize("wakes", ["in a beat", "in a save"])
def test_a_holder_that_is_paused_is_followed_and_wakes_up_unlocked(
    wakes, bucket, elsewhere, monkeypatch, capsys
):
    """Another takes over after a while. When the holder continues, it notices this before it
    writes, and does not touch the other's lock.

    It need not know how long it was paused: the clock of a suspended machine may stand still.
    """
    monkeypatch.setattr(gcs_lock, "BEAT_SECONDS", 3600.0)  # Its thread is paused too.
    elsewhere.acquire()
    with RunLock(bucket) as second:
        second.acquire()
        [line] = capsys.readouterr().out.splitlines()
        assert "waiting" in line
        assert len(second.notes) == 1
        if wakes == "in a beat":
            elsewhere._object._look()
        else:
            with pytest.raises(UserError, match="taken it over"):
                elsewhere.confirm()
        with pytest.raises(UserError, match="taken it over"):
            elsewhere.check()
        elsewhere.close()
        second.confirm()


def test_a_holder_that_was_killed_on_this_machine_is_followed_at_once(bucket, monkeypatch):
    monkeypatch.setattr(gcs_lock, "STALE_SECONDS", 3600.0)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    first = GcsLock(bucket / NAME)
    first._record["process"] = ended.pid
    assert first._create()
    with RunLock(bucket) as second:
        second.acquire()
        assert len(second.notes) == 1


def test_of_two_that_take_over_one_does(bucket):
    """The second and the third run have both seen that the first is gone."""
    first = GcsLock(bucket / NAME)
    second = GcsLock(bucket / NAME)
    third = GcsLock(bucket / NAME)
    assert first._create()
    generation, _ = gcs_lock._version(first._url)

    assert second._delete(generation)
    assert second._create()
    assert not third._delete(generation)
    assert not third._create()
    second.confirm()


def test_an_answer_that_was_lost_is_no_loss_of_the_lock(bucket):
    with RunLock(bucket) as lock:
        assert lock._object._create()  # As if the answer had not come.
        lock.acquire()
        lock.confirm()
    assert not bucket.exists()


def test_the_thread_renews_and_finds_out_that_the_lock_is_lost(bucket, storage):
    with RunLock(bucket) as lock:
        lock.acquire()
        beat = lock._object._beat_url(lock._object._record)
        written, _ = gcs_lock._version(bucket / NAME)
        storage.fail_every(3)  # Beats outlast errors.
        wait_until(lambda: gcs_lock._version(beat))
        before = gcs_lock._version(beat)[0]
        wait_until(lambda: gcs_lock._version(beat)[0] != before)
        storage.calm()
        lock.confirm()
        assert gcs_lock._version(bucket / NAME)[0] == written, "it is never rewritten"
        (bucket / NAME).unlink()
        wait_until(lambda: lock._object._lost)
        with pytest.raises(UserError, match="removed"):
            lock.check()


def test_other_storage_has_no_lock_and_notes_it():
    with RunLock("s3://bucket/run") as lock:
        lock.acquire()
        lock.confirm()
    [note] = lock.notes
    assert "s3://" in note


def test_a_run_that_wakes_up_writes_nothing(bucket, storage, tmp_path, monkeypatch):
    """It is paused after its second training step, until another has taken its lock over.

    Its files could replace the files of the run that has taken over, or be read among them.
    """
    other = GcsLock(bucket / NAME)
    before = {}
    config, corpus = drawn_run.on_text(
        tmp_path,
        drawn_run.letters(),
        train__steps=4,
        train__eval_every=4,
        train__checkpoint_every=4,
        train__log_every=2,
    )

    def objects():
        generations = {}
        for name in storage.names():
            if name.startswith(f"{bucket.name}/"):
                generations[name] = storage.generation(name)
        return generations

    def pause(context):
        if context.step == 2:
            # As another run does that finds the holder gone. `acquire` would see that its process
            # lives.
            generation, _ = gcs_lock._version(other._url)
            assert other._delete(generation)
            assert other._create()
            before.update(objects())

    monkeypatch.setattr(gcs_lock, "BEAT_SECONDS", 3600.0)
    with pytest.raises(UserError, match="taken it over"):
        runs.train(config, corpus, Run(bucket), hooks=[Hook(1, pause)])
    assert objects() == before
    assert other._is_own()
