"""Tests files of published corpora that are wrong, incomplete or not there: one sentence each, and nothing is left."""

import dataclasses
import hashlib
import os
import re
import time

import pytest
import requests

from support import miniature
from support.published_corpora import (
    ONE_FILE,
    TABLE,
    WORDS,
    by_split,
    contents,
    official_in_the_manual_folder,
    place,
    read,
    refusal,
    refuse,
    unpacked,
)
from txl_jax.config import CorpusName
from txl_jax.data.sources import published, tfds_builders
from txl_jax.data.sources.corpora import CORPORA
from txl_jax.data.sources.corpus_row import WHOLE, Facts
from txl_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("miniatures")


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
