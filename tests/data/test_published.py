"""Tests the table of corpora: each name has a row, and the row is all that the rest of the project knows of it."""

import dataclasses
import itertools
import re

import pytest

from txl_jax.config import CorpusName, DataConfig, Tokenizer
from txl_jax.data.published import ARCHIVE_SUFFIXES, CORPORA, WHOLE, Facts, check_file
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
