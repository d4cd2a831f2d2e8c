"""Tests that each encoding has its object, and that no other file asks which encoding a model has."""

import re

import pytest

from support import ROOT
from txl_jax.config import Encoding, ModelConfig
from txl_jax.modules.positions import ENCODINGS, encoding_of

PACKAGE = ROOT / "txl_jax"
MAY_NAME_ENCODINGS = {"config", "modules/positions", "paper"}  # The paper's tables have rows of encodings.


def test_each_encoding_has_an_object_of_its_own():
    assert set(ENCODINGS) == set(Encoding)
    assert len(set(ENCODINGS.values())) == len(Encoding)
    for encoding in Encoding:
        assert type(encoding_of(ModelConfig(encoding=encoding))) is ENCODINGS[encoding]


@pytest.mark.parametrize("encoding", Encoding)
def test_text_is_generated_by_token_where_scores_depend_on_distances(encoding):
    assert ENCODINGS[encoding].generates_by_token == encoding.is_relative
    assert ENCODINGS[encoding].products_per_key == (3 if encoding.is_relative else 2)


def test_no_other_file_names_an_encoding():
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not any(name.startswith(f"{folder}/") for folder in MAY_NAME_ENCODINGS):
            assert not re.search(r"\bEncoding\.[A-Z]|\bis_relative\b|\bis_learned\b", path.read_text()), name
