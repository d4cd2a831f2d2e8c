"""Tests the prepared records of published corpora: several processes, kills, full disks and damage."""

import fcntl
import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support import ROOT, miniature
from support.published_corpora import contents, expected_digest, place_official, read, refusal, unpacked
from txl_jax.config import CorpusName
from txl_jax.data.sources import published, tfds_builders
from txl_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("miniatures")


def python(code, tmp_path, **options):
    """Starts Python with the miniatures installed."""
    lines = f"""
import os, sys, time
from support import miniature
from txl_jax.config import CorpusName
from txl_jax.data.sources import checks, published, tfds_builders
miniature.install()
{code}
text = published.read(CorpusName.LM1B, data_dir={str(tmp_path / "data")!r}, cache_dir={str(tmp_path / "cache")!r})
print("digest", text.digest)
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    return subprocess.Popen(
        [sys.executable, "-c", lines],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# Waits for a file named GO once the first bytes have been counted.
WAIT_INSIDE = """
add = checks.Tally.add
def slow_add(self, block):
    open({inside!r}, "w").close()
    while not os.path.exists({go!r}): time.sleep(0.01)
    add(self, block)
checks.Tally.add = slow_add
"""


def started(tmp_path):
    """A process in the middle of its preparation, and the file that lets it go on."""
    inside, go = tmp_path / "inside", tmp_path / "go"
    process = python(WAIT_INSIDE.format(inside=str(inside), go=str(go)), tmp_path)
    deadline = time.monotonic() + 60
    while not inside.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    return process, go


def test_two_processes_at_once(tmp_path):
    place_official(tmp_path, CorpusName.LM1B)
    first, go = started(tmp_path)
    second = python("", tmp_path)
    line = second.stdout.readline()
    assert line.strip() and "digest" not in line, "it logs that it waits"
    assert second.poll() is None
    go.touch()
    out, errors = first.communicate(timeout=60)
    assert "One Billion Word" in out and f"digest {expected_digest(CorpusName.LM1B)}" in out, errors
    out, errors = second.communicate(timeout=60)
    assert out == f"digest {expected_digest(CorpusName.LM1B)}\n", errors
    assert contents(read(CorpusName.LM1B, tmp_path)) == miniature.texts(CorpusName.LM1B)


def test_a_thread_waits_too(tmp_path):
    place_official(tmp_path, CorpusName.PTB)
    folder = tmp_path / "cache" / "tfds"
    folder.mkdir(parents=True)
    digests = []
    with open(folder / ".txl_ptb.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: digests.append(read(CorpusName.PTB, tmp_path).digest))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and not (folder / "txl_ptb").exists()
    thread.join(60)
    assert digests == [expected_digest(CorpusName.PTB)]


def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path):
    place_official(tmp_path, CorpusName.LM1B)
    process, _ = started(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = list((tmp_path / "cache" / "tfds").rglob("incomplete*"))
    assert left, "the test must kill in the middle"
    assert contents(read(CorpusName.LM1B, tmp_path)) == miniature.texts(CorpusName.LM1B)
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [".txl_lm1b.lock", "txl_lm1b"]
    assert os.listdir(tmp_path / "cache" / "tfds" / "txl_lm1b") == ["1.0.0"], "what was left is gone"


def test_a_failed_preparation_can_be_mended(tmp_path):
    unpacked(tmp_path, CorpusName.PTB)
    path = tmp_path / "data" / "simple-examples" / "data" / "ptb.test.txt"
    right = path.read_bytes()
    path.write_bytes(right + b"more\n")
    refusal(CorpusName.PTB, tmp_path)
    path.write_bytes(right)
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)


@pytest.mark.parametrize("cache", ["file", "file/below", "/proc/nowhere"])
def test_a_cache_that_cannot_be_made(cache, tmp_path):
    place_official(tmp_path, CorpusName.PTB)
    (tmp_path / "file").touch()
    cache = tmp_path / cache
    with pytest.raises(UserError) as caught:
        published.read(CorpusName.PTB, data_dir=str(tmp_path / "data"), cache_dir=str(cache))
    assert re.search(rf"\bPenn Treebank\b.*{cache}/tfds\b.*--cache_dir\b", str(caught.value))


def test_a_read_only_cache(tmp_path, monkeypatch):
    """A folder's permissions do not stop root, so the error is made."""
    place_official(tmp_path, CorpusName.PTB)

    def mkdir(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UserError, match=r"\bPenn Treebank\b.*/cache/tfds\b.*\bPermission denied\b.*--cache_dir\b"):
        read(CorpusName.PTB, tmp_path)


def test_an_error_below_the_cache_is_the_caches(tmp_path, monkeypatch):
    place_official(tmp_path, CorpusName.PTB)
    file = str(tmp_path / "cache" / "tfds" / "txl_ptb" / "some" / "file")

    def add(tally, block):
        raise OSError(122, "Disk quota exceeded", file)

    monkeypatch.setattr(tfds_builders.Tally, "add", add)
    with pytest.raises(UserError, match=r"\bPenn Treebank\b.*/cache/tfds\b.*\bDisk quota exceeded\b.*--cache_dir\b"):
        read(CorpusName.PTB, tmp_path)


def test_a_full_disk(tmp_path):
    place_official(tmp_path, CorpusName.LM1B)
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, 100_000))
    process = python("", tmp_path, preexec_fn=limit)
    _, errors = process.communicate(timeout=60)
    last = errors.strip().splitlines()[-1]
    folder = tmp_path / "cache" / "tfds"
    assert re.search(rf"UserError: .*One Billion Word.*{folder}\b.*\bFile too large\b.*--cache_dir\b", last)
    assert not list(folder.rglob("incomplete*"))
    assert contents(read(CorpusName.LM1B, tmp_path)) == miniature.texts(CorpusName.LM1B)


def test_files_that_may_not_be_read_are_not_the_caches_fault(tmp_path, monkeypatch):
    unpacked(tmp_path, CorpusName.PTB)
    denied = str(tmp_path / "data" / "simple-examples" / "data" / "ptb.test.txt")

    def getsize(path):
        raise PermissionError(13, "Permission denied", denied)

    monkeypatch.setattr(os.path, "getsize", getsize)
    with pytest.raises(PermissionError) as caught:
        read(CorpusName.PTB, tmp_path)
    assert denied in str(caught.value) and "cache_dir" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "flipped"])
def test_a_damaged_cache(damage, tmp_path):
    place_official(tmp_path, CorpusName.ENWIK8)
    read(CorpusName.ENWIK8, tmp_path)
    (path,) = (tmp_path / "cache" / "tfds" / "txl_enwik8").rglob("*train*")
    if damage == "removed":
        path.unlink()
    elif damage == "flipped":
        data = bytearray(path.read_bytes())
        data[data.index(miniature.texts(CorpusName.ENWIK8)["train"][1000:1008])] ^= 1
        path.write_bytes(data)
    else:
        path.write_bytes(path.read_bytes()[: 70_000 if damage == "cut" else 0])
    folder = tmp_path / "cache" / "tfds" / "txl_enwik8" / "1.0.0"
    with pytest.raises(UserError, match=rf"{folder}\b"):
        contents(read(CorpusName.ENWIK8, tmp_path))
    shutil.rmtree(folder)
    assert contents(read(CorpusName.ENWIK8, tmp_path)) == miniature.texts(CorpusName.ENWIK8)


@pytest.mark.parametrize("name", ["dataset_info.json", "metadata.json"])
def test_damage_beside_the_records(name, tmp_path):
    """Cut, without content, gone, or with flipped bits: never another text, and never more than one sentence."""
    place_official(tmp_path, CorpusName.PTB)
    read(CorpusName.PTB, tmp_path)
    folder = tmp_path / "cache" / "tfds" / "txl_ptb" / "1.0.0"
    whole = (folder / name).read_bytes()
    damaged = [whole[: len(whole) // 2], b"", *(_flipped(whole, place) for place in range(0, len(whole), 25))]
    for content in damaged:
        (folder / name).write_bytes(content)
        try:
            assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)
        except UserError as error:
            message = str(error)
            assert str(folder) in message and "\n" not in message


def _flipped(content, place):
    return content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :]
