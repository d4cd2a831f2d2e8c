"""Tests reading a corpus: which bytes land in which split, vocabularies, digests, and every bad input."""

import hashlib
import os
import random
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest

from txl_jax.config import CorpusName, DataConfig, Newlines
from txl_jax.data import sources
from txl_jax.data.corpus import read_corpus

SMALL_SPLITS = (60, 25, 15)
SMALL_TEXT = bytes(random.Random(0).choices(b"abcdefgh\n", k=99)) + b"\n"


@pytest.fixture
def small_enwik8(monkeypatch):
    """Makes files of 100 bytes count as the whole of enwik8."""
    monkeypatch.setattr(sources, "ENWIK8_SPLITS", SMALL_SPLITS)


def texts(corpus):
    """The three splits as bytes again."""
    return [corpus.vocabulary.decode(ids) for ids in (corpus.train, corpus.valid, corpus.test)]


def write_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)


def own_text(**fields):
    return DataConfig(corpus=CorpusName.TEXT, **fields)


# enwik8, whole


@pytest.mark.parametrize("place", ["enwik8", "enwik8/enwik8", "enwik8.zip", "enwik8/enwik8.zip"])
def test_enwik8_is_found_raw_or_zipped(place, tmp_path, small_enwik8):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".zip":
        write_zip(path, {"enwik8": SMALL_TEXT})
    else:
        path.write_bytes(SMALL_TEXT)
    files_before = sorted(tmp_path.rglob("*"))
    corpus = read_corpus(DataConfig(), str(tmp_path))
    assert texts(corpus) == [SMALL_TEXT[:60], SMALL_TEXT[60:85], SMALL_TEXT[85:]]
    assert corpus.vocabulary.symbols == bytes(sorted(set(SMALL_TEXT)))
    assert corpus.digest == hashlib.sha256(SMALL_TEXT).hexdigest()
    assert (corpus.name, corpus.description) == ("enwik8", "enwik8, 100 bytes, newlines kept")
    assert sorted(tmp_path.rglob("*")) == files_before, "reading leaves no files behind"


def test_newlines_are_dropped_after_splitting(tmp_path, small_enwik8):
    (tmp_path / "enwik8").write_bytes(SMALL_TEXT)
    corpus = read_corpus(DataConfig(newlines=Newlines.DROP), str(tmp_path))
    parts = [SMALL_TEXT[:60], SMALL_TEXT[60:85], SMALL_TEXT[85:]]
    assert all(b"\n" in part for part in parts), "the text must have something to drop"
    assert texts(corpus) == [part.replace(b"\n", b"") for part in parts]
    assert corpus.vocabulary.size == len(set(SMALL_TEXT)) - 1
    assert corpus.description == "enwik8, 100 bytes, newlines dropped"
    assert corpus.digest == hashlib.sha256(SMALL_TEXT).hexdigest(), "the digest is of what was read"


def test_the_official_split_is_90_5_5_million():
    assert sources.ENWIK8_SPLITS == (90_000_000, 5_000_000, 5_000_000)


def test_missing_enwik8_names_files_size_source_and_prefix_flag(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        read_corpus(DataConfig(), str(tmp_path))
    for part in (
        str(tmp_path / "enwik8"),
        str(tmp_path / "enwik8.zip"),
        "100,000,000",
        "http://mattmahoney.net/dc/enwik8.zip",
        "--data.file=PATH",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("zipped", [False, True])
def test_enwik8_of_another_size_names_both_sizes(zipped, tmp_path):
    if zipped:
        write_zip(tmp_path / "enwik8.zip", {"enwik8": b"x" * 1234})
    else:
        (tmp_path / "enwik8").write_bytes(b"x" * 1234)
    with pytest.raises(ValueError, match=r"holds 1,234 bytes and enwik8 has exactly 100,000,000; .*--data\.file="):
        read_corpus(DataConfig(), str(tmp_path))


def test_zip_without_the_member(tmp_path, small_enwik8):
    write_zip(tmp_path / "enwik8.zip", {"enwik9": SMALL_TEXT})
    with pytest.raises(ValueError, match=r"has no member enwik8 \(it holds enwik9\)"):
        read_corpus(DataConfig(), str(tmp_path))


def test_cut_zip(tmp_path, small_enwik8):
    path = tmp_path / "enwik8.zip"
    write_zip(path, {"enwik8": SMALL_TEXT})
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="cannot be unpacked .* may be damaged or only partly downloaded"):
        read_corpus(DataConfig(), str(tmp_path))


def test_zip_with_any_flipped_bit_gives_the_right_text_or_a_clear_error(tmp_path, small_enwik8):
    path = tmp_path / "enwik8.zip"
    write_zip(path, {"enwik8": SMALL_TEXT})
    whole = path.read_bytes()
    messages = set()
    for offset in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                # Some bytes, such as the date, do not matter.
                assert b"".join(texts(read_corpus(DataConfig(), str(tmp_path)))) == SMALL_TEXT
            except ValueError as error:
                messages.add(str(error))
    assert any("may be damaged" in message for message in messages)
    assert all(str(path) in message for message in messages)


# enwik8, a prefix


@pytest.mark.parametrize("size", [40, 99, 100, 101, 1234567])
def test_a_prefix_is_split_by_position_with_all_bytes_as_tokens(size, tmp_path):
    text = random.Random(size).randbytes(size)
    (tmp_path / "start").write_bytes(text)
    corpus = read_corpus(DataConfig(file=str(tmp_path / "start")), "nowhere")
    train, valid, test = texts(corpus)
    assert train + valid + test == text
    assert (len(train), len(train) + len(valid)) == (int(size * 90 // 100), int(size * 95 // 100))
    assert corpus.vocabulary.size == 256
    assert corpus.description == f"prefix of {size} bytes of start, newlines kept"
    assert corpus.digest == hashlib.sha256(text).hexdigest()


def test_a_prefix_can_drop_newlines(tmp_path):
    (tmp_path / "start").write_bytes(SMALL_TEXT)
    corpus = read_corpus(DataConfig(file=str(tmp_path / "start"), newlines=Newlines.DROP), "nowhere")
    parts = [SMALL_TEXT[:90], SMALL_TEXT[90:95], SMALL_TEXT[95:]]
    assert texts(corpus) == [part.replace(b"\n", b"") for part in parts]
    assert corpus.vocabulary.size == 256


@pytest.mark.parametrize("file", ["enwik8-4150k", "text8-4500k"])
def test_real_text(file):
    if "TXL_DATA_DIR" not in os.environ:
        pytest.skip(f"TXL_DATA_DIR is not set, so there is no {file}")
    path = Path(os.environ["TXL_DATA_DIR"], file)
    corpus = read_corpus(DataConfig(file=str(path)), "nowhere")
    assert b"".join(texts(corpus)) == path.read_bytes()
    assert corpus.description == f"prefix of {path.stat().st_size} bytes of {file}, newlines kept"


# Own text


def test_own_text_in_one_file(tmp_path):
    (tmp_path / "poem.txt").write_bytes(SMALL_TEXT)
    corpus = read_corpus(own_text(file=str(tmp_path / "poem.txt")), "nowhere")
    assert texts(corpus) == [SMALL_TEXT[:90], SMALL_TEXT[90:95], SMALL_TEXT[95:]]
    assert corpus.description == "own text, 100 bytes of poem.txt, newlines kept"


@pytest.fixture
def five_files(tmp_path):
    """Paths of files whose text is their name, ten times, and a newline."""
    paths = []
    for name in "abcde":
        path = tmp_path / name
        path.write_bytes(name.encode() * 10 + b"\n")
        paths.append(str(path))
    return paths


def test_own_text_in_lists_is_joined_in_the_order_given(five_files):
    a, b, c, d, e = five_files
    corpus = read_corpus(own_text(train=(c, a), valid=(b,), test=(e, d)), "nowhere")
    assert texts(corpus) == [b"c" * 10 + b"\n" + b"a" * 10 + b"\n", b"b" * 10 + b"\n", b"eeeeeeeeee\ndddddddddd\n"]
    assert corpus.vocabulary.size == 256
    assert corpus.description == "own text, 22 + 11 + 22 bytes in train + valid + test, newlines kept"


def test_the_digest_knows_order_and_split(five_files):
    a, b, c, d, e = five_files
    arrangements = [
        {"train": (a, b), "valid": (c,), "test": (d,)},
        {"train": (b, a), "valid": (c,), "test": (d,)},
        {"train": (a,), "valid": (b, c), "test": (d,)},
        {"train": (a, b), "valid": (c,), "test": (d, e)},
    ]
    digests = [read_corpus(own_text(**lists), "nowhere").digest for lists in arrangements]
    assert len(set(digests)) == len(arrangements)
    assert digests[0] == read_corpus(own_text(**arrangements[0]), "elsewhere").digest


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_bad_files_are_named_with_their_flag(split, five_files, tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    bad = [
        (tmp_path / "absent", FileNotFoundError, "does not exist"),
        (tmp_path, ValueError, "is a directory"),
        (tmp_path / "empty", ValueError, "is empty"),
    ]
    for path, error, words in bad:
        lists = {name: (five_files[0],) for name in ("train", "valid", "test")}
        lists[split] = (five_files[1], str(path))
        with pytest.raises(error) as caught:
            read_corpus(own_text(**lists), "nowhere")
        assert f"--data.{split} names {path}, which {words}" in str(caught.value)


@pytest.mark.parametrize("corpus", [CorpusName.ENWIK8, CorpusName.TEXT])
def test_bad_single_files_are_named_with_their_flag(corpus, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data\.file names .*absent, which does not exist"):
        read_corpus(DataConfig(corpus=corpus, file=str(tmp_path / "absent")), "nowhere")


def test_an_unfinished_config_is_refused():
    with pytest.raises(ValueError, match="give exactly one of the two"):
        read_corpus(own_text(), "nowhere")


def test_a_split_without_a_target_is_named(tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 20)  # 18 + 1 + 1
    with pytest.raises(ValueError, match="the valid split of own text, 20 bytes of short has 1 tokens"):
        read_corpus(own_text(file=str(path)), "nowhere")
    path.write_bytes(b"x" * 40)  # 36 + 2 + 2
    read_corpus(own_text(file=str(path)), "nowhere")
    path.write_bytes(b"x" * 39 + b"\n")
    with pytest.raises(ValueError, match="the test split of own text, 40 bytes of short has 1 tokens"):
        read_corpus(own_text(file=str(path), newlines=Newlines.DROP), "nowhere")


# Python's library


def test_python_stdlib_is_of_the_promised_size_and_the_same_each_time():
    first, second = (read_corpus(DataConfig(corpus=CorpusName.PYTHON_STDLIB), "nowhere") for _ in range(2))
    size = len(first.train) + len(first.valid) + len(first.test)
    assert 5e6 < size < 20e6
    assert len(first.test) == size - size * 95 // 100
    assert len(first.train) == size * 90 // 100
    assert (first.digest, first.description) == (second.digest, second.description)
    assert all(map(np.array_equal, (first.train, first.valid, first.test), (second.train, second.valid, second.test)))
    assert f"{size:,} bytes" in first.description
    assert first.vocabulary.size == 256


def test_python_stdlib_reads_modules_in_path_order_and_no_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    wanted = {"a.py": "first", "b/c.py": "second", "b/testing/x.py": "third", "b.py": "fourth"}
    order = sorted(wanted)
    skipped = [
        "test/t.py",
        "b/tests/t.py",
        "idlelib/idle_test/t.py",
        "site-packages/p.py",
        "b/__pycache__/c.py",
        "a.txt",
    ]
    for name, text in wanted.items() | {name: "NO" for name in skipped}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text * 10)
    corpus = read_corpus(DataConfig(corpus=CorpusName.PYTHON_STDLIB), "nowhere")
    assert b"".join(texts(corpus)).decode() == "".join(wanted[name] * 10 for name in order)
    assert ", 4 files, 220 bytes" in corpus.description


def test_python_stdlib_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(FileNotFoundError, match=r"python311\.zip holds no \.py files"):
        read_corpus(DataConfig(corpus=CorpusName.PYTHON_STDLIB), "nowhere")
