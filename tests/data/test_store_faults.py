"""Tests what errors, full disks, kills and second processes leave of a token store."""

import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import txl_jax
from support.full_disk import largest_file
from support.token_texts import SETTINGS, assert_same, names, never, text_of, words
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.text import SPLITS, File, Text
from txl_jax.data.token_store import find_store, fingerprint, open_store
from txl_jax.errors import UserError


def failing(kind):
    """Files whose second block cannot be had."""

    def blocks():
        yield b"the cat\n"
        raise kind

    return (File("some.txt", 99, blocks),)


def test_text_that_cannot_be_read_leaves_no_store(tmp_path):
    for error in (ValueError("some.txt is not UTF-8"), KeyboardInterrupt()):
        broken = Text("own text", "made up", "d", text_of().splits | {"valid": failing(error)})
        with pytest.raises(type(error)) as caught:
            open_store(broken, SETTINGS, words, folder=tmp_path)
        assert caught.value is error, "nothing else is reported"
        assert names(tmp_path) == []
    assert len(open_store(text_of(), SETTINGS, words, folder=tmp_path).splits["train"]) == 5


@pytest.mark.parametrize("split", SPLITS)
def test_a_full_disk_is_one_sentence_and_leaves_no_store(split, tmp_path):
    text = text_of(**{split: b"x" * 300_000}, block=1000)
    named = rf"{re.escape(str(tmp_path))}/new\b.*\bFile too large\b.*--cache_dir\b"
    with largest_file(100_000), pytest.raises(UserError, match=named):
        open_store(text, SETTINGS, ByteVocabulary.all_bytes, folder=tmp_path / "new")
    assert names(tmp_path / "new") == []
    assert len(open_store(text, SETTINGS, ByteVocabulary.all_bytes, folder=tmp_path / "new").splits[split]) == 300_000


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"{tmp_path}/file/tokens\b.*\bNot a directory\b.*--cache_dir\b"):
        open_store(text_of(), SETTINGS, words, folder=tmp_path / "file" / "tokens")


def test_a_read_only_folder_is_enough_for_a_store_that_is_there(tmp_path, monkeypatch):
    made = open_store(text_of(), SETTINGS, words, folder=tmp_path)
    monkeypatch.setattr(Path, "mkdir", never)
    monkeypatch.setattr(os, "mkdir", never)
    assert_same(open_store(text_of(), SETTINGS, never, folder=tmp_path), made)


OTHER = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from txl_jax.data.token_store import open_store
    from txl_jax.data.text import File, Text
    from txl_jax.data.word_tokens import WordVocabulary

    folder, name = Path(sys.argv[1]), sys.argv[2]

    def make():
        (folder / f"{name}-makes").touch()
        return WordVocabulary(("the", "<eos>", "cat", "<unk>", "<S>", "sat"))

    def blocks(content):
        yield content[:4]
        (folder / f"{name}-is-inside").touch()
        deadline = time.monotonic() + 30
        while not (folder / "go-on").exists():
            assert time.monotonic() < deadline, "the signal to continue does not come"
            time.sleep(0.01)
        yield content[4:]

    contents = {"train": b"the cat\\nsat\\n", "valid": b"cat\\n", "test": b"sat"}
    splits = {split: (File("some.txt", len(c), lambda c=c: blocks(c)),) for split, c in contents.items()}
    text = Text("own text", "made up", "d", splits)
    tokens = open_store(text, {"tokenizer": "word", "min_count": 1}, make, folder=folder / "tokens")
    print(tokens.splits["train"].tolist(), tokens.sentences.tolist())
    """
)


@pytest.fixture
def start(tmp_path):
    """Starts a process that makes the store of `text_of()` in `tmp_path` / tokens; it waits there for a file go-on."""
    started = []

    def start(name):
        environment = os.environ | {"PYTHONPATH": str(Path(txl_jax.__file__).parents[1])}
        command = [sys.executable, "-c", OTHER, str(tmp_path), name]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no process made {path.name}"
        time.sleep(0.01)


@pytest.mark.full
@pytest.mark.parametrize("is_killed", [False, True])
def test_of_two_processes_one_makes_the_store_and_the_other_waits(is_killed, tmp_path, start):
    """If the first is killed, the second makes it."""
    first = start("first")
    wait_for(tmp_path / "first-is-inside")
    second = start("second")
    assert second.stdout.readline().strip(), "it logs that it waits"
    assert not (tmp_path / "second-makes").exists()
    if is_killed:
        first.kill()
        wait_for(tmp_path / "second-is-inside")
    (tmp_path / "go-on").touch()
    results = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert results == ["" if is_killed else "[0, 2, 1, 5, 1] [0, 3, 5]\n", "[0, 2, 1, 5, 1] [0, 3, 5]\n"]
    assert (tmp_path / "second-makes").exists() == is_killed
    assert len(names(tmp_path / "tokens")) == 1


@pytest.mark.full
def test_a_killed_process_leaves_no_store_and_what_it_left_is_cleared(tmp_path, start):
    killed = start("first")
    wait_for(tmp_path / "first-is-inside")
    killed.kill()
    killed.wait()
    assert len(names(tmp_path / "tokens")) == 1, "its unfinished store"
    assert find_store(text_of(), SETTINGS, tmp_path / "tokens") is None
    open_store(text_of(digest="another"), SETTINGS, words, folder=tmp_path / "tokens")
    made = open_store(text_of(), SETTINGS, words, folder=tmp_path / "tokens")
    assert made.splits["train"].tolist() == [0, 2, 1, 5, 1]
    assert names(tmp_path / "tokens") == sorted(
        f"own-text-{fingerprint(text_of(digest=digest), SETTINGS)}" for digest in ("d", "another")
    )
