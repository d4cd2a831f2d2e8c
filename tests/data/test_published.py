"""Tests the table of corpora: each name has a row, and the row is all that the rest of the project knows of it."""

import dataclasses
import itertools
import re

import pytest

from support import ROOT
from txl_jax.config import CorpusName, DataConfig, Tokenizer
from txl_jax.data.published import ARCHIVE_SUFFIXES, CORPORA, WHOLE, Facts, check_file, program_of
from txl_jax.errors import UserError


def test_each_name_has_a_row_but_those_of_local_files():
    assert set(CorpusName) - set(CORPORA) == {CorpusName.TEXT, CorpusName.PYTHON_STDLIB}


@pytest.mark.parametrize("name", CORPORA)
def test_a_row_is_complete(name):
    row = CORPORA[name]
    row.defaults.validate()
    assert row.defaults.corpus is name and row.vocab_size > 1
    assert set(row.facts) == ({WHOLE} if row.cuts else {"train", "valid", "test"})
    assert all(set(layout) == set(row.facts) for layout in row.layouts + row.own_layouts)
    assert row.contents and not row.contents.endswith(".")
    assert sum(row.cuts.values()) in (0, row.facts.get(WHOLE, Facts(size=0)).size)
    layouts = [{file for files in layout.values() for file in files} for layout in row.layouts + row.own_layouts]
    for source in row.sources:
        plain = {remote.file for remote in source if not remote.is_archive}
        unknown = plain.difference(*layouts)
        assert not unknown, f"{unknown} are in no layout, and end in none of the archives' {ARCHIVE_SUFFIXES}"
        assert not plain or {remote.file for remote in source} in layouts, "files are found by a layout"
    for known in (*row.facts.values(), *itertools.chain(*row.sources)):
        assert known.sha256 is None or re.fullmatch("[0-9a-f]{64}", known.sha256), known
    if row.defaults.tokenizer.kind is Tokenizer.BYTE and not row.closed_alphabet:
        assert row.vocab_size == 256


def test_a_part_is_read_of_one_file_alone():
    for name in CorpusName:
        data = DataConfig(corpus=name, file="a")
        if name is CorpusName.TEXT or (name in CORPORA and CORPORA[name].cuts):
            check_file(data)
        else:
            with pytest.raises(UserError, match=rf"^data\.file is 'a'.*\b{name}\b"):
                check_file(data)
            check_file(dataclasses.replace(data, file=None))


def test_the_official_facts():
    for name in (CorpusName.ENWIK8, CorpusName.TEXT8):
        assert CORPORA[name].closed_alphabet and CORPORA[name].facts[WHOLE].sha256
        assert CORPORA[name].cuts == {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
    counts = {CorpusName.PTB: [929_589, 73_760, 82_430], CorpusName.WIKITEXT103: [103_227_021, 217_646, 245_569]}
    for name, tokens in counts.items():
        assert [facts.tokens for facts in CORPORA[name].facts.values()] == tokens
    for layout in CORPORA[CorpusName.LM1B].layouts:
        names = [name.rpartition("monolingual.tokenized.shuffled/news.en")[2] for name in layout["train"]]
        assert names == [f"-{i:05}-of-00100" for i in range(1, 100)]
        assert layout["test"][0].endswith("heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050")
        assert layout["valid"][0].endswith("/news.en.heldout-00001-of-00050")


def test_the_program_of_a_corpus_is_there():
    for name in CorpusName:
        assert (ROOT / "experiments" / f"{program_of(name)}.py").is_file()
