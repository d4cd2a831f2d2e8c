"""Tests the prepared records of published corpora: several processes, kills, full disks and damage."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading

import pytest

from support import ROOT, miniature
from support.full_disk import largest_file
from support.published_corpora import contents, expected_digest, place_official, read, refusal
from txl_jax.config import CorpusName
from txl_jax.data import prepare
from txl_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("miniatures")


# Waits for ever once the first bytes have been counted.
WAITS = """
import sys, time
from support import miniature
from txl_jax.config import CorpusName
from txl_jax.data import prepare
miniature.install()
def wait(self, block):
    print("inside", flush=True)
    time.sleep(600)
prepare.Tally.add = wait
prepare.read(CorpusName.LM1B, data_dir=sys.argv[1] + "/data", cache_dir=sys.argv[1] + "/cache")
"""


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


@pytest.mark.full
def test_a_killed_preparation_leaves_nothing_that_counts(tmp_path):
    place_official(tmp_path, CorpusName.LM1B)
    command = [sys.executable, "-c", WAITS, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        while process.stdout.readline() not in ("inside\n", ""):
            pass
        process.kill()
    assert list((tmp_path / "cache" / "tfds").rglob("incomplete*")), "the test must kill in the middle"
    assert contents(read(CorpusName.LM1B, tmp_path)) == miniature.texts(CorpusName.LM1B)
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [".txl_lm1b.lock", "txl_lm1b"]
    assert os.listdir(tmp_path / "cache" / "tfds" / "txl_lm1b") == ["1.0.0"], "what was left is gone"


@pytest.mark.parametrize("cache", ["file", "file/below", "/proc/nowhere"])
def test_a_cache_that_cannot_be_made(cache, tmp_path):
    place_official(tmp_path, CorpusName.PTB)
    (tmp_path / "file").touch()
    cache = tmp_path / cache
    with pytest.raises(UserError, match=rf"\bPenn Treebank\b.*{cache}/tfds\b.*--cache_dir\b"):
        prepare.read(CorpusName.PTB, data_dir=str(tmp_path / "data"), cache_dir=str(cache))


@pytest.mark.full
def test_a_full_disk(tmp_path):
    place_official(tmp_path, CorpusName.LM1B)
    folder = tmp_path / "cache" / "tfds"
    with largest_file(100_000):
        message = refusal(CorpusName.LM1B, tmp_path, UserError)
    assert re.search(rf"One Billion Word.*{folder}\b.*\bFile too large\b.*--cache_dir\b", message)
    assert contents(read(CorpusName.LM1B, tmp_path)) == miniature.texts(CorpusName.LM1B)


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


@pytest.mark.full
@pytest.mark.parametrize("name", ["dataset_info.json", "metadata.json"])
def test_damage_beside_the_records(name, tmp_path):
    """Cut, without content, gone, or with flipped bits: never another text, and never more than one sentence."""
    place_official(tmp_path, CorpusName.PTB)
    read(CorpusName.PTB, tmp_path)
    folder = tmp_path / "cache" / "tfds" / "txl_ptb" / "1.0.0"
    whole = (folder / name).read_bytes()
    flipped = [whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :] for place in range(0, len(whole), 25)]
    for content in (whole[: len(whole) // 2], b"", *flipped):
        (folder / name).write_bytes(content)
        try:
            assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)
        except UserError as error:
            message = str(error)
            assert str(folder) in message and "\n" not in message
