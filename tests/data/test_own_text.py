"""Tests text from files on this machine: which bytes land in which split, digests, and every file
that is refused.
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
    return b"".join(block for file in files for block in file.blocks())


def parts(text):
    """The three splits as bytes; sizes must be as declared."""
    read = [contents(text.splits[name]) for name in SPLITS]
    assert [sum(file.size for file in text.splits[name]) for name in SPLITS] == list(map(len, read))
    return read


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Path of a file to write; one for all examples of a test."""
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


@pytest.mark.parametrize("size", [40, 99, 100, 101, 1234567])
def test_bytes_are_split_by_position(size, path):
    content = random.Random(size).randbytes(size)
    path.write_bytes(content)
    first, second = int(size * 90 // 100), int(size * 95 // 100)
    own, prefix = read_own_text(own_text(file=str(path))), read_own_text(DataConfig(file=str(path)))
    for text in (own, prefix):
        assert parts(text) == [content[:first], content[first:second], content[second:]]
        assert text.digest == hashlib.sha256(content).hexdigest()
        assert not text.closed_alphabet and "poem.txt" in text.description
    assert (own.name, prefix.name) == ("text", "enwik8 prefix")


@pytest.mark.parametrize(
    "tokens", [{"kind": Tokenizer.CHAR}, {"kind": Tokenizer.WORD, "line_mark": LineMark.NONE}]
)
@given(lines=st.lists(st.text("ab é日😀", max_size=20), min_size=1), open_end=st.booleans())
@settings(max_examples=100)
def test_other_tokens_are_split_where_lines_begin(path, tokens, lines, open_end):
    content = ("\n".join(lines) + "x\n" * (not open_end)).encode() or b"x"
    path.write_bytes(content)
    text = read_own_text(own_text(file=str(path), **tokens))
    train, valid, test = parts(text)
    assert train + valid + test == content
    for percent, border in ((90, len(train)), (95, len(train + valid))):
        nominal = len(content) * percent // 100
        assert border >= nominal
        # That byte decides whether a line begins at the nominal border already.
        before = max(nominal - 1, 0)
        if b"\n" in content[before:]:
            assert content[border - 1 : border] == b"\n", "a line begins here"
            assert b"\n" not in content[before : border - 1], "and none before"
        elif b" " in content[before:]:
            assert content[border - 1 : border] == b" " and b" " not in content[before : border - 1]
        else:
            assert border - nominal <= 3, "the rest of a character"
    for name in SPLITS:
        "".join(text_blocks(text.splits[name], close_lines=False))  # No character is cut.


def test_large_files_come_in_blocks(path):
    content = random.Random(0).randbytes(2 * BLOCK_BYTES + 5)
    path.write_bytes(content)
    file, part = file_part(str(path)), file_part(str(path), 7, BLOCK_BYTES + 9)
    assert list(map(len, file.blocks())) == [BLOCK_BYTES, BLOCK_BYTES, 5]
    assert contents([file]) == content == contents([file]), "each time from the beginning"
    assert (part.size, part.offset) == (BLOCK_BYTES + 2, 7) and contents([part]) == content[
        7 : BLOCK_BYTES + 9
    ]
    os.truncate(path, BLOCK_BYTES)
    with pytest.raises(UserError, match=rf"^{path}\b"):
        contents([part])


def splits_of(file, cache, **fields):
    corpus = read_corpus(own_text(file=str(file), **fields), "nowhere", str(cache))
    return [corpus.vocabulary.decode(getattr(corpus, split)).decode() for split in SPLITS]


def test_the_last_files_of_a_directory_or_pattern_validate_and_test(tmp_path, capsys):
    (folder := tmp_path / "texts").mkdir()
    for number in range(44):
        (folder / f"{number:02}.txt").write_text(f"<{number:02}>")
    (folder / "below").mkdir()
    (folder / "below" / "a.txt").write_text("<below>")  # The last one by name.
    expected = ["".join(f"<{i:02}>" for i in range(41)), "<41><42>", "<43><below>"]
    assert splits_of(folder, tmp_path / "cache") == expected
    assert "note" not in capsys.readouterr().out
    (folder / ".hidden").write_text("no")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "b.txt").write_text("no")
    (folder / "empty").write_text("")
    assert splits_of(folder, tmp_path / "cache") == expected
    assert re.search(rf"(?m)^note +3 .*{folder}", capsys.readouterr().out)
    assert splits_of(folder / "4*.txt", tmp_path / "cache") == ["<40><41>", "<42>", "<43>"]
    assert splits_of(folder / "**" / "*.txt", tmp_path / "cache") == expected


def test_one_or_two_files_of_a_directory_are_split_by_position(tmp_path):
    (folder := tmp_path / "texts").mkdir()
    (folder / "b").write_text("b" * 50)
    with_one = splits_of(folder, tmp_path / "cache")
    assert with_one == ["b" * 45, "b" * 2, "b" * 3] == splits_of(folder / "b", tmp_path / "cache")
    (folder / "a").write_text("a" * 50)
    assert splits_of(folder, tmp_path / "cache") == ["a" * 50 + "b" * 40, "b" * 5, "b" * 5]
    for name in ("none*", "empty"):
        (folder / "empty").mkdir(exist_ok=True)
        with pytest.raises(UserError, match=rf"--data\.file .*{re.escape(str(folder / name))}"):
            splits_of(folder / name, tmp_path / "cache")


DOCUMENTS = ['Ein "Satz".\nZweite Zeile\n', "café 😀", "drei vier"] * 10


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "\n"),
        ({"reset_at": "\\n"}, "\n"),
        ({"kind": Tokenizer.CHAR, "reset_at": "#"}, "#"),
        ({"kind": Tokenizer.WORD, "reset_at": "<eos>"}, "\n"),
        ({"kind": Tokenizer.WORD, "reset_at": "<doc>"}, "\n<doc> "),
    ],
)
def test_documents_of_json_lines_end_as_the_reset_or_with_a_line(tmp_path, fields, end):
    lines = [
        json.dumps({"id": 7, "text": text}, ensure_ascii=number % 2 == 0)
        for number, text in enumerate(DOCUMENTS)
    ]
    (tmp_path / "d.jsonl").write_text("\ufeff" + "\n".join([*lines, "", json.dumps({"text": ""})]))
    expected = "".join((text.rstrip("\n") if end[0] == "\n" else text) + end for text in DOCUMENTS)
    (tmp_path / "plain.txt").write_text(expected)
    [found, plain] = (
        read_corpus(
            own_text(file=str(tmp_path / name), json_field=field, **fields),
            "nowhere",
            str(tmp_path / "cache"),
        )
        for name, field in (("d.jsonl", "text"), ("plain.txt", None))
    )
    assert found.digest == plain.digest and found.vocabulary == plain.vocabulary
    if end == "\n":
        (tmp_path / "d.jsonl").write_text(
            "".join(json.dumps({"text": "another"}) + "\n" for _ in range(50))
        )
        assert splits_of(tmp_path / "d.jsonl", tmp_path / "cache", json_field="text")[0].startswith(
            "another\nanother"
        )


NO_TEXTS = [
    b"{",
    b"7",
    b'"text"',
    b"[]",
    b'{"other": "a"}',
    b'{"text": 7}',
    b'{"text": "\\ud800"}',
    b"\xff",
]


@pytest.mark.parametrize("bad", NO_TEXTS)
def test_a_line_without_the_text_is_named_by_its_number(tmp_path, bad):
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a b"}\n\n' + bad + b"\n")
    with pytest.raises(UserError, match=r"line 3 of .*d\.jsonl .*'text'.*--data\.json_field"):
        splits_of(tmp_path / "d.jsonl", tmp_path / "cache", json_field="text")
    assert not list(tmp_path.rglob("*.tmp")) and not list((tmp_path / "cache").rglob("d.txt"))


@pytest.mark.parametrize("kind", [Tokenizer.CHAR, Tokenizer.WORD])
def test_a_zero_in_a_document_is_named_by_its_line(tmp_path, kind):
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a b"}\n\n{"text": "ab\\u0000"}\n' * 30)
    with pytest.raises(UserError, match=r"line 3 of .*d\.jsonl .*position 2\b.*kind=byte"):
        splits_of(tmp_path / "d.jsonl", tmp_path / "cache", json_field="text", kind=kind)
    assert "ab\0\n" in splits_of(tmp_path / "d.jsonl", tmp_path / "cache", json_field="text")[0]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "a b"}\r\n' * 30)
    assert splits_of(tmp_path / "d.jsonl", tmp_path / "cache", json_field="text")[0].startswith(
        "a b\na b"
    )


def test_an_error_in_the_text_of_json_lines_names_them(tmp_path):
    """Not only the file of their text in the cache, which the user has never seen."""
    (tmp_path / "d.jsonl").write_text('{"text": "abc"}\n' * 30 + '{"text": "abz"}\n')
    known = ByteVocabulary(b"\nabc")
    config = own_text(file=str(tmp_path / "d.jsonl"), json_field="text")
    with pytest.raises(
        UserError, match=r"d\.jsonl \(its text is .*d\.txt\): byte 122 at offset 122\b"
    ):
        read_corpus(config, "nowhere", str(tmp_path / "cache"), vocabulary=known)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_compressed_json_lines_are_named(tmp_path, pack):
    (tmp_path / "d.jsonl.gz").write_bytes(pack(b'{"text": "a b"}\n' * 30))
    with pytest.raises(UserError, match=r"d\.jsonl\.gz .*(gzip|xz).*zcat"):
        splits_of(tmp_path / "d.jsonl.gz", tmp_path / "cache", json_field="text")


@pytest.fixture
def piped(tmp_path):
    """Returns the path of a new pipe from which the bytes passed can be read once."""
    writers = []

    def make(name, content):
        path = tmp_path / name
        os.mkfifo(path)
        writers.append(threading.Thread(target=path.write_bytes, args=[content], daemon=True))
        writers[-1].start()
        return str(path)

    yield make
    for writer in writers:
        writer.join(10)
        assert not writer.is_alive()


def test_a_pipe_is_read_once_into_the_cache(tmp_path, piped):
    content = b"".join(b"line %d\n" % number for number in range(50_000))
    (tmp_path / "book.txt").write_bytes(content)
    cache = str(tmp_path / "cache")
    expected = read_corpus(own_text(file=str(tmp_path / "book.txt")), "nowhere", cache)
    for config in (own_text(file=piped("63", content)), own_text(file=piped("64", content))):
        corpus = read_corpus(config, "nowhere", cache)
        assert corpus.digest == expected.digest
        assert corpus.train.tolist() == expected.train.tolist()
    assert len(list((tmp_path / "cache" / "fetched" / "pipes").iterdir())) == 1
    twice = piped("65", content)
    lists = dict.fromkeys(SPLITS, (twice,))
    corpus = read_corpus(own_text(**lists), "nowhere", cache)
    assert len(corpus.train) == len(corpus.test) == len(content)


def test_a_pipe_without_content_is_named(tmp_path, piped):
    with pytest.raises(UserError, match=r"/63 has no content"):
        read_corpus(own_text(file=piped("63", b"")), "nowhere", str(tmp_path / "cache"))
    assert not list((tmp_path / "cache" / "fetched" / "pipes").iterdir())


def test_pipes_of_splits_words_and_json_lines(tmp_path, piped):
    lists = {split: (piped(split, f'{{"text": "the {split}"}}\n'.encode()),) for split in SPLITS}
    words = TokenizerConfig(
        kind=Tokenizer.WORD, vocab_file=piped("words", b"the\ntrain\nvalid\ntest\n")
    )
    config = DataConfig(corpus=CorpusName.TEXT, json_field="text", tokenizer=words, **lists)
    corpus = read_corpus(config, "nowhere", str(tmp_path / "cache"))
    assert corpus.vocabulary.decode(corpus.train) == b"the train \n"
    assert corpus.vocabulary.decode(corpus.test) == b"the test \n"


def test_a_pipe_is_not_called_an_empty_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"--data\.train .*/pipe, which is a pipe"):
        read_own_text(
            own_text(train=(str(tmp_path / "pipe"),), valid=(__file__,), test=(__file__,))
        )


def test_only_own_text_has_json_lines(tmp_path):
    np.save(tmp_path / "ids.npy", np.arange(100))
    for config in (
        own_text(file=str(tmp_path / "ids.npy"), kind=Tokenizer.ID),
        DataConfig(file="enwik8-part"),
    ):
        with pytest.raises(UserError, match=r"data\.json_field"):
            read_corpus(
                dataclasses.replace(config, json_field="text"), "nowhere", str(tmp_path / "cache")
            )


@pytest.mark.parametrize(
    "pack",
    [gzip.compress, bz2.compress, lzma.compress, lambda text: text.decode().encode("utf-16")],
)
def test_compressed_files_and_utf_16_are_found(tmp_path, pack):
    (tmp_path / "plain.txt").write_bytes(b"a plain text\n" * 99)
    (tmp_path / "packed.txt").write_bytes(pack(random.Random(0).randbytes(999).hex().encode()))
    refuse_packed(
        read_corpus(own_text(file=str(tmp_path / "plain.txt")), "nowhere", str(tmp_path / "cache"))
    )
    corpus = read_corpus(
        own_text(file=str(tmp_path / "packed.txt")), "nowhere", str(tmp_path / "cache")
    )
    with pytest.raises(UserError, match=r"packed\.txt.*--data\.tokenizer\.kind=byte"):
        refuse_packed(corpus)


def test_patterns_expand_in_the_order_of_names(five_files, tmp_path):
    for name in ("part10.txt", "part2.txt", "part1.txt", "part[1].txt"):
        (tmp_path / name).write_text(name)
    a, b = five_files[:2]
    text = read_own_text(
        own_text(train=(f"{tmp_path}/part*.txt", a), valid=(f"{tmp_path}/[de]",), test=(b,))
    )
    names = [os.path.basename(file.name) for name in SPLITS for file in text.splits[name]]
    assert names == ["part1.txt", "part10.txt", "part2.txt", "part[1].txt", "a", "d", "e", "b"]
    as_it_is = read_own_text(own_text(train=(f"{tmp_path}/part[1].txt",), valid=(a,), test=(b,)))
    assert parts(as_it_is)[0] == b"part[1].txt", "a file of that very name"


def test_the_digest_depends_on_order_split_and_the_ends_of_files(five_files, tmp_path):
    a, b, c, d, e = five_files
    for name, content in {"one": b"on", "two": b"ce\n", "both": b"once\n"}.items():
        (tmp_path / name).write_bytes(content)
    arrangements = [
        {"train": (a, b), "valid": (c,), "test": (d,)},
        {"train": (b, a), "valid": (c,), "test": (d,)},
        {"train": (a,), "valid": (b, c), "test": (d,)},
        {"train": (a, b), "valid": (c,), "test": (d, e)},
        {"train": (f"{tmp_path}/one", f"{tmp_path}/two"), "valid": (a,), "test": (b,)},
        {"train": (f"{tmp_path}/both",), "valid": (a,), "test": (b,)},
    ]
    digests = [read_own_text(own_text(**lists)).digest for lists in arrangements]
    assert len(set(digests)) == len(arrangements)
    assert digests[0] == read_own_text(own_text(**arrangements[0])).digest


@pytest.mark.parametrize("bad", ["absent", "", "empty", "*.text"])
def test_bad_files_are_named_with_their_flag(bad, five_files, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    path = str(tmp_path / bad)
    lists = dict.fromkeys(SPLITS, (five_files[0],))
    configs = {split: own_text(**lists | {split: (five_files[1], path)}) for split in SPLITS}
    for corpus in (CorpusName.TEXT, CorpusName.TEXT8):
        for flag, config in (configs | {"file": DataConfig(corpus=corpus, file=path)}).items():
            with pytest.raises(UserError, match=rf"--data\.{flag}\b.*{re.escape(path)}(?!/)\b"):
                read_own_text(config)


def test_empty_lines_at_the_end_are_refused_where_lines_have_a_meaning(path):
    lists = {"train": (__file__,), "valid": (__file__, str(path)), "test": (__file__,)}
    for end, n_empty in (
        ("\n\n", 1),
        ("\r\n\r\n", 1),
        (" \n \t\n\n", 2),
        ("\n" * 1000, 999),
        ("\n ", 1),
    ):
        path.write_text("first\n\nlast" + end, newline="")
        for fields in ({"file": str(path)}, lists):
            with pytest.raises(UserError, match=rf"^{path}\D*\b{n_empty}\b"):
                read_own_text(own_text(kind=Tokenizer.WORD, **fields))
    path.write_text("first\n\nlast\n\n\n")
    for fields in ({}, {"kind": "char"}, {"kind": Tokenizer.WORD, "line_mark": LineMark.NONE}):
        assert (
            b"".join(parts(read_own_text(own_text(file=str(path), **fields))))
            == b"first\n\nlast\n\n\n"
        )
    for end in ("", "\n", "\r\n", " \n", " \t"):
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


def top_level_names(files, root):
    return {os.path.relpath(file.name, root).split("/")[0].removesuffix(".py") for file in files}


def test_python_stdlib_is_split_by_a_hash_of_top_level_names(tmp_path, monkeypatch):
    # Modules and packages of 30,000 bytes, and two as large as the range of sizes, or larger.
    modules = {f"module{number}.py": 30_000 for number in range(40)}
    packages = {f"package{number}/b/c.py": 10_000 for number in range(20)}
    packages |= {f"package{number}/a.py": 20_000 for number in range(20)}
    large = {"at_the_limit.py": 80_000, "beyond/the_limit.py": 80_001, "encodings/a.py": 200_000}
    write_modules(tmp_path, modules | packages | large)
    skipped = ["test/t.py", "package1/tests/t.py", "idlelib/idle_test/t.py", "module1.txt"]
    skipped += ["site-packages/p.py", "dist-packages/p.py", "package2/__pycache__/c.py"]
    write_modules(tmp_path, dict.fromkeys(skipped, 30_000))
    (tmp_path / "dangling.py").symlink_to(tmp_path / "absent.py")

    text = stdlib_at(tmp_path, monkeypatch)
    assert text.name == "python_stdlib"
    read = parts(text)
    for content, split in zip(read, SPLITS, strict=True):
        paths = [os.path.relpath(file.name, tmp_path) for file in text.splits[split]]
        assert paths == sorted(paths)
        assert re.findall(r"(?m)^#*([^#\n]+)$", content.decode()) == paths

    names = {split: top_level_names(text.splits[split], tmp_path) for split in SPLITS}
    known = {path.split("/")[0].removesuffix(".py") for path in modules | packages | large}
    by_hash = sorted(
        known - {"beyond", "encodings"}, key=lambda name: hashlib.sha256(name.encode()).hexdigest()
    )
    # `at_the_limit` and 18 names have 620,000 bytes, and 17 too few. Twenty have 600,000.
    assert "at_the_limit" in by_hash[:19]
    assert names["test"] == set(by_hash[:19])
    assert names["valid"] == set(by_hash[19:39])
    assert names["train"] == set(by_hash[39:]) | {"beyond", "encodings"}


def test_the_digest_of_python_stdlib_depends_on_the_splits(tmp_path, monkeypatch):
    write_modules(tmp_path, {f"module{number}.py": 30_000 for number in range(50)})
    splits = stdlib_at(tmp_path, monkeypatch).splits
    digests = set()
    # The last training module may validate instead. All bytes stay in their order.
    for n_train in (len(splits["train"]), len(splits["train"]) - 1):
        moved = {
            "train": splits["train"][:n_train],
            "valid": splits["train"][n_train:] + splits["valid"],
            "test": splits["test"],
        }
        monkeypatch.setattr(own_text_module, "split_by_name", lambda *_, moved=moved: moved)
        digests.add(stdlib_at(tmp_path, monkeypatch).digest)
    assert len(digests) == 2


@pytest.mark.parametrize("n_modules", [39, 40])
def test_a_standard_library_with_too_few_modules_is_an_error(n_modules, tmp_path, monkeypatch):
    sizes = {f"module{number}.py": 30_000 for number in range(n_modules)}
    write_modules(tmp_path, sizes | {"large.py": 900_000})
    if n_modules == 40:
        text = stdlib_at(tmp_path, monkeypatch)
        assert top_level_names(text.splits["train"], tmp_path) == {"large"}
        return
    with pytest.raises(UserError, match=r"1,200,000 bytes.* valid split got 570,000"):
        stdlib_at(tmp_path, monkeypatch)


def test_a_standard_library_without_source_files_is_an_error(tmp_path, monkeypatch):
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
    """In each Python on this machine. The names of two versions differ in a tenth of the bytes."""
    first_test = None
    for root in installed_pythons():
        text = stdlib_at(root, monkeypatch)
        sizes = [sum(file.size for file in text.splits[split]) for split in SPLITS]
        assert 5e6 < sizes[0] < 20e6, root
        assert 600_000 <= sizes[1] <= 680_000, root
        assert 600_000 <= sizes[2] <= 680_000, root
        assert "encodings" in top_level_names(text.splits["train"], root)
        test_names = top_level_names(text.splits["test"], root)
        first_test = first_test or test_names
        n_shared = sum(
            file.size for file in text.splits["test"] if top_level_names([file], root) <= first_test
        )
        assert n_shared > 0.9 * sizes[2], root


# Every kind of white space that cuts, one that does not, and characters of one to four bytes.
TEXTS = st.text(
    st.sampled_from("ab \n\t\r\N{NO-BREAK SPACE}é日😀")
    | st.characters(codec="utf-8", exclude_characters="\0")
)
SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@pytest.mark.parametrize("character", ["a", "é", "日", "😀"])
def test_text_without_white_space_is_cut_between_characters(character):
    text, size = character * 100_000, 10_007  # A prime, so that every place in a character is met.
    blocks = list(text_blocks([in_blocks(text.encode(), [size])], close_lines=False))
    assert "".join(blocks) == text
    assert max(len(block.encode()) for block in blocks) < 100_000, "it is not held as a whole"


# Bytes that begin nothing, or a character whose other bytes are missing.
BAD = st.sampled_from(
    [b"\xff", b"\0", *("é日😀".encode()[first:last] for first, last in ((0, 1), (2, 4), (5, 8)))]
)


@given(start=TEXTS, end=TEXTS, sizes=SIZES, offset=st.integers(0, 99), bad=BAD)
def test_a_byte_that_is_no_text_is_named_with_its_place_in_the_file(start, end, sizes, offset, bad):
    whole = in_blocks("日 ".encode(), sizes, name="other.txt")
    broken = in_blocks(start.encode() + bad + end.encode(), sizes, offset=offset)
    named = (
        rf"\b{bad[0]:#04x}\b.*\b{offset + len(start.encode())}\b.*--data\.tokenizer\.kind=byte\b"
    )
    with pytest.raises(UserError, match=rf"^some\.txt\b.*{named}"):
        list(text_blocks([whole, broken, whole], close_lines=False))


@pytest.mark.parametrize("block", [1, 2, 5, 100])
def test_a_byte_order_mark_is_no_part_of_the_first_word(block):
    content = "\ufeffthe \ufeff cat"
    # A part that begins later has no mark.
    for offset, expected in ((0, content[1:]), (3, content)):
        file = in_blocks(content.encode(), block, offset=offset)
        assert "".join(text_blocks([file], close_lines=False)) == expected
