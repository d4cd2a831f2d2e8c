"""Tests published corpora, in miniature: every place and form of their files, and every way to be wrong."""

import dataclasses
import fcntl
import functools
import hashlib
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
import requests

from support import ROOT, miniature
from txl_jax.config import CorpusName, Heldout
from txl_jax.data.sources import published, tfds_builders
from txl_jax.data.sources.corpora import CORPORA
from txl_jax.data.sources.corpus_row import WHOLE, Facts
from txl_jax.errors import UserError

TABLE = dict(CORPORA)  # As it is shipped.
ONE_FILE = tuple(name for name, row in TABLE.items() if row.cuts)
WORDS = tuple(name for name, row in TABLE.items() if all(facts.tokens for facts in row.facts.values()))


@pytest.fixture(autouse=True)
def miniatures(monkeypatch):
    """The table of the miniatures, and no network."""
    for name in miniature.NAMES:
        monkeypatch.setitem(CORPORA, name, miniature.corpus(name))
    monkeypatch.setattr(requests, "head", refuse)
    monkeypatch.setattr(requests.Session, "send", lambda *args, **kwargs: pytest.fail("the network was used"))


def refuse(url, **kwargs):
    raise requests.ConnectionError(f"no route to {url}")


def read(name, tmp_path, **options):
    """Reads from the folder `data`."""
    return published.read(name, data_dir=str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), **options)


def contents(text):
    """The bytes of each split."""
    return {split: b"".join(b"".join(file.blocks()) for file in files) for split, files in text.splits.items()}


def place(folder, members):
    """Writes files below a folder."""
    for name, content in members.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def place_official(tmp_path, name):
    place(tmp_path / "data", {miniature.OFFICIAL[name]: miniature.official(name)})


def unpacked(tmp_path, name):
    place(tmp_path / "data", miniature.files(name))


def flat(tmp_path, name):
    """Files without the archive's folders."""
    keep = 2 if name is CorpusName.LM1B else 1
    members = {"/".join(file.split("/")[-keep:]): content for file, content in miniature.files(name).items()}
    place(tmp_path / "data" / str(name), members)


def by_split(tmp_path, name):
    texts = miniature.texts(name)
    place(tmp_path / "data" / TABLE[name].folders[-1], {f"{split}.txt": text for split, text in texts.items()})


def official(tmp_path, name):
    place_official(tmp_path, name)


def official_in_the_manual_folder(tmp_path, name):
    place(tmp_path / "data" / "downloads" / "manual", {miniature.OFFICIAL[name]: miniature.official(name)})


def own_archive(suffix):
    def write(tmp_path, name):
        file = f"{name}.{suffix}"
        place(tmp_path / "data" / str(name), {file: miniature.archive(file, miniature.files(name))})

    write.__name__ = f"own_{suffix}"
    return write


ARRANGEMENTS = [
    unpacked,
    flat,
    by_split,
    official,
    official_in_the_manual_folder,
    *map(own_archive, ("zip", "tar.gz", "tgz", "tar")),
]


@pytest.mark.parametrize(
    ("name", "arrange"),
    [
        (name, arrange)
        for name in miniature.NAMES
        for arrange in ARRANGEMENTS
        if TABLE[name].own_layouts or arrange is not by_split
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_corpus_in_each_arrangement_of_files(name, arrange, tmp_path):
    arrange(tmp_path, name)
    before = {path: path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    text = read(name, tmp_path)
    expected = miniature.texts(name)
    assert contents(text) == expected
    assert contents(text) == expected, "a text may be read twice"
    assert {split: sum(file.size for file in text.splits[split]) for split in expected} == {
        split: len(part) for split, part in expected.items()
    }
    assert list(text.splits) == ["train", "valid", "test"]
    assert text.digest == expected_digest(name), "the digest does not depend on the arrangement of the files"
    assert text.closed_alphabet == TABLE[name].closed_alphabet
    size = sum(map(len, expected.values()))
    assert text.name == name.value
    assert re.search(rf"{CORPORA[name].title}.*\b{size:,}\b", text.description)
    assert {path: path.stat().st_mtime_ns for path in before if path != tmp_path} == {
        path: stamp for path, stamp in before.items() if path != tmp_path
    }, "the files are left alone"
    assert sorted(os.listdir(tmp_path / "cache" / "tfds")) == [f".txl_{name}.lock", f"txl_{name}"], (
        "nothing is left over"
    )


def expected_digest(name):
    parts = miniature.texts(name)
    sums = {split: hashlib.sha256(text).hexdigest() for split, text in parts.items()}
    if name in ONE_FILE:
        return hashlib.sha256(b"".join(parts.values())).hexdigest()
    if name is CorpusName.LM1B:
        files = "".join(hashlib.sha256(shard).hexdigest() for shard in miniature.shards(parts["train"]))
        sums["train"] = hashlib.sha256(files.encode()).hexdigest()
    return hashlib.sha256("".join(sums.values()).encode()).hexdigest()


@pytest.mark.parametrize("name", miniature.NAMES)
def test_a_prepared_corpus_needs_nothing_else(name, tmp_path, capsys):
    place_official(tmp_path, name)
    first = read(name, tmp_path)
    assert re.search(rf"{CORPORA[name].title}.*{tmp_path}/cache/tfds\b", capsys.readouterr().out)
    shutil.rmtree(tmp_path / "data")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*")}
    second = read(name, tmp_path)
    assert capsys.readouterr().out == ""
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
    monkeypatch.setattr(published, "_RECORDS_PER_BLOCK", 1)
    unpacked(tmp_path, CorpusName.ENWIK8)
    (file,) = read(CorpusName.ENWIK8, tmp_path).splits["train"]
    slow, quick = file.blocks(), file.blocks()
    first = next(slow)
    assert b"".join(quick) == miniature.texts(CorpusName.ENWIK8)["train"]
    assert first + b"".join(slow) == miniature.texts(CorpusName.ENWIK8)["train"]


@pytest.mark.parametrize("name", miniature.NAMES)
def test_many_files_of_records(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_builders, "RECORD_BYTES", 1000)
    monkeypatch.setattr(tfds_builders, "SHARD_RECORDS", 7)
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
    assert {builder.name for builder in tfds_builders.BUILDERS.values()} == {f"txl_{name}" for name in miniature.NAMES}
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
    size = len(texts["train"]) + len(texts["test"])
    assert re.search(rf"One Billion Word.*\b{size:,}\b.*\btest\b", same.description)
    assert "test" not in separate.description


# The table


def test_the_official_facts():
    for name in (CorpusName.ENWIK8, CorpusName.TEXT8):
        row = TABLE[name]
        assert row.closed_alphabet
        assert row.cuts == {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
        assert row.facts[WHOLE].size == sum(row.cuts.values()) == 100_000_000
        assert row.facts[WHOLE].sha256
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


def test_one_billion_words_files():
    for layout in TABLE[CorpusName.LM1B].layouts:
        assert len(layout["train"]) == 99
        assert layout["train"][0].endswith("training-monolingual.tokenized.shuffled/news.en-00001-of-00100")
        assert layout["train"][-1].endswith("/news.en-00099-of-00100")
        assert layout["test"][0].endswith("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050")
        assert layout["valid"][0].endswith("/news.en.heldout-00001-of-00050")


def test_every_checksum_is_one():
    assert (
        set(TABLE)
        == set(tfds_builders.BUILDERS)
        == {name for name in CorpusName if name not in ("text", "python_stdlib")}
    )
    for row in TABLE.values():
        remotes = [remote for source in row.sources for remote in source]
        sums = [remote.sha256 for remote in remotes] + [facts.sha256 for facts in row.facts.values()]
        assert all(len(found) == 64 and int(found, 16) for found in sums if found is not None)
        assert all(remote.url.startswith("http") for remote in remotes)
        assert list(row.ranges()) == ["train", "valid", "test"]


def test_penn_treebank_itself(data_dir, tmp_path, monkeypatch):
    if not (data_dir / "ptb" / "ptb.train.txt").is_file():
        pytest.skip(f"there is no Penn Treebank in {data_dir}")
    monkeypatch.setitem(CORPORA, CorpusName.PTB, TABLE[CorpusName.PTB])
    text = published.read(CorpusName.PTB, data_dir=str(data_dir), cache_dir=str(tmp_path))
    for split, content in contents(text).items():
        assert content == (data_dir / "ptb" / f"ptb.{split}.txt").read_bytes()
    assert re.search(r"Penn Treebank.*\b5,951,345\b", text.description)


def test_wikitexts_own_end_is_no_empty_line(data_dir, tmp_path, monkeypatch):
    path = data_dir / "wikitext-2" / "test.txt"
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    row = TABLE[CorpusName.WIKITEXT2]
    facts = dict.fromkeys(row.facts, row.facts["test"])
    monkeypatch.setitem(CORPORA, CorpusName.WIKITEXT2, dataclasses.replace(row, facts=facts))
    place(tmp_path / "data", {f"wiki.{split}.tokens": path.read_bytes() for split in facts})
    assert contents(read(CorpusName.WIKITEXT2, tmp_path))["valid"] == path.read_bytes()


# What is wrong


def refusal(name, tmp_path, error=ValueError):
    """The error that reading gives; nothing is left that a later start would take for the corpus."""
    with pytest.raises(error) as caught:
        read(name, tmp_path)
    assert not list((tmp_path / "cache").rglob("*.array_record*"))
    assert not list((tmp_path / "cache").rglob("incomplete*"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ONE_FILE)
@pytest.mark.parametrize("packed", [False, True])
def test_another_number_of_bytes(name, packed, tmp_path):
    files = dict.fromkeys(miniature.files(name), b"x" * 1234)
    if packed:
        files = {f"{name}.tgz": miniature.archive(".tgz", files)}
    place(tmp_path / "data", files)
    message = refusal(name, tmp_path)
    where = tmp_path / "data" / next(iter(files))
    assert re.search(rf"{where}\b.*\b1,234\b.*\b{TABLE[name].title}\b.*\b300,008\b", message)
    assert f"{miniature.NOWHERE}{miniature.OFFICIAL[name]}" in message
    assert re.search(r"--data\.file=PATH.*\bnot checked\b", message)


@pytest.mark.parametrize("offset", [0, 250_000, 300_007])
def test_a_wrong_byte_anywhere(offset, tmp_path):
    text = bytearray(miniature.files(CorpusName.ENWIK8)["enwik8"])
    text[offset] ^= 1
    place(tmp_path / "data", {"enwik8": bytes(text)})
    message = refusal(CorpusName.ENWIK8, tmp_path)
    found, known = hashlib.sha256(text).hexdigest(), CORPORA[CorpusName.ENWIK8].facts[WHOLE].sha256
    assert re.search(rf"\b{found}\b.*\benwik8\b.*\b{known}\b", message)


@pytest.mark.parametrize("name", miniature.PACKED)
def test_an_official_archive_with_other_content(name, tmp_path):
    file, whole = miniature.OFFICIAL[name], miniature.official(name)
    place(tmp_path / "data", {file: whole[:-1]})
    path = tmp_path / "data" / file
    found, known = len(whole) - 1, len(whole)
    official = f"{miniature.NOWHERE}{file}"
    assert re.search(rf"^{path}\b.*\b{found:,}\b.*{official}\b.*\b{known:,}\b", refusal(name, tmp_path))
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    place(tmp_path / "data", {file: changed})
    found, known = hashlib.sha256(changed).hexdigest(), hashlib.sha256(whole).hexdigest()
    assert re.search(rf"^{path}\b.*\b{found}\b.*{official}\b.*\b{known}\b", refusal(name, tmp_path))


def test_only_the_official_file_has_the_official_checksum(tmp_path):
    members = {f"mine/{file}": content for file, content in miniature.files(CorpusName.TEXT8).items()}
    place(tmp_path / "data", {"text8.tgz": miniature.archive(".tgz", members | {"notes": b"mine"})})
    assert contents(read(CorpusName.TEXT8, tmp_path)) == miniature.texts(CorpusName.TEXT8)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("name", WORDS)
def test_another_number_of_tokens(name, split, tmp_path):
    text, known = miniature.texts(name)[split], CORPORA[name].facts[split].tokens
    changes = [
        (text[:-1] + b"\nmore words here\n", 4 + (not text.endswith(b" \n")), 0),
        (text[: len(text) // 2], None, 0),
        (text + b"\n", 1, 1),
        (text + b"\n\n\n", 3, 3),
    ]
    title, url = CORPORA[name].title, CORPORA[name].url
    for changed, more, n_empty in changes:
        by_split(tmp_path, name)
        path = tmp_path / "data" / TABLE[name].folders[-1] / f"{split}.txt"
        path.write_bytes(changed)
        message = refusal(name, tmp_path)
        more = (
            len(changed.split()) + changed.count(b"\n") + (not changed.endswith(b"\n")) - known
            if more is None
            else more
        )
        empty = rf"\D*\b{n_empty}\b\D*" if n_empty else r"\D*"
        assert re.search(rf"^{path}\b.*\b{known + more:,}\b.*\b{split}\b.*{title}.*\b{known:,}\b{empty}{url}", message)


def test_a_last_line_without_its_end_counts(tmp_path):
    unpacked(tmp_path, CorpusName.PTB)
    path = tmp_path / "data" / "simple-examples" / "data" / "ptb.test.txt"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert contents(read(CorpusName.PTB, tmp_path))["test"] == path.read_bytes()


def test_the_same_words_in_other_bytes_are_noted(tmp_path, capsys):
    """Copies of the Penn Treebank differ in the white space around lines; the counts do not."""
    (tmp_path / "data").mkdir()
    for split, text in miniature.texts(CorpusName.PTB).items():
        stripped = b"\n".join(line.strip() for line in text.splitlines()) + b"\n"
        (tmp_path / "data" / f"ptb.{split}.txt").write_bytes(text if split == "train" else stripped)
    read(CorpusName.PTB, tmp_path)
    notes = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\b(train|valid|test)\b", line)]
    assert len(notes) == 2 and all("Penn Treebank" in note for note in notes)
    assert re.search(r"\bvalid\b", notes[0]) and re.search(r"\btest\b", notes[1])


def test_the_source_that_is_alive_is_recommended(tmp_path):
    for name in (CorpusName.WIKITEXT103, CorpusName.WIKITEXT2):
        assert {remote.url for remote in TABLE[name].archives.values() if remote} == {TABLE[name].url}
        assert TABLE[name].url.startswith("https://wikitext.smerity.com/")


def test_words_are_those_of_unicode(tmp_path, monkeypatch):
    """Words as of `str.split`, which makes the word tokens: white space of several bytes that falls on a border too."""
    monkeypatch.setattr(tfds_builders, "RECORD_BYTES", 7)
    text = "zwei\u3000Wörter\u00a0und ein\u2009 drittes\n".encode() * 30
    facts = {split: Facts(tokens=6 * 30) for split in ("train", "valid", "test")}
    monkeypatch.setitem(CORPORA, CorpusName.PTB, dataclasses.replace(CORPORA[CorpusName.PTB], facts=facts))
    place(tmp_path / "data", {f"ptb.{split}.txt": text for split in facts})
    assert contents(read(CorpusName.PTB, tmp_path))["train"] == text


@pytest.mark.parametrize(
    ("split", "where"), [("train", "news.en-00001-of-00100 and 2 more"), ("test", "news.en.heldout-00000")]
)
def test_another_number_of_sentences(split, where, tmp_path):
    unpacked(tmp_path, CorpusName.LM1B)
    path = next(path for path in (tmp_path / "data").rglob("*") if path.name.startswith(where.split(" ")[0]))
    path.write_bytes(path.read_bytes() + b"One more .\n")
    known = CORPORA[CorpusName.LM1B].facts[split].lines
    message = refusal(CorpusName.LM1B, tmp_path)
    assert where in message
    assert re.search(rf"\b{known + 1:,}\b.*\b{split}\b.*One Billion Word.*\b{known:,}\b", message)


@pytest.mark.parametrize("name", miniature.NAMES)
def test_an_archive_without_a_file(name, tmp_path):
    needed = [
        file
        for file in miniature.files(name)
        if "README" not in file and "char" not in file and "00002-of-00050" not in file
    ]
    for gone in needed:
        members = {file: content for file, content in miniature.files(name).items() if file != gone}
        place(tmp_path / "data", {f"{name}.tar.gz": miniature.archive(".tar.gz", members)})
        message = refusal(name, tmp_path)
        tail = gone.removeprefix("./").split("/")[-1]
        path, listing = str(tmp_path / "data" / f"{name}.tar.gz"), ", ".join(list(members)[:5])
        assert message.startswith(path) and listing in message
        for part in (path, listing, CORPORA[name].url):
            message = message.replace(part, "")
        assert tail in message


@pytest.mark.parametrize("name", [name for name in miniature.NAMES if name not in ONE_FILE])
def test_a_folder_without_a_file(name, tmp_path):
    unpacked(tmp_path, name)
    gone = next(path for path in sorted((tmp_path / "data").rglob("*")) if "valid" in path.name or "train" in str(path))
    gone = gone if gone.is_file() else next(path for path in gone.rglob("*") if path.is_file())
    if gone.name.startswith("ptb.char"):
        gone = gone.with_name("ptb.train.txt")
    gone.unlink()
    message = refusal(name, tmp_path)
    lacking = gone.relative_to(tmp_path / "data")
    assert re.search(rf"{tmp_path}/data\b.* {lacking}\b.*{CORPORA[name].title}", message)
    assert CORPORA[name].url in message


def test_what_is_whole_wins_over_what_is_not(tmp_path):
    by_split(tmp_path, CorpusName.PTB)
    (tmp_path / "data" / TABLE[CorpusName.PTB].folders[-1] / "valid.txt").unlink()
    official_in_the_manual_folder(tmp_path, CorpusName.PTB)
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)


def test_common_names_count_only_in_the_corpuss_own_folder(tmp_path):
    place(tmp_path / "data", {f"{split}.txt": text for split, text in miniature.texts(CorpusName.PTB).items()})
    refusal(CorpusName.PTB, tmp_path, UserError)
    os.rename(tmp_path / "data", tmp_path / "ptb")
    text = published.read(CorpusName.PTB, data_dir=str(tmp_path / "ptb"), cache_dir=str(tmp_path / "cache"))
    assert contents(text) == miniature.texts(CorpusName.PTB)


@pytest.mark.parametrize("name", miniature.NAMES)
def test_an_empty_file(name, tmp_path):
    unpacked(tmp_path, name)
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    message = refusal(name, tmp_path)
    assert re.search(rf"{tmp_path}/data/.*{CORPORA[name].url}", message)
    if name in ONE_FILE:
        assert re.search(r"\b0\b.*\b300,008\b", message)
    else:
        counts = [f"{n:,}" for fact in CORPORA[name].facts.values() for n in (fact.tokens, fact.lines) if n]
        assert not any(count in message for count in counts), "nothing was counted"


@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
@pytest.mark.parametrize("name", [CorpusName.ENWIK8, CorpusName.LM1B])
def test_a_cut_archive(name, suffix, tmp_path):
    file = f"lm1b.{suffix}" if name is CorpusName.LM1B else f"enwik8.{suffix}"
    whole = miniature.archive(file, miniature.files(name))
    row = CORPORA[name]
    if file == row.sources[0][0].file:  # Of the official name: another size is an error already.
        CORPORA[name] = dataclasses.replace(
            row, sources=((dataclasses.replace(row.sources[0][0], size=None, sha256=None),),)
        )
    for length in (0, 100, len(whole) // 2, len(whole) - 5):
        place(tmp_path / "data", {file: whole[:length]})
        message = refusal(name, tmp_path)
        assert re.search(rf"{tmp_path / 'data' / file}\b.*{row.url}", message)


def test_an_archive_that_leads_out_is_refused(tmp_path):
    members = miniature.files(CorpusName.PTB) | {"../../.bashrc": b"echo"}
    place(tmp_path / "data", {"ptb.zip": miniature.archive(".zip", members)})
    assert re.search(r"ptb\.zip\b.*'\.\./\.\./\.bashrc'", refusal(CorpusName.PTB, tmp_path))


# Nothing there


@pytest.mark.parametrize("name", miniature.NAMES)
def test_without_files_and_network_the_error_is_immediate(name, tmp_path, monkeypatch):
    monkeypatch.setitem(CORPORA, name, TABLE[name])
    asked = []
    monkeypatch.setattr(requests, "head", lambda url, **options: (asked.append(url), refuse(url)))
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        read(name, tmp_path)
    assert time.monotonic() - start < 1
    assert sorted(asked) == sorted(source[0].url for source in TABLE[name].sources), "each source is asked once"
    message = str(caught.value)
    assert "\n" not in message
    data = tmp_path / "data"
    assert re.search(rf"{TABLE[name].title}.*{data}\b.*{data / TABLE[name].folders[0]}\b", message)
    assert re.search(rf"{data}\b.*--data_dir\b", message)
    for source in TABLE[name].sources:
        assert source[0].url in message
        assert all(remote.file in message and remote.url.rpartition("/")[0] in message for remote in source)
        if None not in (sizes := [remote.size for remote in source]):
            assert f"{sum(sizes):,}" in message
    assert ("--data.file=PATH" in message) == (name in ONE_FILE)
    assert ("packed" in message) == (name in miniature.PACKED)
    assert not (tmp_path / "cache").exists(), "nothing is left"


# Several processes, and processes that die


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


# Folders that cannot be written to, and damaged ones


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
