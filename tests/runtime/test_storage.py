"""Tests files and objects: paths as users type them, reading and writing, errors, retries, locks,
and remote texts.
"""

import asyncio
import errno
import hashlib
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import miniature
from support.full_disk import largest_file
from txl_jax.config import CorpusName, DataConfig
from txl_jax.data import own_text
from txl_jax.data.corpus import read_corpus
from txl_jax.data.published import CORPORA
from txl_jax.errors import LogError, UserError
from txl_jax.runtime import lock, remote
from txl_jax.runtime import storage as files


def test_a_local_path_is_absolute_with_its_home_and_links(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("runs")
    for path in ("runs", "~/runs", "link", Path("runs"), f"file://{tmp_path}/runs", "x/../runs"):
        assert files.as_path(path) == os.path.realpath(tmp_path / "runs"), path


# A kind of storage that is not supported, a typo, and a library that is not installed.
@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("memory://run", "memory://"),
        ("gs:/bucket/run", "gs://bucket"),
        ("s3://bucket/run", "pip install s3fs"),
    ],
)
def test_what_cannot_be_opened_is_refused(url, expected, monkeypatch):
    """With an error that shows the URL, and what is wrong with it or what to do."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(url)) as refused:
        files.as_path(url)
    assert expected in str(refused.value)


def test_small_texts_have_no_byte_order_mark_and_may_be_pipes(tmp_path):
    path = tmp_path / "small.txt"
    path.write_bytes(b"\xef\xbb\xbf\xef\xbb\xbf\xc3\xa9\r\n")
    assert files.read_text(path) == "\ufeff\u00e9\r\n"  # The second mark is text.
    path.write_bytes(b"\xff\xfea\0")
    with pytest.raises(ValueError, match="utf-8"):
        files.read_text(path)
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(
        target=(tmp_path / "pipe").write_bytes, args=[b"--seed=1\n"], daemon=True
    )
    writer.start()
    assert files.read_text(tmp_path / "pipe") == "--seed=1\n"
    with pytest.raises(OSError, match="not a regular file"):
        files.read_text("/dev/zero")


@pytest.mark.parametrize("place", ["disk", pytest.param("bucket", marks=pytest.mark.full)])
def test_files_are_written_read_listed_and_removed(place, request, tmp_path):
    folder = request.getfixturevalue("bucket") if place == "bucket" else str(tmp_path / "folder")
    text = os.path.join(folder, "a.txt")
    data = os.path.join(folder, "c.bin")
    deep = os.path.join(folder, "b/d.json")
    missing = os.path.join(folder, "missing")
    assert not files.exists(folder)
    assert not files.is_dir(folder)
    assert files.files_below(folder) == []

    files.make_folder(os.path.dirname(deep))
    files.write_lines(text, ["é\n"])
    files.write(data, b"1\r")
    files.write_json(deep, {"n": 1})

    assert files.is_dir(folder)
    assert files.exists(data)
    assert not files.is_dir(data)
    assert files.names(folder) == ["a.txt", "b", "c.bin"]
    assert files.files_below(folder) == [text, deep, data]
    assert files.read(text).decode() == "é\n"
    assert files.size(text) == len("é\n".encode())
    assert files.modified(data) > 1e9, "seconds since 1970"
    assert json.loads(files.read(deep)) == {"n": 1}
    assert files.sha256(data) == hashlib.sha256(b"1\r").hexdigest()
    for read in (files.read, files.size, files.modified, files.names):
        with pytest.raises(FileNotFoundError) as refused:
            read(missing)
        assert refused.value.errno == errno.ENOENT
        assert refused.value.filename == missing

    for _ in range(2):  # What is missing may be removed, too.
        files.remove_tree(os.path.dirname(deep))
        files.remove(data)
    assert files.files_below(folder) == [text]


def test_write_json_replaces_the_whole_file_or_nothing(tmp_path):
    path = tmp_path / "config.json"
    another = tmp_path / "another"
    for value in ({"a": [1, 2.5, None]}, {"b": "é"}):
        files.write_json(path, value)
        assert json.loads(path.read_bytes()) == value
    another.touch()
    assert path.stat().st_mode == another.stat().st_mode, (
        "others may read it as they may read any new file"
    )

    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"a": math.nan})
    with largest_file(20_000), pytest.raises(LogError, match=r"config\.json.*File too large"):
        files.write_json(path, "x" * 100_000)
    assert json.loads(path.read_bytes()) == {"b": "é"}
    assert sorted(os.listdir(tmp_path)) == ["another", "config.json"]


def test_lines_are_written_as_they_come_and_all_or_none(tmp_path):
    path = tmp_path / "scores.tsv"

    def lines(mistake=None):
        yield "é\n"
        assert any(name.endswith(".tmp") for name in os.listdir(tmp_path))
        if mistake is not None:
            raise mistake
        yield "b\n"

    files.write_lines(path, lines())
    for mistake in (ValueError, KeyboardInterrupt):
        with pytest.raises(mistake):
            files.write_lines(path, lines(mistake))
        assert path.read_text(encoding="utf-8") == "é\nb\n"
        assert os.listdir(tmp_path) == ["scores.tsv"]


@pytest.mark.full
def test_a_copy_on_this_machine_is_there_as_long_as_its_owner(bucket):
    files.write(bucket / "up", b"x" * 1000)
    owner = threading.Event()  # Any object whose end can be noticed.
    copy = files.local_copy(bucket / "up", owner)
    assert Path(copy).read_bytes() == b"x" * 1000
    del owner
    assert not os.path.exists(copy)
    assert files.local_copy("here", None) == "here", "a local path needs no copy"


@pytest.mark.full
def test_calls_are_tried_again_until_the_server_is_back(bucket, storage):
    """test_lock.py tests answers that are errors."""
    storage.is_up = False
    threading.Timer(1.0, lambda: setattr(storage, "is_up", True)).start()
    files.write(bucket / "late", b"1")
    assert files.names(bucket) == ["late"]


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
def test_the_tries_have_an_end(bucket, storage):
    storage.fail_every(1, status=429)
    # An error is not taken for the object's absence.
    for act in (files.read, files.exists, files.is_dir):
        storage.errors = 0
        with pytest.raises(OSError, match="made by a test") as refused:
            act(bucket / "one")
        assert refused.value.errno == errno.EIO
        assert storage.errors >= 6, "the call was tried several times"


class FakeGcs:
    """The part of gcsfs's class that is called."""

    async def _request(self, *args, **options):
        self.tries = getattr(self, "tries", 0) + 1
        raise ConnectionError(f"{args}, {options}")


def patience_of(system, monkeypatch):
    """Returns how often a request is tried after `make_gcsfs_patient`. Each pause takes 30 s of the
    clock.
    """
    now = iter(range(1000))

    async def pause(seconds):
        return None

    monkeypatch.setattr("asyncio.sleep", pause)
    monkeypatch.setattr(files.time, "monotonic", lambda: 30 * next(now))
    with pytest.raises(ConnectionError, match=r"\('GET',\), {'timeout': 1}"):
        asyncio.run(system._request("GET", timeout=1))
    return system.tries


def test_only_orbax_needs_patience_of_gcsfs(monkeypatch):
    """Calls of this project are tried again by `patiently`, so that they would wait for both."""
    kind = type("GCSFileSystem", (FakeGcs,), {"_request": FakeGcs._request})
    of_project = kind()
    of_orbax = kind()
    monkeypatch.setitem(sys.modules, "gcsfs", SimpleNamespace(GCSFileSystem=kind))
    monkeypatch.setattr(remote, "file_system", {"gs": of_project}.__getitem__)
    remote.make_gcsfs_patient.__wrapped__()  # Also if it was called before, in other tests.
    assert patience_of(of_project, monkeypatch) == 1
    # After each 30 s, and once more when its time is over.
    assert patience_of(of_orbax, monkeypatch) == remote.PATIENCE_SECONDS // 30 + 1


def test_a_gcsfs_without_the_private_method_is_left_alone(monkeypatch):
    kind = type("GCSFileSystem", (), {})
    monkeypatch.setitem(sys.modules, "gcsfs", SimpleNamespace(GCSFileSystem=kind))
    remote.make_gcsfs_patient.__wrapped__()
    assert not hasattr(kind, "_request")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/run", "~nobody-of-this-name"])
def test_a_home_that_is_unknown_is_named(path):
    with pytest.raises(UserError, match=f"~nobody-of-this-name of the path {path} "):
        files.as_path(path)
    assert files.expand_home("here/~user") == "here/~user"


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path, capsys):
    entered = threading.Event()

    def enter():
        with files.locked(tmp_path / "lock"):
            entered.set()

    other = threading.Thread(target=enter)
    with files.locked(tmp_path / "lock"):
        other.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    other.join()
    [line] = capsys.readouterr().out.splitlines()
    assert str(tmp_path / "lock") in line, "only the one that waits prints a line"


def test_an_error_of_writing_names_what_the_folder_and_the_flag(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "new" / "file"))
    refused = pytest.raises(UserError, match=r"tokens.*/new\b.*No space.*--cache_dir")
    with refused, files.writable(tmp_path / "new", what="tokens"):
        raise full
    elsewhere = FileNotFoundError(errno.ENOENT, "No such file", "/elsewhere/file")
    with pytest.raises(FileNotFoundError) as caught, files.writable(tmp_path, what="tokens"):
        raise elsewhere
    assert caught.value is elsewhere


# Remote texts: they are copied to this machine once, and again when they change


def read(data, cache, **settings):
    return read_corpus(DataConfig(corpus=CorpusName.TEXT, **settings), str(data), str(cache))


@pytest.mark.full
def test_patterns_and_lists(bucket, tmp_path):
    for name in ("a.txt", "b.txt", "valid.dat"):
        (bucket / name).write_bytes(name.encode() * 100)
    valid = str(bucket / "valid.dat")
    corpus = read("data", tmp_path, train=(str(bucket / "*.txt"),), valid=(valid,), test=(valid,))
    assert bytes(corpus.vocabulary.decode(corpus.train[:5])) == b"a.txt"
    assert corpus.train.size == 1000, "two names of five bytes, a hundred times each"

    (bucket / "valid.dat").unlink()
    # Two files are one text, split by position: nine tenths are the training split.
    for name in ("*.txt", ""):
        corpus = read("data", tmp_path, file=str(bucket / name))
        assert bytes(corpus.vocabulary.decode(corpus.test[-5:])) == b"b.txt", name
        assert corpus.train.size == 900, name
    with pytest.raises(UserError, match="no object matches"):
        read("data", tmp_path, train=(str(bucket / "*.no"),), valid=(valid,), test=(valid,))


@pytest.mark.full
def test_a_folder_of_corpora_is_copied_and_a_file_again_when_it_changes(bucket, tmp_path, storage):
    name = miniature.OFFICIAL[CorpusName.PTB]
    corpus = CORPORA[CorpusName.PTB]
    (bucket / name).write_bytes(b"first text")
    (bucket / f"ptb/{name}").write_bytes(b"first text")
    (bucket / "unrelated.bin").write_bytes(b"1")
    (bucket / "book.txt").write_bytes(bytes(range(32, 127)) * 40)
    local = own_text.local_folder(corpus, str(bucket), tmp_path)
    copied = [str(path.relative_to(local)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(copied) == sorted([name, f"ptb/{name}"])

    book = read("data", tmp_path, file=str(bucket / "book.txt"))
    requests = len(storage.requests)
    assert own_text.local_folder(corpus, str(bucket), tmp_path) == local
    assert read("data", tmp_path, file=str(bucket / "book.txt")).digest == book.digest
    for _, path in storage.requests[requests:]:
        assert "media" not in path, "it was downloaded again"

    time.sleep(1.1)  # Times of objects are read in whole seconds.
    (bucket / name).write_bytes(b"other text")  # The same length as the first.
    own_text.local_folder(corpus, str(bucket), tmp_path)
    assert pathlib.Path(local, name).read_bytes() == b"other text"
    (bucket / "book.txt").write_bytes(bytes(range(32, 127)) * 41)
    assert read("data", tmp_path, file=str(bucket / "book.txt")).digest != book.digest


def test_tokens_are_written_on_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    """Some network drives are such.

    Then nobody knows whether a half-written store belongs to a running process.
    """

    def flock(handle, kind):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (tmp_path / "book.txt").write_text("one two three four\n" * 20)
    first = read("data", tmp_path / "a", file=str(tmp_path / "book.txt"))
    [name] = [path.name for path in (tmp_path / "a" / "tokens").glob("[!.]*")]
    # The store that process 123 began to write.
    other = tmp_path / "b" / "tokens" / f"{name}.123"
    other.mkdir(parents=True)
    capsys.readouterr()
    monkeypatch.setattr(files.fcntl, "flock", flock)
    second = read("data", tmp_path / "b", file=str(tmp_path / "book.txt"))
    assert second.train.tolist() == first.train.tolist()
    assert other.exists()
    assert capsys.readouterr().out.count("not locked") == 1
    (tmp_path / ".lock").touch()
    assert not lock.is_held(tmp_path)
    with files.locked(tmp_path / "lock") as is_locked:
        assert not is_locked


@pytest.mark.full
def test_what_cannot_be_read_is_refused(bucket, tmp_path, storage):
    with pytest.raises(UserError, match="cannot read gs://"):
        read("data", tmp_path, file=str(bucket / "missing.txt"))
    # Tokens are kept on this machine: neither in a bucket's cache, nor next to a bucket's data.
    with pytest.raises(UserError, match="--cache_dir"):
        read("data", bucket, file="book.txt")
    with pytest.raises(UserError, match="--cache_dir"):
        read_corpus(DataConfig(corpus=CorpusName.PTB), str(bucket))
    (bucket / "secret.txt").write_bytes(b"1")
    storage.refuse("GET .*secret")
    with pytest.raises(UserError, match="gcloud"):
        read("data", tmp_path, file=str(bucket / "secret.txt"))


# New files


def test_a_new_file_is_complete_and_has_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_new(str(tmp_path / "out"), b"ours")
    finally:
        os.umask(before)
    assert (tmp_path / "out").read_bytes() == b"ours"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["out"]


def test_a_name_that_others_can_guess_is_not_written_through(tmp_path):
    """Their link, with the number of this process, would lead to any file of ours."""
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / f".out.{os.getpid()}.tmp").symlink_to("victim")
    files.write_new(str(tmp_path / "out"), b"ours")
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert (tmp_path / "out").read_bytes() == b"ours"
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / f".out.{os.getpid()}.tmp").is_symlink()


def test_the_longest_name_of_a_new_file(tmp_path):
    """The temporary name is not longer."""
    name = "n" * 255  # The usual file systems take no longer one.
    files.check_new_file(str(tmp_path / name))
    files.write_new(str(tmp_path / name), b"ours")
    assert os.listdir(tmp_path) == [name]


def test_a_disk_without_hard_links(tmp_path, monkeypatch):
    def no_link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    files.write_new(str(tmp_path / "out"), b"ours")
    assert (tmp_path / "out").read_bytes() == b"ours"
    with pytest.raises(UserError, match="nothing is overwritten"):
        files.write_new(str(tmp_path / "out"), b"others")
    assert (tmp_path / "out").read_bytes() == b"ours"
    assert os.listdir(tmp_path) == ["out"]


def test_a_new_file_that_cannot_be_made_is_known_before(tmp_path, monkeypatch):
    """Not after hours of work for its content."""
    with pytest.raises(LogError, match="too long"):
        files.check_new_file(str(tmp_path / ("n" * 256)))
    with pytest.raises(LogError, match=r"cannot write to .*nowhere"):
        files.check_new_file(str(tmp_path / "nowhere" / "out"))
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(UserError, match="nothing is overwritten"):
        files.check_new_file(str(tmp_path / "dangling"))
    # Tests may run as root, for whom all directories are writable.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(LogError, match="not writable"):
        files.check_new_file(str(tmp_path / "out"))
