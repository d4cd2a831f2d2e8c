"""Tests in which order files and objects are written, so that a kill or a power cut loses no step.

Nothing is killed here. The calls are recorded. tests/runs/test_order.py tests a whole run's order.
"""

import json
import os
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import pytest

from support import order
from txl_jax.errors import UserError
from txl_jax.runtime import checkpoint, gcs_lock, remote, storage
from txl_jax.runtime import log as log_lib
from txl_jax.runtime.appended_text import replace_appended
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.gcs_lock import GcsLock
from txl_jax.runtime.log import RunLog

URL = "gs://bucket/run"


def write_folder(path):
    with storage.new_folder(path) as temporary:
        (temporary / "inside").write_bytes(b"1")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: storage.write(path, b"1"),
        lambda path: storage.write_json(path, 1),
        lambda path: storage.write_lines(path, ["1\n"]),
        write_folder,
    ],
    ids=["write", "write_json", "write_lines", "new_folder"],
)
def test_content_lasts_before_its_name_and_both_at_the_end(write, tmp_path, monkeypatch):
    """A power cut could otherwise leave an empty file of that name, or the file before it."""
    events = order.record(monkeypatch, tmp_path)
    write(tmp_path / "made")
    expected = [("sync", ".made.tmp"), ("rename", "made"), ("sync", ".")]
    if write is write_folder:
        expected.insert(0, ("sync", ".made.tmp/inside"))
        # It first removes what a killed process with the same number may have left.
        events.remove(("remove", ".made.tmp"))
    assert events == expected


def test_old_steps_go_once_the_new_one_has_its_digests(tmp_path, monkeypatch):
    deletions = []

    def save(checkpoints, step):
        checkpoints.save(step, {"x": jnp.arange(3)}, {"loss": 1.0})
        checkpoints.wait()

    with Checkpointer(tmp_path, keep=1, log=print) as checkpoints:
        save(checkpoints, 1)
        events = order.record(monkeypatch, tmp_path)
        delete = checkpoint.delete_step

        def verify_and_delete(path):
            deletions.append((os.path.basename(path), checkpoint.find_damage(str(tmp_path / "2"))))
            delete(path)

        monkeypatch.setattr(checkpoint, "delete_step", verify_and_delete)
        save(checkpoints, 2)
    assert deletions == [("1", None)], "the new step is not whole where the old one goes"
    assert events[-5:] == [
        ("sync", "2/.digests.json.tmp"),
        ("rename", "2/digests.json"),
        ("sync", "2"),
        # A step loses its name before its first file.
        ("rename", "1.deleted"),
        ("remove", "1.deleted"),
    ]


# Object storage, of which only the calls are recorded


def test_a_step_in_a_bucket_loses_its_commit_first(monkeypatch):
    removed = []
    monkeypatch.setattr(storage, "remove", lambda path: removed.append(path))
    monkeypatch.setattr(storage, "remove_tree", lambda path: removed.append(path))
    checkpoint.delete_step(f"{URL}/1")
    assert removed == [f"{URL}/1/{checkpoint.COMMIT}", f"{URL}/1"]


def test_a_folder_is_uploaded_in_the_order_in_which_its_files_were_made(tmp_path, monkeypatch):
    """The last one vouches for the others, whatever their names are."""
    uploaded = []
    for second, name in enumerate(["c", "a/d", "b"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (second, second))
    system = SimpleNamespace(put_file=lambda source, url: uploaded.append(url))
    monkeypatch.setattr(remote, "file_system", lambda scheme: system)
    remote.upload(tmp_path, URL)
    assert uploaded == [f"{URL}/c", f"{URL}/a/d", f"{URL}/b"]


@pytest.fixture
def log_in_bucket(monkeypatch):
    """(calls, log): a log in a bucket, and the calls of its `confirm` and of its uploads.

    The bucket is empty, and has no server: nothing else of the log may call one.
    """
    calls = []
    monkeypatch.setattr(storage, "as_path", str)
    monkeypatch.setattr(storage, "names", lambda folder, **options: [])
    monkeypatch.setattr(log_lib, "read_metrics", lambda folder: [])
    monkeypatch.setattr(log_lib, "read_appended", lambda path: b"")
    monkeypatch.setattr(log_lib, "TensorBoard", mock.Mock())
    monkeypatch.setattr(storage, "write", lambda path, data: calls.append(path))
    return calls, RunLog(URL, confirm=lambda: calls.append("confirm"))


def test_a_sealed_log_is_uploaded_after_the_lock_is_confirmed(log_in_bucket):
    calls, log = log_in_bucket
    with log.open():
        log.record("train", 1, {"loss": 1.0})
        assert calls == [], "a step does not wait for an upload"
        log.seal()
        # Uploads of other texts follow.
        assert calls[:2] == ["confirm", f"{URL}/metrics.jsonl.parts/000001"]
        calls.clear()
        log.record("train", 2, {"loss": 1.0})
        log.seal()
        assert calls[:2] == ["confirm", f"{URL}/metrics.jsonl.parts/000002"]


def test_a_log_is_not_uploaded_once_the_lock_is_lost(log_in_bucket):
    calls, log = log_in_bucket

    def lost():
        raise UserError("the lock was lost")

    log._confirm = lost
    log.open()
    log.record("train", 1, {"loss": 1.0})
    for _ in range(2):  # It is not uploaded by a second try either.
        with pytest.raises(UserError, match="lost"):
            log.seal()
    assert calls == []


def test_a_text_in_a_bucket_is_written_as_a_whole_before_its_parts_are_removed(monkeypatch):
    calls = []
    monkeypatch.setattr(storage, "names", lambda folder, **options: ["000001", "000002"])
    monkeypatch.setattr(storage, "write_lines", lambda path, lines: calls.append(("write", path)))
    monkeypatch.setattr(storage, "remove", lambda path: calls.append(("remove", path)))
    replace_appended(f"{URL}/log.txt", ["1\n"])
    parts = f"{URL}/log.txt.parts"
    assert calls == [
        ("write", f"{parts}/000003.all"),
        ("remove", f"{parts}/000001"),
        ("remove", f"{parts}/000002"),
    ]


@pytest.fixture
def lock_in_bucket(monkeypatch):
    """(calls, lock): a lock in a bucket that has no holder, and what it asks of the server."""
    calls = []

    def call(method, url, place="", **arguments):
        calls.append((method, url, arguments.get("ifGenerationMatch")))
        if method == "GET":
            # An object of the seventh generation, which was written just now.
            content = json.dumps({"generation": 7, "updated": "2026-01-01T00:00:00+00:00"})
            return {"Date": "Thu, 01 Jan 2026 00:00:00 GMT"}, content
        return {}, b""

    def call_method(url, method, *data):
        calls.append((method, url, None))

    lock = GcsLock(f"{URL}/.lock")
    system = SimpleNamespace(base="https://server/storage/v1/")
    monkeypatch.setattr(gcs_lock, "_call", call)
    monkeypatch.setattr(remote, "file_system", lambda scheme: system)
    monkeypatch.setattr(remote, "call", call_method)
    monkeypatch.setattr(remote, "read", lambda url: json.dumps(lock._record).encode())
    return calls, lock


def test_a_lock_object_is_created_once_and_deleted_by_its_generation(lock_in_bucket):
    """Of two that create it one does, and a holder deletes no lock but the one that it has seen."""
    calls, lock = lock_in_bucket
    lock.acquire()
    # Generation 0 is an object that does not exist.
    assert calls == [("POST", lock._url, "0")]
    calls.clear()
    lock.release()
    assert calls == [
        ("GET", lock._url, None),
        ("DELETE", lock._url, "7"),
        ("rm_file", lock._beat_url(lock._record), None),
    ]


def test_a_holder_renews_an_object_of_its_own_not_the_lock(lock_in_bucket, monkeypatch):
    calls, lock = lock_in_bucket
    other = GcsLock(f"{URL}/.lock")
    beats = iter([False, True])  # The thread's waits: one beat, then the end.
    lock._ended = SimpleNamespace(wait=lambda seconds: next(beats))
    lock._beat()
    assert calls == [("pipe_file", lock._beat_url(lock._record), None)]
    assert lock._beat_url(lock._record) not in (lock._url, other._beat_url(other._record))
    lock.confirm()
    monkeypatch.setattr(remote, "read", lambda url: json.dumps(other._record).encode())
    with pytest.raises(UserError, match="taken it over"):
        lock.confirm()
    calls.clear()
    lock._delete_own()
    assert ("DELETE", lock._url, "7") not in calls, "the lock of the run that has taken over"
