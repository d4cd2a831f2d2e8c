"""Tests published corpora, in miniature: every place and form of their files, and the table of their facts."""

import os
import re
import shutil

import pytest

from support import miniature
from support.cases import full_but
from support.published_corpora import (
    TABLE,
    by_split,
    contents,
    expected_digest,
    flat,
    official,
    official_in_the_manual_folder,
    own_archive,
    place_official,
    read,
    unpacked,
)
from txl_jax.config import CorpusName, Heldout
from txl_jax.data import prepare
from txl_jax.data.published import CORPORA, WHOLE, Facts

pytestmark = pytest.mark.usefixtures("miniatures")


ARRANGEMENTS = [
    unpacked,
    flat,
    by_split,
    official,
    official_in_the_manual_folder,
    *map(own_archive, ("zip", "tar.gz", "tgz", "tar")),
]
CASES = [
    (name, arrange)
    for name in miniature.NAMES
    for arrange in ARRANGEMENTS
    if TABLE[name].own_layouts or arrange is not by_split
]
# Each corpus once, and each arrangement once.
QUICK = [(name, official) for name in miniature.NAMES] + [(CorpusName.PTB, arrange) for arrange in ARRANGEMENTS]


@pytest.mark.parametrize(
    ("name", "arrange"), full_but(QUICK, CASES), ids=lambda value: getattr(value, "__name__", value)
)
def test_a_corpus_in_each_arrangement_of_files(name, arrange, tmp_path):
    arrange(tmp_path, name)
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "data").rglob("*"))}
    text = read(name, tmp_path)
    expected = miniature.texts(name)
    assert contents(text) == contents(text) == expected, "a text may be read twice"
    assert {split: sum(file.size for file in files) for split, files in text.splits.items()} == {
        split: len(part) for split, part in expected.items()
    }
    assert list(text.splits) == ["train", "valid", "test"]
    assert text.digest == expected_digest(name), "the digest does not depend on the arrangement of the files"
    assert (text.name, text.closed_alphabet) == (name, TABLE[name].closed_alphabet)
    assert re.search(rf"{CORPORA[name].title}.*\b{sum(map(len, expected.values())):,}\b", text.description)
    after = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "data").rglob("*"))}
    assert after == before, "the files are left alone"
    left = sorted(os.listdir(tmp_path / "cache" / "tfds"))
    assert left == [f".txl_{name}.lock", f"txl_{name}"], "nothing is left over"


@pytest.mark.parametrize("name", [CorpusName.TEXT8, CorpusName.PTB, CorpusName.LM1B])
def test_a_prepared_corpus_needs_nothing_else(name, tmp_path):
    place_official(tmp_path, name)
    first = read(name, tmp_path)
    shutil.rmtree(tmp_path / "data")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    second = read(name, tmp_path)
    assert contents(second) == miniature.texts(name)
    assert (second.name, second.description, second.digest) == (first.name, first.description, first.digest)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")} == stamps


def test_files_have_names_for_errors(tmp_path):
    unpacked(tmp_path, CorpusName.PTB)
    place_official(tmp_path, CorpusName.LM1B)
    ptb, lm1b = read(CorpusName.PTB, tmp_path), read(CorpusName.LM1B, tmp_path)
    assert [file.name for files in ptb.splits.values() for file in files] == ["ptb train", "ptb valid", "ptb test"]
    assert [file.name for file in lm1b.splits["train"]] == [f"lm1b train, news.en-0000{i}-of-00100" for i in (1, 2, 3)]
    shards = miniature.shards(miniature.texts(CorpusName.LM1B)["train"])
    assert [b"".join(file.blocks()) for file in lm1b.splits["train"]] == shards, "in order, unlike the archive"
    assert [file.size for file in lm1b.splits["train"]] == list(map(len, shards))


def test_streams_of_one_file_do_not_disturb_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_RECORDS_PER_BLOCK", 1)
    unpacked(tmp_path, CorpusName.ENWIK8)
    (file,) = read(CorpusName.ENWIK8, tmp_path).splits["train"]
    slow, quick = file.blocks(), file.blocks()
    first = next(slow)
    assert b"".join(quick) == miniature.texts(CorpusName.ENWIK8)["train"]
    assert first + b"".join(slow) == miniature.texts(CorpusName.ENWIK8)["train"]


@pytest.mark.parametrize("name", full_but([CorpusName.LM1B], miniature.NAMES))
def test_many_files_of_records(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "RECORD_BYTES", 1000)
    monkeypatch.setattr(prepare, "SHARD_RECORDS", 7)
    place_official(tmp_path, name)
    assert contents(read(name, tmp_path)) == miniature.texts(name)
    files = sorted((tmp_path / "cache" / "tfds" / f"txl_{name}").rglob("*train*"))
    assert len(files) == -(-len(miniature.texts(name)["train"]) // 7000) > 5


def test_the_same_builders_serve_tensorflow_datasets(tmp_path):
    import tensorflow_datasets as tfds

    place_official(tmp_path, CorpusName.PTB)
    read(CorpusName.PTB, tmp_path)
    builder = tfds.builder("txl_ptb", data_dir=tmp_path / "cache" / "tfds")
    source = builder.as_data_source("valid")
    assert b"".join(source[i]["block"] for i in range(len(source))) == miniature.texts(CorpusName.PTB)["valid"]
    assert {builder.name for builder in prepare.BUILDERS.values()} == {f"txl_{name}" for name in miniature.NAMES}
    without_code = tfds.builder_from_directory(tmp_path / "cache" / "tfds" / "txl_ptb" / "1.0.0")
    assert set(without_code.info.splits) == {"train", "valid", "test"}


def test_one_billion_words_heldout_shards(tmp_path):
    place_official(tmp_path, CorpusName.LM1B)
    texts = miniature.texts(CorpusName.LM1B)
    separate = read(CorpusName.LM1B, tmp_path)
    same = read(CorpusName.LM1B, tmp_path, heldout=Heldout.PUBLISHED)
    assert contents(separate) == texts
    assert contents(same) == texts | {"valid": texts["test"]}
    assert separate.digest != same.digest


# The table


def test_the_official_facts():
    for name in (CorpusName.ENWIK8, CorpusName.TEXT8):
        row = TABLE[name]
        assert row.closed_alphabet and row.facts[WHOLE].size == 100_000_000 and row.facts[WHOLE].sha256
        assert row.ranges() == {
            "train": (WHOLE, 0, 90_000_000),
            "valid": (WHOLE, 90_000_000, 95_000_000),
            "test": (WHOLE, 95_000_000, 100_000_000),
        }
    for name, tokens in {
        CorpusName.PTB: [929_589, 73_760, 82_430],
        CorpusName.WIKITEXT103: [103_227_021, 217_646, 245_569],
        CorpusName.WIKITEXT2: [2_088_628, 217_646, 245_569],
    }.items():
        assert [TABLE[name].facts[split].tokens for split in ("train", "valid", "test")] == tokens
    assert TABLE[CorpusName.LM1B].facts["train"] == Facts(lines=30_301_028)
    for layout in TABLE[CorpusName.LM1B].layouts:
        assert len(layout["train"]) == 99
        assert layout["train"][0].endswith("training-monolingual.tokenized.shuffled/news.en-00001-of-00100")
        assert layout["train"][-1].endswith("/news.en-00099-of-00100")
        assert layout["test"][0].endswith("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050")
        assert layout["valid"][0].endswith("/news.en.heldout-00001-of-00050")
