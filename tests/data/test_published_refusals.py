"""Tests files of published corpora that are wrong, incomplete or not there: one sentence each, and nothing is left."""

import hashlib
import os
import re

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
from txl_jax.data import prepare
from txl_jax.data.published import CORPORA, WHOLE
from txl_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("miniatures")


@pytest.mark.parametrize("name", ONE_FILE)
@pytest.mark.parametrize("packed", [False, True])
def test_another_number_of_bytes(name, packed, tmp_path):
    files = dict.fromkeys(miniature.files(name), b"x" * 1234)
    if packed:
        files = {f"{name}.tgz": miniature.archive(".tgz", files)}
    place(tmp_path / "data", files)
    where = tmp_path / "data" / next(iter(files))
    assert re.search(rf"{where}\b.*\b1,234\b.*\b300,008\b", refusal(name, tmp_path))


@pytest.mark.parametrize("offset", [0, 250_000, 300_007])
def test_a_wrong_byte_anywhere(offset, tmp_path):
    text = bytearray(miniature.files(CorpusName.ENWIK8)["enwik8"])
    text[offset] ^= 1
    place(tmp_path / "data", {"enwik8": bytes(text)})
    message = refusal(CorpusName.ENWIK8, tmp_path)
    found, known = hashlib.sha256(text).hexdigest(), CORPORA[CorpusName.ENWIK8].facts[WHOLE].sha256
    assert re.search(rf"\b{found}\b.*\benwik8\b.*\b{known}\b", message)


def test_an_official_archive_with_other_content(tmp_path):
    for name in miniature.PACKED:
        path, whole = tmp_path / "data" / miniature.OFFICIAL[name], miniature.official(name)
        place(tmp_path / "data", {path.name: whole[:-1]})
        assert re.search(rf"^{path}\b.*\b{len(whole) - 1:,}\b.*\b{len(whole):,}\b", refusal(name, tmp_path))
        changed = whole[:-1] + bytes([whole[-1] ^ 1])
        place(tmp_path / "data", {path.name: changed})
        found, known = hashlib.sha256(changed).hexdigest(), hashlib.sha256(whole).hexdigest()
        assert re.search(rf"^{path}\b.*\b{found}\b.*\b{known}\b", refusal(name, tmp_path))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("name", WORDS)
def test_another_number_of_tokens(name, split, tmp_path):
    text, known = miniature.texts(name)[split], CORPORA[name].facts[split].tokens
    changes = {
        text[:-1] + b"\nmore words here\n": known + 4 + (not text.endswith(b" \n")),
        text + b"\n": known + 1,
        text + b"\n\n\n": known + 3,
    }
    for changed, count in changes.items():
        by_split(tmp_path, name)
        path = tmp_path / "data" / TABLE[name].folders[-1] / f"{split}.txt"
        path.write_bytes(changed)
        assert re.search(rf"^{path}\b.*\b{count:,}\b.*\b{known:,}\b", refusal(name, tmp_path))


def test_the_same_words_in_other_bytes_are_noted(tmp_path, capsys):
    """Copies of the Penn Treebank differ in the white space around lines; the counts do not."""
    stripped = b"\n".join(line.strip() for line in miniature.texts(CorpusName.PTB)["valid"].splitlines()) + b"\n"
    parts = miniature.texts(CorpusName.PTB) | {"valid": stripped}
    place(tmp_path / "data", {f"ptb.{split}.txt": text for split, text in parts.items()})
    assert contents(read(CorpusName.PTB, tmp_path)) == parts
    (note,) = [line for line in capsys.readouterr().out.splitlines() if re.search(r"\b(train|valid|test)\b", line)]
    assert "Penn Treebank" in note and "valid" in note


@pytest.mark.parametrize(("split", "where"), [("train", "news.en-00001-of-00100"), ("test", "news.en.heldout-00000")])
def test_another_number_of_sentences(split, where, tmp_path):
    unpacked(tmp_path, CorpusName.LM1B)
    path = next(path for path in (tmp_path / "data").rglob("*") if path.name.startswith(where))
    path.write_bytes(path.read_bytes() + b"One more .\n")
    known = CORPORA[CorpusName.LM1B].facts[split].lines
    assert re.search(rf"{where}.*\b{known + 1:,}\b.*\b{known:,}\b", refusal(CorpusName.LM1B, tmp_path))


def test_a_folder_without_a_file(tmp_path):
    for name, gone in ((CorpusName.PTB, "ptb.valid.txt"), (CorpusName.LM1B, "news.en-00002-of-00100")):
        unpacked(tmp_path, name)
        (path,) = (tmp_path / "data").rglob(gone)
        path.unlink()
        lacking = path.relative_to(tmp_path / "data")
        assert re.search(rf"{tmp_path}/data\b.* {lacking}\b.*{CORPORA[name].title}", refusal(name, tmp_path))


def test_what_is_whole_wins_over_what_is_not(tmp_path):
    by_split(tmp_path, CorpusName.PTB)
    (tmp_path / "data" / TABLE[CorpusName.PTB].folders[-1] / "valid.txt").unlink()
    official_in_the_manual_folder(tmp_path, CorpusName.PTB)
    assert contents(read(CorpusName.PTB, tmp_path)) == miniature.texts(CorpusName.PTB)


def test_common_names_count_only_in_the_corpuss_own_folder(tmp_path):
    place(tmp_path / "data", {f"{split}.txt": text for split, text in miniature.texts(CorpusName.PTB).items()})
    refusal(CorpusName.PTB, tmp_path, UserError)
    os.rename(tmp_path / "data", tmp_path / "ptb")
    text = prepare.read(CorpusName.PTB, data_dir=str(tmp_path / "ptb"), cache_dir=str(tmp_path / "cache"))
    assert contents(text) == miniature.texts(CorpusName.PTB)


@pytest.mark.parametrize("name", miniature.NAMES)
def test_without_files_and_network_every_source_is_asked_once_and_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(CORPORA, name, TABLE[name])
    asked = []
    monkeypatch.setattr(requests, "head", lambda url, **options: (asked.append(url), refuse(url)))
    message = refusal(name, tmp_path, UserError)
    assert sorted(asked) == sorted(source[0].url for source in TABLE[name].sources)
    assert all(source[0].url in message for source in TABLE[name].sources)
    assert all(remote.file in message for source in TABLE[name].sources for remote in source)
    assert re.search(rf"{tmp_path / 'data' / TABLE[name].folders[0]}\b.*--data_dir\b", message)
    assert ("--data.file=PATH" in message) == (name in ONE_FILE)
    assert not (tmp_path / "cache").exists(), "nothing is left"
