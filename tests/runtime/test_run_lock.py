"""Tests locks of workdirs on object storage: one holder, renewed, taken over only if nobody renews it."""

import json
import os
import socket
import subprocess
import sys

import pytest

from txl_jax.errors import UserError
from txl_jax.runtime import run_lock as lock_lib
from txl_jax.runtime.paths import as_path
from txl_jax.runtime.run_lock import NAME, FileLock, ObjectLock, RunLock, run_lock


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    monkeypatch.setattr(lock_lib, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock_lib, "STALE_SECONDS", 1.0)
    monkeypatch.setattr(lock_lib, "_LOOK_SECONDS", 0.05)


def elsewhere(lock):
    """Makes the holder one of another machine."""
    lock._record["machine"] = "another"
    return lock


def test_the_kind_of_lock(bucket, tmp_path):
    assert type(run_lock(tmp_path)) is FileLock and type(run_lock(bucket)) is ObjectLock


def test_one_holder_at_a_time(bucket):
    with ObjectLock(bucket) as first:
        first.acquire()
        with pytest.raises(UserError, match=f"process {os.getpid()} on {socket.gethostname()}"):
            ObjectLock(bucket).acquire()
        first.confirm()
    assert not (bucket / NAME).exists()
    second = ObjectLock(bucket)
    second.acquire()
    second.close()
    second.close()


def test_a_holder_elsewhere_that_renews_is_left_alone(bucket):
    lines = []
    with elsewhere(ObjectLock(bucket)) as first:
        first.acquire()
        with pytest.raises(UserError, match="another run"):
            ObjectLock(bucket, log=lines.append).acquire()
        first.check()
    assert len(lines) <= 1


def test_a_holder_elsewhere_that_is_gone_is_waited_for_and_then_followed(bucket, monkeypatch):
    first, lines = elsewhere(ObjectLock(bucket)), []
    monkeypatch.setattr(lock_lib, "BEAT_SECONDS", 3600.0)
    first.acquire()
    with ObjectLock(bucket, log=lines.append) as second:
        second.acquire()
        assert len(lines) == 1 and "waiting" in lines[0] and len(second.notes) == 1
        monkeypatch.setattr(first, "_renewed", -1e9)
        with pytest.raises(UserError, match="taken it over"):
            first.confirm()
        with pytest.raises(UserError, match="taken it over"):
            first.checking(lambda: False)()
        first.close()  # Leaves the other's lock alone.
        second.confirm()
        assert json.loads((bucket / NAME).read_bytes())["token"] == second._record["token"]


def test_a_holder_that_was_killed_on_this_machine_is_followed_at_once(bucket, monkeypatch):
    monkeypatch.setattr(lock_lib, "STALE_SECONDS", 3600.0)
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    first = ObjectLock(bucket)
    first._record["process"] = ended.pid
    assert first._write("0")
    with ObjectLock(bucket) as second:
        second.acquire()
        assert len(second.notes) == 1


def test_of_two_that_take_over_one_does(bucket, storage):
    first = elsewhere(ObjectLock(bucket))
    assert first._write("0")
    seen = first._read()
    second, third = ObjectLock(bucket), ObjectLock(bucket)
    assert second._write(seen.generation) and not third._write(seen.generation)
    assert storage.requests[-1][0] == "POST"


def test_an_answer_that_was_lost_is_no_loss_of_the_lock(bucket):
    with ObjectLock(bucket) as lock:
        lock.acquire()
        own = lock._generation
        assert lock._write(own)
        lock._generation = own  # As if the answer had not come.
        lock._renew()
        lock.check()
        assert lock._generation != own
    again = ObjectLock(bucket)
    assert again._write("0")
    again.acquire()
    again.close()


def test_the_thread_renews_and_finds_out_that_the_lock_is_lost(bucket, storage):
    with ObjectLock(bucket) as lock:
        lock.acquire()
        before = lock._generation
        storage.fail_every(3)
        _until(lambda: lock._generation != before)
        storage.calm()
        (bucket / NAME).unlink()
        _until(lambda: lock._lost)
        with pytest.raises(UserError, match="removed"):
            lock.check()


def _until(condition):
    import time

    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_other_storage_has_no_lock_and_notes_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with run_lock(as_path("s3://bucket/run")) as lock:
        lock.acquire()
        lock.check()
        lock.confirm()
    assert type(lock) is RunLock and len(lock.notes) == 1 and "s3://" in lock.notes[0]
