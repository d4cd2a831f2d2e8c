"""Tests of paths of object storage: pathlib's methods, errors of the system's types, and tries after passing errors."""

import errno
import threading

import pytest

from txl_jax.runtime import storage

pytestmark = pytest.mark.full


def test_objects_are_written_read_listed_and_removed(bucket, tmp_path):
    assert not bucket.exists() and not bucket.is_dir()
    (bucket / "a" / "b.txt").write_text("é\n")
    (bucket / "c.bin").write_bytes(b"12")
    assert bucket.exists() and bucket.is_dir() and not bucket.is_file() and (bucket / "c.bin").is_file()
    assert list(bucket.iterdir()) == [bucket / "a", bucket / "c.bin"]
    assert list(bucket.glob("*.bin")) == [bucket / "c.bin"]
    assert list(storage.files_below(bucket)) == [bucket / "a" / "b.txt", bucket / "c.bin"]
    assert (bucket / "a" / "b.txt").read_text() == "é\n" and storage.size(bucket / "a" / "b.txt") == 3
    assert storage.modified(bucket / "c.bin") > 1e9
    with (bucket / "a" / "b.txt").open() as text, (bucket / "c.bin").open("rb") as file:
        assert (text.read(), file.read(1), file.read()) == ("é\n", b"1", b"2")
    (tmp_path / "up").write_bytes(b"x" * 1000)
    (bucket / "up").upload(tmp_path / "up")
    (bucket / "up").download(tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == b"x" * 1000
    (bucket / "c.bin").unlink()
    for _ in range(2):
        storage.remove_tree(bucket / "a")
        (bucket / "c.bin").unlink(missing_ok=True)
    assert list(storage.files_below(bucket)) == [bucket / "up"]


def test_errors_are_the_systems_with_the_name(bucket, storage):
    missing = bucket / "missing"
    for act in (missing.read_bytes, missing.unlink, missing.stat, lambda: list(missing.iterdir())):
        with pytest.raises(FileNotFoundError) as refused:
            act()
        assert refused.value.errno == errno.ENOENT and refused.value.filename == str(missing)
    storage.refuse("POST /upload")
    with pytest.raises(PermissionError) as refused:
        (bucket / "denied").write_bytes(b"1")
    assert refused.value.filename == str(bucket / "denied") and "\n" not in refused.value.strerror
    with pytest.raises(OSError, match="no rename"):
        missing.rename(bucket / "new")


def test_what_another_process_writes_is_seen_at_once(bucket, storage):
    """As TensorStore's objects are, which fsspec does not see."""
    (bucket / "one").write_bytes(b"1")
    assert list(bucket.iterdir()) == [bucket / "one"]
    objects = storage.storage
    name = str(bucket / "one").split("/", 3)[3]
    found = dict(objects.get_file_obj("bucket-one", name)) | {"name": name.replace("one", "two")}
    objects.create_file("bucket-one", found["name"], b"2", found)
    assert list(bucket.iterdir()) == [bucket / "one", bucket / "two"] and (bucket / "two").exists()


@pytest.mark.usefixtures("impatient")
def test_calls_are_tried_again_after_errors_that_pass(bucket, storage):
    storage.fail_every(2, status=503)
    for number in range(5):
        (bucket / str(number)).write_bytes(b"1")
    assert storage.errors >= 4
    storage.calm()
    assert len(list(bucket.iterdir())) == 5


def test_a_server_that_is_gone_for_a_while_is_waited_for(bucket, storage):
    storage.is_up = False
    threading.Timer(1.0, lambda: setattr(storage, "is_up", True)).start()
    (bucket / "late").write_bytes(b"1")
    assert (bucket / "late").read_bytes() == b"1"


@pytest.mark.usefixtures("impatient")
def test_the_tries_have_an_end(bucket, storage):
    storage.fail_every(1, status=429)
    with pytest.raises(OSError, match="made by a test") as refused:
        (bucket / "one").read_bytes()
    assert refused.value.errno == errno.EIO and storage.errors >= 6
