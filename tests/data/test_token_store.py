"""Tests token stores: contents, reuse, memory, and what errors, full disks, kills and second processes leave."""

import functools
import hashlib
import json
import os
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.encoded_text import in_blocks, joined, text_of
from support.full_disk import largest_file
from txl_jax.config import LineMark, Tokenizer, TokenizerConfig, config_tree
from txl_jax.data import token_store
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import make_vocabulary
from txl_jax.data.text import SPLITS, File, Text
from txl_jax.data.token_store import find_store, fingerprint, open_store
from txl_jax.data.vocabulary import dumps
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError

SETTINGS = {"tokenizer": "word", "min_count": 1}
WORDS = ("the", "<eos>", "cat", "<unk>", "<S>", "sat")


def words():
    return WordVocabulary(WORDS)


def never(*args, **kwargs):
    raise AssertionError("the store is there already")


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def assert_same(one, other):
    assert one.vocabulary == other.vocabulary
    for split in SPLITS:
        np.testing.assert_array_equal(one.splits[split], other.splits[split], strict=True)
    np.testing.assert_array_equal(one.sentences, other.sentences, strict=True)


# What is in a store


def test_the_ids_of_each_split_are_mapped(tmp_path):
    tokens = open_store(text_of(), SETTINGS, words, folder=tmp_path)
    assert [tokens.splits[split].tolist() for split in SPLITS] == [[0, 2, 1, 5, 1], [2, 1], [5, 1]]
    assert tokens.sentences.tolist() == [0, 3, 5] and tokens.sentences.dtype == np.int64
    assert tokens.vocabulary == dumps(words())
    for array in (*tokens.splits.values(), tokens.sentences):
        assert isinstance(array, np.memmap) and not array.flags.writeable
    (name,) = names(tmp_path)
    assert name == f"own-text-{fingerprint(text_of(), SETTINGS)}"
    arrays = {f"{name}.npy" for name in (*SPLITS, "sentences")}
    assert set(names(tmp_path / name)) == arrays | {"store.json", "vocabulary.txt"}
    assert json.loads((tmp_path / name / "store.json").read_text())["tokens"] == {"train": 5, "valid": 2, "test": 2}


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32)])
def test_ids_are_of_the_smallest_type(size, dtype, tmp_path):
    many = WordVocabulary(("<eos>", "<unk>", *map(str, range(2, size))))
    tokens = open_store(text_of(b"%d 3" % (size - 1)), SETTINGS, lambda: many, folder=tmp_path)
    assert tokens.splits["train"].dtype == dtype
    assert tokens.splits["train"].tolist() == [size - 1, 3, 0]


# Lines of words known and unknown, some empty.
LINES = st.lists(st.lists(st.sampled_from(["the", "cat", "dog"]), max_size=3), min_size=1, max_size=6)


@pytest.mark.parametrize("line_mark", [mark for mark in LineMark if mark is not LineMark.NONE])
@given(files=st.lists(LINES, min_size=1, max_size=3), block=st.integers(1, 9), open_end=st.booleans())
@settings(max_examples=50)
def test_sentences_are_where_lines_begin(line_mark, files, block, open_end, tmp_path_factory):
    """Each line in plain Python: its length, its marks, and the bytes before the first."""
    files = [[["the", "cat"], *files[0]], *files[1:]]
    contents = [b"".join(b" ".join(map(str.encode, line)) + b"\n" for line in lines) for lines in files]
    if open_end and files[-1][-1]:
        contents[-1] = contents[-1].removesuffix(b"\n")
    marks = 2 if line_mark is LineMark.DOUBLE_S else 1
    expected = [1 if line_mark is LineMark.S else 0]
    for lines in files:
        for line in lines:
            expected.append(expected[-1] + len(line) + marks)
    folder = tmp_path_factory.mktemp("store")
    vocabulary = WordVocabulary(WORDS, line_mark)
    tokens = open_store(text_of(contents, block=block), SETTINGS, lambda: vocabulary, folder=folder)
    assert tokens.sentences.tolist() == expected
    assert expected[-1] == len(tokens.splits["train"])
    assert tokens.splits["train"].tolist() == joined(vocabulary.blocks(map(in_blocks, contents)))


# When a store is opened again


def test_the_same_text_and_settings_are_not_encoded_again(tmp_path, monkeypatch):
    assert find_store(text_of(), SETTINGS, tmp_path) is None
    path = tmp_path / f"own-text-{fingerprint(text_of(), SETTINGS)}"
    path.with_name(f"{path.name}.123").mkdir()  # Left by a killed process.
    made = open_store(text_of(), SETTINGS, words, folder=tmp_path)
    again = text_of(b"never read", digest="d")
    monkeypatch.setattr(os, "mkdir", never)  # A folder that may only be read is enough.
    assert_same(open_store(again, dict(reversed(SETTINGS.items())), never, folder=tmp_path), made)
    assert_same(find_store(again, SETTINGS, tmp_path), made)
    assert names(tmp_path) == [path.name]
    monkeypatch.setattr(token_store, "VERSION", token_store.VERSION + 1)
    assert find_store(text_of(), SETTINGS, tmp_path) is None


@pytest.mark.parametrize("name", ["train.npy", "test.npy", "sentences.npy", "vocabulary.txt", "store.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "longer", "flipped"])
def test_a_damaged_store_is_made_again(name, damage, tmp_path, capsys):
    expected = open_store(text_of(), SETTINGS, words, folder=tmp_path / "undamaged")
    open_store(text_of(), SETTINGS, words, folder=tmp_path / "tokens")
    folder = tmp_path / "tokens" / names(tmp_path / "tokens")[0]
    path = folder / name
    match damage:
        case "cut":
            os.truncate(path, path.stat().st_size - 2)
        case "gone":
            path.unlink()
        case "longer":
            path.write_bytes(path.read_bytes() + b"more")
        case "flipped":
            data = bytearray(path.read_bytes())
            data[-1 if name.endswith(".npy") else data.rindex(b"sentences" if name == "store.json" else b"sat")] ^= 1
            path.write_bytes(data)
    assert find_store(text_of(), SETTINGS, tmp_path / "tokens") is None
    assert_same(open_store(text_of(), SETTINGS, words, folder=tmp_path / "tokens"), expected)
    assert names(tmp_path / "tokens") == [folder.name] and len(names(folder)) == 6
    assert str(folder) in capsys.readouterr().out


# The digest of some tokens, by the version that made them.
GOLDEN = {1: "95a7952305504f32"}


def test_ids_are_those_of_this_version(tmp_path):
    """A store of old ids would still be opened if ids changed under the old version."""
    content = "The cat sat\n\nthe cät,\tthe 😀\r\n The end".encode()
    text, found = text_of(content, content, content), hashlib.sha256()
    marked = (TokenizerConfig(kind=Tokenizer.WORD, line_mark=line_mark, min_count=2) for line_mark in LineMark)
    for tokenizer in (TokenizerConfig(), TokenizerConfig(kind=Tokenizer.CHAR), *marked):
        make = functools.partial(make_vocabulary, tokenizer, text)
        tokens = open_store(text, config_tree.to_dict(tokenizer), make, folder=tmp_path)
        found.update(tokens.vocabulary.encode())
        ids = [*(ids.tolist() for ids in tokens.splits.values()), np.array(tokens.sentences).tolist()]
        found.update(str(ids).encode())
    assert found.hexdigest()[:16] == GOLDEN[token_store.VERSION], (
        "the same text gives other tokens than before; if that is meant, raise token_store.VERSION and add its digest"
    )


# Memory


@pytest.mark.full
def test_memory_is_that_of_a_block(tmp_path):
    block, times = b"the cat sat\n" * 500, 1000  # 6 MB, of 2 million ids.
    repeated = File("large.txt", len(block) * times, lambda: (bytes(bytearray(block)) for _ in range(times)))
    large = Text("own text", "made up", "d", text_of().splits | {"train": (repeated,)})
    open_store(text_of(), {"first": True}, words, folder=tmp_path)  # Tables of the vocabulary.
    tracemalloc.start()
    try:
        tokens = open_store(large, SETTINGS, words, folder=tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tokens.splits["train"]) > 1.9e6
    assert peak < 1.5e6


def test_text_that_cannot_be_read_leaves_no_store(tmp_path):
    for error in (ValueError("some.txt is not UTF-8"), KeyboardInterrupt()):

        def blocks(error=error):
            yield b"the cat\n"
            raise error

        broken = Text("own text", "made up", "d", text_of().splits | {"valid": (File("some.txt", 99, blocks),)})
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
