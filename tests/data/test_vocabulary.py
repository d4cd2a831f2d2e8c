"""Tests bytes to token ids and back: round trips, foreign bytes and ids, saving as text."""

import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txl_jax.data import vocabulary
from txl_jax.data.vocabulary import ByteVocabulary


@given(st.binary(min_size=1))
def test_text_survives_encoding_with_its_own_vocabulary(text):
    own = ByteVocabulary.of(text)
    ids = own.encode(text)
    assert ids.dtype == np.uint8 and ids.shape == (len(text),)
    assert set(ids.tolist()) == set(range(own.size)), "every symbol occurs, so every id does"
    assert own.decode(ids) == text


@given(st.binary())
def test_with_all_bytes_an_id_is_the_byte(text):
    every = ByteVocabulary.all_bytes()
    assert every.size == 256
    assert every.encode(text).tolist() == list(text)
    assert every.decode(every.encode(text)) == text


def test_ids_are_ranks():
    own = ByteVocabulary.of(b"zebra")
    assert own.symbols == b"aberz"
    assert own.encode(b"zebra").tolist() == [4, 2, 1, 3, 0]


def test_a_foreign_byte_is_named_with_its_first_offset():
    with pytest.raises(ValueError, match=r"^byte 120 at offset 2 is not among the 2 symbols"):
        ByteVocabulary.of(b"ab").encode(b"abxayx")


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_decoding_takes_any_integers(dtype):
    assert ByteVocabulary.of(b"abc").decode(np.array([[2, 0], [1, 1]], dtype)) == b"cabb"
    assert ByteVocabulary.of(b"abc").decode([]) == b""


@pytest.mark.parametrize("foreign", [-1, 3])
def test_a_foreign_id_is_named(foreign):
    with pytest.raises(ValueError, match=f"^token id {foreign} is outside .* 0 to 2"):
        ByteVocabulary.of(b"abc").decode([0, foreign])


@given(st.binary(min_size=1))
def test_json_gives_the_same_vocabulary(text):
    own = ByteVocabulary.of(text)
    assert ByteVocabulary.from_json(own.to_json()) == own


def test_json_is_a_plain_list():
    assert ByteVocabulary.of(b"ba\n").to_json() == "[10, 97, 98]"


@pytest.mark.parametrize("text", ["", "{", "null", "7", "[]", "[3, 2]", "[2, 2]", "[256]", "[-1]", '["a"]', "[1.5]"])
def test_damaged_json_is_one_clear_error(text):
    with pytest.raises(ValueError, match="a saved vocabulary is an increasing JSON list of byte values"):
        ByteVocabulary.from_json(text)


@pytest.mark.parametrize("symbols", [b"", b"ba", b"aa"])
def test_symbols_must_increase(symbols):
    with pytest.raises(ValueError, match="distinct, increasing and not empty"):
        ByteVocabulary(symbols)


def test_docstring_examples():
    assert doctest.testmod(vocabulary) == (0, 2)
