"""Tests text from the user's files: which bytes belong to which split, digests, and every file that
raises an error.
"""

import bz2
import dataclasses
import glob
import gzip
import hashlib
import json
import lzma
import os
import random
import re
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.encoded_text import in_blocks, own_text
from txl_jax.config import CorpusName, DataConfig, LineMark, Tokenizer, TokenizerConfig
from txl_jax.data import own_text as own_text_module
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import read_corpus, refuse_packed
from txl_jax.data.own_text import read_own_text, read_python_stdlib
from txl_jax.data.text import BLOCK_BYTES, SPLITS, file_part, text_blocks
from txl_jax.errors import UserError


def contents(files):
    """The bytes of some files, one after the other."""
    blocks = []
    for file in files:
        blocks += file.blocks()
    return b"".join(blocks)


def parts(text):
    """The three splits as bytes. Their sizes must be as declared."""
    splits = []
    for name in SPLITS:
        content = contents(text.splits[name])
        assert sum(file.size for file in text.splits[name]) == len(content), name
        splits.append(content)
    return splits


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Path of a file to write, the same for all examples of a test."""
    return tmp_path_factory.mktemp("own") / "poem.txt"


@pytest.fixture
def five_files(tmp_path):
    """Paths of files whose text is their name, ten times, and a newline."""
    paths = []
    for name in "abcde":
        path = tmp_path / name
        path.write_bytes(name.encode() * 10 + b"\n")
        paths.append(str(path))
    return paths


# Sizes of which 90% and 95% are whole numbers, and others, for which they are rounded down.
@pytest.mark.parametrize("size", [40, 99, 100, 101, 1234567])
def test_bytes_are_split_by_position(size, path):
    """At 90% and 95% of the bytes, as a text of its own and as a part of enwik8, the default."""
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    first = int(size * 90 // 100)
    second = int(size * 95 // 100)

    text = read_own_text(own_text(file=str(path)))
    prefix = read_own_text(DataConfig(file=str(path)))

    assert text.name == "text"
    assert prefix.name == "enwik8 prefix"
    for source in (text, prefix):
        assert parts(source) == [content[:first], content[first:second], content[second:]]
        assert source.digest == hashlib.sha256(content).hexdigest()
        assert not source.closed_alphabet
        assert "poem.txt" in source.description


@pytest.mark.parametrize(
    "tokens",
    [{"kind": Tokenizer.CHAR}, {"kind": Tokenizer.WORD, "line_mark": LineMark.NONE}],
    ids=["characters", "words"],
)
@given(lines=st.lists(st.text("ab é日😀", max_size=20), min_size=1), open_end=st.booleans())
@settings(max_examples=100)
def test_other_tokens_are_split_where_lines_begin(path, tokens, lines, open_end):
    content = "\n".join(lines)
    if not open_end:
        content += "x\n"
    content = content.encode() or b"x"
    path.write_bytes(content)

    text = read_own_text(own_text(file=str(path), **tokens))

    train, valid, test = parts(text)
    assert train + valid + test == content
    for percent, border in ((90, len(train)), (95, len(train + valid))):
        check_border(content, border, nominal=len(content) * percent // 100)
    for name in SPLITS:
        "".join(text_blocks(text.splits[name], close_lines=False))  # No character is cut.


def check_border(content, border, *, nominal):
    """Asserts that a split begins at the first line, word or character from `nominal` on."""
    assert border >= nominal
    # The byte before decides whether a line begins at the nominal border already.
    before = max(nominal - 1, 0)
    if b"\n" in content[before:]:
        assert content[border - 1 : border] == b"\n", "a line begins here"
        assert b"\n" not in content[before : border - 1], "and none before"
    elif b" " in content[before:]:
        assert content[border - 1 : border] == b" ", "a word begins here"
        assert b" " not in content[before : border - 1], "and none before"
    else:
        assert border - nominal <= 3, "the rest of a character"


def test_large_files_come_in_blocks(path):
    content = random.Random(0).randbytes(2 * BLOCK_BYTES + 5)
    path.write_bytes(content)

    file = file_part(str(path))
    assert [len(block) for block in file.blocks()] == [BLOCK_BYTES, BLOCK_BYTES, 5]
    assert contents([file]) == content
    assert contents([file]) == content, "each time from the beginning"

    part = file_part(str(path), 7, BLOCK_BYTES + 9)
    assert part.size == BLOCK_BYTES + 2
    assert part.offset == 7
    assert contents([part]) == content[7 : BLOCK_BYTES + 9]

    os.truncate(path, BLOCK_BYTES)
    with pytest.raises(UserError, match=rf"^{path}\b"):
        contents([part])


def splits_of(file, cache, **fields):
    """The three splits of a file or directory as texts, as training reads them."""
    corpus = read_corpus(own_text(file=str(file), **fields), "nowhere", str(cache))
    return [corpus.vocabulary.decode(getattr(corpus, split)).decode() for split in SPLITS]


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    """An empty directory for texts."""
    path = tmp_path / "texts"
    path.mkdir()
    return path


@pytest.fixture
def json_lines(tmp_path):
    """The path of a file of JSON lines to write."""
    return tmp_path / "d.jsonl"


def test_the_last_files_of_a_directory_or_pattern_validate_and_test(folder, cache, capsys):
    """A twentieth of the files, at least one, for each of the two."""
    for number in range(44):
        (folder / f"{number:02}.txt").write_text(f"<{number:02}>")
    (folder / "below").mkdir()
    (folder / "below" / "a.txt").write_text("<below>")  # The last one by name.
    train = "".join(f"<{number:02}>" for number in range(41))
    expected = [train, "<41><42>", "<43><below>"]
    assert splits_of(folder, cache) == expected
    assert "note" not in capsys.readouterr().out

    # Hidden and empty files are skipped, with a note.
    (folder / ".hidden").write_text("no")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "b.txt").write_text("no")
    (folder / "empty").write_text("")
    assert splits_of(folder, cache) == expected
    assert re.search(rf"(?m)^note +3 .*{folder}", capsys.readouterr().out)

    # A pattern of four files, and one of all that are not hidden.
    assert splits_of(folder / "4*.txt", cache) == ["<40><41>", "<42>", "<43>"]
    assert splits_of(folder / "**" / "*.txt", cache) == expected


def test_one_or_two_files_of_a_directory_are_split_by_position(folder, cache):
    """Two files together, at 90 and 95 of their 100 bytes."""
    (folder / "b").write_text("b" * 50)
    expected = ["b" * 45, "b" * 2, "b" * 3]
    assert splits_of(folder, cache) == expected
    assert splits_of(folder / "b", cache) == expected

    (folder / "a").write_text("a" * 50)
    assert splits_of(folder, cache) == ["a" * 50 + "b" * 40, "b" * 5, "b" * 5]


@pytest.mark.parametrize("name", ["none*", "empty"])
def test_a_pattern_or_directory_without_files_is_named(name, folder, cache):
    (folder / "b").write_text("b" * 50)
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match=rf"--data\.file .*{re.escape(str(folder / name))}"):
        splits_of(folder / name, cache)


DOCUMENTS = ['Ein "Satz".\nZweite Zeile\n', "café 😀", "drei vier"] * 10


def write_documents(path):
    """Writes the documents as JSON lines, with escapes in every other one.

    The file begins with a byte-order mark, and ends with an empty line and an empty document.
    """
    lines = []
    for number, text in enumerate(DOCUMENTS):
        lines.append(json.dumps({"id": 7, "text": text}, ensure_ascii=number % 2 == 0))
    lines += ["", json.dumps({"text": ""})]
    path.write_text("\ufeff" + "\n".join(lines))


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "\n"),
        ({"reset_at": "\\n"}, "\n"),
        ({"kind": Tokenizer.CHAR, "reset_at": "#"}, "#"),
        ({"kind": Tokenizer.WORD, "reset_at": "<eos>"}, "\n"),
        ({"kind": Tokenizer.WORD, "reset_at": "<doc>"}, "\n<doc> "),
    ],
    ids=["usual", "reset at lines", "reset at #", "reset at <eos>", "reset at <doc>"],
)
def test_documents_of_json_lines_end_as_the_reset_or_with_a_line(
    tmp_path, json_lines, cache, fields, end
):
    """They are read like a plain text in which each document is followed by that end."""
    write_documents(json_lines)
    plain_text = ""
    for document in DOCUMENTS:
        if end.startswith("\n"):
            document = document.rstrip("\n")
        plain_text += document + end
    (tmp_path / "plain.txt").write_text(plain_text)

    documents_config = own_text(file=str(json_lines), json_field="text", **fields)
    documents = read_corpus(documents_config, "nowhere", str(cache))
    plain_config = own_text(file=str(tmp_path / "plain.txt"), **fields)
    plain = read_corpus(plain_config, "nowhere", str(cache))

    assert documents.digest == plain.digest
    assert documents.vocabulary == plain.vocabulary


def test_json_lines_that_changed_are_read_again(json_lines, cache):
    write_documents(json_lines)
    assert splits_of(json_lines, cache, json_field="text")[0].startswith("Ein")

    json_lines.write_text('{"text": "another"}\n' * 50)
    assert splits_of(json_lines, cache, json_field="text")[0].startswith("another\nanother")


NO_TEXTS = {
    "cut": b"{",
    "a number": b"7",
    "a string": b'"text"',
    "a list": b"[]",
    "another field": b'{"other": "a"}',
    "a number in the field": b'{"text": 7}',
    "a surrogate": b'{"text": "\\ud800"}',
    "not UTF-8": b"\xff",
}


@pytest.mark.parametrize("line", NO_TEXTS.values(), ids=NO_TEXTS)
def test_a_line_without_the_text_is_named_by_its_number(json_lines, tmp_path, cache, line):
    """Nothing of the file stays in the cache."""
    json_lines.write_bytes(b'{"text": "a b"}\n\n' + line + b"\n")
    with pytest.raises(UserError, match=r"line 3 of .*d\.jsonl .*'text'.*--data\.json_field"):
        splits_of(json_lines, cache, json_field="text")
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(cache.rglob("d.txt"))


@pytest.mark.parametrize("kind", [Tokenizer.CHAR, Tokenizer.WORD])
def test_a_zero_in_a_document_is_named_by_its_line(json_lines, cache, kind):
    """Only bytes can have one."""
    json_lines.write_bytes(b'{"text": "a b"}\n\n{"text": "ab\\u0000"}\n' * 30)
    with pytest.raises(UserError, match=r"line 3 of .*d\.jsonl .*position 2\b.*kind=byte"):
        splits_of(json_lines, cache, json_field="text", kind=kind)
    assert "ab\0\n" in splits_of(json_lines, cache, json_field="text")[0]


def test_json_lines_may_begin_with_a_byte_order_mark(json_lines, cache):
    json_lines.write_bytes(b"\xef\xbb\xbf" + b'{"text": "a b"}\r\n' * 30)
    assert splits_of(json_lines, cache, json_field="text")[0].startswith("a b\na b")


def test_an_error_in_the_text_of_json_lines_names_them(json_lines, cache):
    """Not only the file of their text in the cache, which the user has never seen."""
    json_lines.write_text('{"text": "abc"}\n' * 30 + '{"text": "abz"}\n')
    vocabulary = ByteVocabulary(b"\nabc")
    config = own_text(file=str(json_lines), json_field="text")
    # The foreign byte is z, behind 30 lines of 4 bytes and two letters.
    place = rf"d\.jsonl \(its text is .*d\.txt\): byte {ord('z')} at offset {30 * 4 + 2}\b"
    with pytest.raises(UserError, match=place):
        read_corpus(config, "nowhere", str(cache), vocabulary=vocabulary)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_compressed_json_lines_are_named(tmp_path, cache, pack):
    (tmp_path / "d.jsonl.gz").write_bytes(pack(b'{"text": "a b"}\n' * 30))
    with pytest.raises(UserError, match=r"d\.jsonl\.gz .*(gzip|xz).*zcat"):
        splits_of(tmp_path / "d.jsonl.gz", cache, json_field="text")


@pytest.fixture
def piped(tmp_path):
    """Returns the path of a new pipe from which the bytes passed can be read once."""
    writers = []

    def make(name, content):
        path = tmp_path / name
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=[content], daemon=True)
        writer.start()
        writers.append(writer)
        return str(path)

    yield make
    for writer in writers:
        writer.join(10)
        assert not writer.is_alive(), "a pipe was not read to its end"


def test_a_pipe_is_read_once_into_the_cache(tmp_path, cache, piped):
    """Pipes of one content are one file there."""
    # More than the 64 KiB that Linux keeps in a pipe, so that it is read while it is written.
    content = b"".join(b"line %d\n" % number for number in range(50_000))
    (tmp_path / "book.txt").write_bytes(content)
    expected = read_corpus(own_text(file=str(tmp_path / "book.txt")), "nowhere", str(cache))

    # Names like those of bash's <(command), which is /dev/fd/63.
    for name in ("63", "64"):
        corpus = read_corpus(own_text(file=piped(name, content)), "nowhere", str(cache))
        assert corpus.digest == expected.digest
        np.testing.assert_array_equal(corpus.train, expected.train, strict=True)
    assert len(list((cache / "fetched" / "pipes").iterdir())) == 1


def test_a_pipe_may_be_all_three_splits(cache, piped):
    content = b"line 1\n" * 10_000
    lists = dict.fromkeys(SPLITS, (piped("65", content),))
    corpus = read_corpus(own_text(**lists), "nowhere", str(cache))
    assert len(corpus.train) == len(corpus.test) == len(content)


def test_a_pipe_without_content_is_named(cache, piped):
    with pytest.raises(UserError, match=r"/63 has no content"):
        read_corpus(own_text(file=piped("63", b"")), "nowhere", str(cache))
    assert not list((cache / "fetched" / "pipes").iterdir())


def test_pipes_of_splits_words_and_json_lines(cache, piped):
    lists = {}
    for split in SPLITS:
        content = f'{{"text": "the {split}"}}\n'.encode()
        lists[split] = (piped(split, content),)
    words = piped("words", b"the\ntrain\nvalid\ntest\n")
    tokenizer = TokenizerConfig(kind=Tokenizer.WORD, vocab_file=words)
    config = DataConfig(corpus=CorpusName.TEXT, json_field="text", tokenizer=tokenizer, **lists)

    corpus = read_corpus(config, "nowhere", str(cache))

    assert corpus.vocabulary.decode(corpus.train) == b"the train \n"
    assert corpus.vocabulary.decode(corpus.test) == b"the test \n"


def test_a_pipe_is_not_called_an_empty_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    config = own_text(train=(str(pipe),), valid=(__file__,), test=(__file__,))
    with pytest.raises(UserError, match=r"--data\.train .*/pipe, which is a pipe"):
        read_own_text(config)


@pytest.mark.parametrize("corpus", ["ids", "enwik8"])
def test_only_own_text_has_json_lines(corpus, tmp_path, cache):
    np.save(tmp_path / "ids.npy", np.arange(100))
    configs = {
        "ids": own_text(file=str(tmp_path / "ids.npy"), kind=Tokenizer.ID),
        "enwik8": DataConfig(file="enwik8-part"),  # A file that does not exist, and is not read.
    }
    config = dataclasses.replace(configs[corpus], json_field="text")
    with pytest.raises(UserError, match=r"data\.json_field"):
        read_corpus(config, "nowhere", str(cache))


def to_utf_16(content):
    return content.decode().encode("utf-16")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, to_utf_16])
def test_compressed_files_and_utf_16_are_named(tmp_path, cache, pack):
    """Read as bytes, they would train a model without an error."""
    (tmp_path / "plain.txt").write_bytes(b"a plain text\n" * 99)
    # Random digits are still long after compression.
    (tmp_path / "packed.txt").write_bytes(pack(random.Random(0).randbytes(999).hex().encode()))

    plain = read_corpus(own_text(file=str(tmp_path / "plain.txt")), "nowhere", str(cache))
    refuse_packed(plain)

    packed = read_corpus(own_text(file=str(tmp_path / "packed.txt")), "nowhere", str(cache))
    with pytest.raises(UserError, match=r"packed\.txt.*--data\.tokenizer\.kind=byte"):
        refuse_packed(packed)


def test_patterns_expand_in_the_order_of_names(five_files, tmp_path):
    for name in ("part10.txt", "part2.txt", "part1.txt", "part[1].txt"):
        (tmp_path / name).write_text(name)
    a, b = five_files[:2]

    text = read_own_text(
        own_text(train=(f"{tmp_path}/part*.txt", a), valid=(f"{tmp_path}/[de]",), test=(b,))
    )
    names = {}
    for split in SPLITS:
        names[split] = [os.path.basename(file.name) for file in text.splits[split]]
    assert names == {
        "train": ["part1.txt", "part10.txt", "part2.txt", "part[1].txt", "a"],
        "valid": ["d", "e"],
        "test": ["b"],
    }

    literal = read_own_text(own_text(train=(f"{tmp_path}/part[1].txt",), valid=(a,), test=(b,)))
    assert parts(literal)[0] == b"part[1].txt", "a file of that very name"


def test_the_digest_depends_on_order_split_and_the_ends_of_files(five_files, tmp_path):
    for name, content in {"one": b"on", "two": b"ce\n", "both": b"once\n"}.items():
        (tmp_path / name).write_bytes(content)
    a, b, c, d, e = five_files

    def digest(train, valid, test):
        return read_own_text(own_text(train=train, valid=valid, test=test)).digest

    digests = [
        digest((a, b), (c,), (d,)),
        digest((b, a), (c,), (d,)),
        digest((a,), (b, c), (d,)),
        digest((a, b), (c,), (d, e)),
        digest((f"{tmp_path}/one", f"{tmp_path}/two"), (a,), (b,)),
        digest((f"{tmp_path}/both",), (a,), (b,)),
    ]
    assert len(set(digests)) == 6
    assert digests[0] == digest((a, b), (c,), (d,))


@pytest.mark.parametrize("corpus", [CorpusName.TEXT, CorpusName.TEXT8])
@pytest.mark.parametrize("flag", ["train", "valid", "test", "file"])
@pytest.mark.parametrize("name", ["absent", "", "empty", "*.text"])
def test_bad_files_are_named_with_their_flag(name, flag, corpus, five_files, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    path = str(tmp_path / name)  # The directory itself, if the name is empty.
    if flag == "file":
        config = DataConfig(corpus=corpus, file=path)
    else:
        lists = dict.fromkeys(SPLITS, (five_files[0],))
        lists[flag] = (five_files[1], path)
        config = own_text(**lists)

    # Not as the directory of another file.
    with pytest.raises(UserError, match=rf"--data\.{flag}\b.*{re.escape(path)}(?!/)\b"):
        read_own_text(config)


# The end of a file, and how many empty lines it has. The first newline ends the last line of words.
ENDS_WITH_EMPTY_LINES = {
    "one": ("\n\n", 1),
    "one of Windows": ("\r\n\r\n", 1),
    "two of white space": (" \n \t\n\n", 2),
    "many": ("\n" * 1000, 999),
    "one that is open": ("\n ", 1),
}


@pytest.mark.parametrize(
    ("end", "n_empty"), ENDS_WITH_EMPTY_LINES.values(), ids=ENDS_WITH_EMPTY_LINES
)
def test_empty_lines_at_the_end_are_an_error_where_lines_have_a_meaning(end, n_empty, path):
    path.write_text("first\n\nlast" + end, newline="")
    # This source file is a text without empty lines at its end.
    lists = {"train": (__file__,), "valid": (__file__, str(path)), "test": (__file__,)}
    for fields in ({"file": str(path)}, lists):
        with pytest.raises(UserError, match=rf"^{path}\D*\b{n_empty}\b"):
            read_own_text(own_text(kind=Tokenizer.WORD, **fields))


@pytest.mark.parametrize(
    "fields",
    [{}, {"kind": "char"}, {"kind": Tokenizer.WORD, "line_mark": LineMark.NONE}],
    ids=["bytes", "characters", "words without marks"],
)
def test_empty_lines_at_the_end_stay_where_lines_have_no_meaning(fields, path):
    content = b"first\n\nlast\n\n\n"
    path.write_bytes(content)
    assert b"".join(parts(read_own_text(own_text(file=str(path), **fields)))) == content


@pytest.mark.parametrize("end", ["", "\n", "\r\n", " \n", " \t"])
def test_the_last_line_may_be_open_or_closed(end, path):
    path.write_text("first\n\n\nlast" + end, newline="")
    read_own_text(own_text(file=str(path), kind=Tokenizer.WORD))


def stdlib_at(root, monkeypatch):
    """The text of the standard library in a directory."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    return read_python_stdlib(DataConfig(corpus=CorpusName.PYTHON_STDLIB))


def write_modules(root, sizes):
    """Writes files of these sizes, which begin with their path."""
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n".ljust(size, "#"))


def top_level_name(path, root):
    """The top-level module or package of a source file."""
    return os.path.relpath(path, root).split("/")[0].removesuffix(".py")


def top_level_names(files, root):
    return {top_level_name(file.name, root) for file in files}


@pytest.fixture
def sources():
    """Sizes of source files by path: modules and packages of 30,000 bytes, and three large ones."""
    sizes = {}
    for number in range(40):
        sizes[f"module{number}.py"] = 30_000
    for number in range(20):
        sizes[f"package{number}/b/c.py"] = 10_000
        sizes[f"package{number}/a.py"] = 20_000
    # Held-out splits have 600,000 to 680,000 bytes, so names of up to 80,000 can be in one.
    sizes["at_the_limit.py"] = 80_000
    sizes["beyond/the_limit.py"] = 80_001
    sizes["encodings/a.py"] = 200_000
    return sizes


SKIPPED_SOURCES = [
    "test/t.py",
    "package1/tests/t.py",
    "idlelib/idle_test/t.py",
    "module1.txt",
    "site-packages/p.py",
    "dist-packages/p.py",
    "package2/__pycache__/c.py",
]


def test_python_stdlib_is_split_by_a_hash_of_top_level_names(sources, tmp_path, monkeypatch):
    """A package is in one split as a whole. Tests, links without a file, installed packages and
    files other than sources are skipped.
    """
    write_modules(tmp_path, sources)
    write_modules(tmp_path, dict.fromkeys(SKIPPED_SOURCES, 30_000))
    (tmp_path / "dangling.py").symlink_to(tmp_path / "absent.py")

    text = stdlib_at(tmp_path, monkeypatch)

    assert text.name == "python_stdlib"
    for content, split in zip(parts(text), SPLITS, strict=True):
        paths = [os.path.relpath(file.name, tmp_path) for file in text.splits[split]]
        assert paths == sorted(paths), split
        assert re.findall(r"(?m)^#*([^#\n]+)$", content.decode()) == paths, split

    names = {split: top_level_names(text.splits[split], tmp_path) for split in SPLITS}
    for_training = {"beyond", "encodings"}
    known = {path.split("/")[0].removesuffix(".py") for path in sources} - for_training
    by_hash = sorted(known, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    # `at_the_limit` and 18 names have 620,000 bytes, and 17 too few. Twenty have 600,000.
    assert "at_the_limit" in by_hash[:19]
    assert names["test"] == set(by_hash[:19])
    assert names["valid"] == set(by_hash[19:39])
    assert names["train"] == set(by_hash[39:]) | for_training


def test_the_digest_of_python_stdlib_depends_on_the_splits(tmp_path, monkeypatch):
    write_modules(tmp_path, {f"module{number}.py": 30_000 for number in range(50)})
    splits = stdlib_at(tmp_path, monkeypatch).splits
    n_all = len(splits["train"])

    # The last training module may validate instead. All bytes stay in their order.
    digests = set()
    for n_train in (n_all, n_all - 1):
        moved = {
            "train": splits["train"][:n_train],
            "valid": splits["train"][n_train:] + splits["valid"],
            "test": splits["test"],
        }
        monkeypatch.setattr(own_text_module, "split_by_name", lambda *_, moved=moved: moved)
        digests.add(stdlib_at(tmp_path, monkeypatch).digest)
    assert len(digests) == 2


def write_a_small_library(root, n_modules):
    """Writes a large module and some of 30,000 bytes, of which 40 fill the held-out splits."""
    sizes = {f"module{number}.py": 30_000 for number in range(n_modules)}
    write_modules(root, sizes | {"large.py": 900_000})


def test_a_standard_library_with_too_few_modules_is_an_error(tmp_path, monkeypatch):
    write_a_small_library(tmp_path, n_modules=39)
    with pytest.raises(UserError, match=r"1,200,000 bytes.* valid split got 570,000"):
        stdlib_at(tmp_path, monkeypatch)


def test_a_standard_library_with_just_enough_modules_is_read(tmp_path, monkeypatch):
    write_a_small_library(tmp_path, n_modules=40)
    text = stdlib_at(tmp_path, monkeypatch)
    assert top_level_names(text.splits["train"], tmp_path) == {"large"}


def test_a_standard_library_without_source_files_is_an_error(tmp_path, monkeypatch):
    """Python may have its library in an archive, from which sources are not read."""
    with pytest.raises(UserError, match=r"python311\.zip\b.*\.py\b"):
        stdlib_at(tmp_path / "python311.zip", monkeypatch)


def installed_pythons():
    """Directories of the standard libraries on this machine, of the versions that README names."""
    roots = {sysconfig.get_paths()["stdlib"]}
    for prefix in ("/usr", "/usr/local", os.path.dirname(sys.base_prefix) + "/*"):
        for version in ("3.11", "3.12", "3.13"):
            roots.update(glob.glob(f"{prefix}/lib/python{version}"))
    # Some directories have only the packages that a package manager installs.
    return sorted(root for root in roots if os.path.exists(f"{root}/argparse.py"))


def test_held_out_splits_of_python_stdlib_have_600_000_to_680_000_bytes(monkeypatch):
    """In each installed Python. The names of two versions differ in a tenth of the bytes."""
    first_test_names = None
    for root in installed_pythons():
        text = stdlib_at(root, monkeypatch)
        sizes = [sum(file.size for file in text.splits[split]) for split in SPLITS]
        assert 5e6 < sizes[0] < 20e6, root
        assert 600_000 <= sizes[1] <= 680_000, root
        assert 600_000 <= sizes[2] <= 680_000, root
        assert "encodings" in top_level_names(text.splits["train"], root), root

        if first_test_names is None:
            first_test_names = top_level_names(text.splits["test"], root)
        n_shared = 0
        for file in text.splits["test"]:
            if top_level_name(file.name, root) in first_test_names:
                n_shared += file.size
        assert n_shared > 0.9 * sizes[2], root


# Every kind of white space that cuts, one that does not, and characters of one to four bytes. UTF-8
# can encode all but surrogates. Hypothesis computes for a second with `codec`.
TEXTS = st.text(
    st.sampled_from("ab \n\t\r\N{NO-BREAK SPACE}é日😀")
    | st.characters(exclude_categories=["Cs"], exclude_characters="\0")
)
# Sizes of blocks, over and over. Some may be empty, but not all, or a text would never end.
SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@pytest.mark.parametrize("character", ["a", "é", "日", "😀"])
def test_text_without_white_space_is_cut_between_characters(character):
    text = character * 100_000
    size = 10_007  # A prime, so that every place in a character is met.

    blocks = list(text_blocks([in_blocks(text.encode(), [size])], close_lines=False))

    assert "".join(blocks) == text
    assert max(len(block.encode()) for block in blocks) < 100_000, "it is not held as a whole"


# Bytes that begin nothing, or a character whose other bytes are missing.
BAD = st.sampled_from([b"\xff", b"\0", "é".encode()[:1], "日".encode()[:2], "😀".encode()[:3]])


@given(start=TEXTS, end=TEXTS, sizes=SIZES, offset=st.integers(0, 99), bad=BAD)
def test_a_byte_that_is_not_text_is_named_with_its_place_in_the_file(
    start, end, sizes, offset, bad
):
    whole = in_blocks("日 ".encode(), sizes, name="other.txt")
    broken = in_blocks(start.encode() + bad + end.encode(), sizes, offset=offset)
    place = offset + len(start.encode())
    named = rf"\b{bad[0]:#04x}\b.*\b{place}\b.*--data\.tokenizer\.kind=byte\b"
    with pytest.raises(UserError, match=rf"^some\.txt\b.*{named}"):
        list(text_blocks([whole, broken, whole], close_lines=False))


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_a_byte_order_mark_is_not_part_of_the_first_word(block):
    """A mark elsewhere is a character of the text."""
    content = "\ufeffthe \ufeff cat"
    whole = in_blocks(content.encode(), block)
    assert "".join(text_blocks([whole], close_lines=False)) == "the \ufeff cat"

    # A part that begins later has no mark.
    later_part = in_blocks(content.encode(), block, offset=3)
    assert "".join(text_blocks([later_part], close_lines=False)) == content


def test_an_object_that_is_replaced_while_it_is_copied_is_copied_again(tmp_path, monkeypatch):
    """Also by one of the same size: the copy has the time that the object had before."""
    bucket = {"content": b"old", "time": 1000.0}
    downloads = []

    def download(url, target):
        downloads.append(bucket["content"])
        Path(target).write_bytes(bucket["content"])
        # Somebody replaces the object once its bytes were read.
        bucket.update(content=b"new", time=2000.0)

    monkeypatch.setattr(own_text_module.storage, "modified", lambda url: bucket["time"])
    monkeypatch.setattr(own_text_module, "size", lambda url: 3)
    monkeypatch.setattr(own_text_module.remote, "download", download)

    copies = [own_text_module._copy("gs://bucket/a.txt", tmp_path) for _ in range(3)]

    assert downloads == [b"old", b"new"]
    assert Path(copies[-1]).read_bytes() == b"new"
