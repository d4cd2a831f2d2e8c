"""Tests what all kinds of tokens share: ids that are foreign, names, starts, and the saved form."""

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.encoded_text import words_of
from txl_jax.config import LineMark, Newlines
from txl_jax.data import vocabulary as vocabulary_lib
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import KINDS
from txl_jax.data.ready_ids import IdVocabulary
from txl_jax.data.vocabulary import MARKS, digest, dumps, loads
from txl_jax.data.word_tokens import CharacterVocabulary, WordVocabulary
from txl_jax.errors import UserError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
# What the saved form must not take for the end of a line, or for one of its own escapes.
AWKWARD = st.text(st.sampled_from("\n\r\\nr\x0b\x0c\x1c\x85\N{LINE SEPARATOR}😀") | CHARACTERS)


THREE = (
    ByteVocabulary.of(b"abc"),
    CharacterVocabulary(f"a{UNKNOWN}é"),
    WordVocabulary(("a", "<unk>", "<eos>")),
)


@pytest.mark.parametrize(("vocabulary", "expected"), [*zip(THREE, ["caac", "éaaé", "\na a \n"], strict=True)])
def test_decoding_takes_any_integers_and_names_a_foreign_one(vocabulary, expected):
    for dtype in (np.uint8, np.int32, np.int64):
        assert vocabulary.decode(np.array([[2, 0], [0, 2]], dtype)).decode() == expected
    assert vocabulary.decode([]) == b""
    for foreign in (-1, 3):
        with pytest.raises(UserError, match=rf"\b0\b.*\b2\b.*{foreign}$"):
            vocabulary.decode([0, foreign])


def test_symbols_and_characters_must_be_distinct():
    for symbols in (b"", b"ba", b"aa"):
        with pytest.raises(UserError, match=re.escape(str([*symbols]))):
            ByteVocabulary(symbols)
    for characters in ("", "abc", f"a{UNKNOWN}a"):
        with pytest.raises(UserError, match=rf"\b{len(characters)}\b.*\bchar\b.*'{UNKNOWN}'.*\b{len({*characters})}\b"):
            CharacterVocabulary(characters)


def test_what_an_unprompted_text_follows():
    assert all(ByteVocabulary(symbols).start.tolist() == [0] for symbols in (b"\n a", b" a", b"!a"))
    assert ByteVocabulary.all_bytes(Newlines.DROP).start.tolist() == [ord(" ")], "never the newline that is dropped"
    assert ByteVocabulary(b"\nab", Newlines.DROP).start.tolist() == [1]
    assert CharacterVocabulary(f"a {UNKNOWN}\n").start.tolist() == [3]
    assert CharacterVocabulary(f"a {UNKNOWN}").start.tolist() == [1]
    assert CharacterVocabulary(f"a{UNKNOWN}").start.tolist() == [0]
    starts = [words_of(line_mark).start.tolist() for line_mark in LineMark]
    assert starts == [[1], [4], [4], [0]] and [words_of(line_mark).mark for line_mark in LineMark] == [1, 4, 4, None]


def test_the_id_of_unknown_tokens():
    assert ByteVocabulary.of(b"abc").unknown_id is None
    for vocabulary in (CharacterVocabulary("a\N{REPLACEMENT CHARACTER}"), words_of(LineMark.EOS)):
        assert vocabulary.encode("ž".encode()).tolist() == [vocabulary.unknown_id]
        with pytest.raises(UserError, match=r"\b0xff\b.*\b3\b"):
            vocabulary.encode("é\n".encode() + b"\xff")
    assert WordVocabulary(("a", "<UNK>", "<eos>"), unknown="<UNK>").unknown_id == 1


# Text that comes back, and its bytes


@given(content=st.binary(min_size=1), text=st.text(min_size=1))
def test_bytes_and_characters_come_back_and_their_bytes_are_counted(content, text):
    characters = CharacterVocabulary("".join(dict.fromkeys(text + UNKNOWN)))
    own = text.encode().replace(UNKNOWN.encode(), b"")
    for vocabulary, whole in ((ByteVocabulary.of(content), content), (characters, own)):
        ids = vocabulary.encode(whole)
        assert vocabulary.decode(ids) == whole and vocabulary.count_bytes(ids) == len(whole)


@pytest.mark.parametrize("line_mark", LineMark)
@given(lines=st.lists(st.lists(st.sampled_from(["a", "wörd", "é"]), min_size=1), min_size=1))
def test_the_bytes_of_words_are_those_of_the_text_with_single_spaces(line_mark, lines):
    marks = [MARKS[line_mark]] if line_mark in MARKS else []
    vocabulary = WordVocabulary((*marks, "<unk>", "a", "wörd", "é"), line_mark)
    text = "".join(f"{' '.join(line)}\n" for line in lines).encode()
    for spaced in (text, text.replace(b" ", b"  ").replace(b"\n", b" \n")):
        assert vocabulary.count_bytes(vocabulary.encode(spaced)) == len(text)


@pytest.mark.parametrize("vocabulary", [CharacterVocabulary(f"a{UNKNOWN}"), WordVocabulary(("<eos>", "a", "<unk>"))])
def test_bytes_are_not_known_above_a_thousandth_of_unknown_tokens(vocabulary):
    token = vocabulary.encode(b"a").item()
    ids = np.full(2000, token, np.uint8)
    ids[:2] = vocabulary.unknown_id
    assert vocabulary.count_bytes(ids) == vocabulary.byte_lengths[ids].sum() > 0
    ids[2] = vocabulary.unknown_id
    assert vocabulary.count_bytes(ids) == 0 == IdVocabulary(300).count_bytes(ids)


def test_bytes_are_counted_in_blocks(monkeypatch):
    monkeypatch.setattr(vocabulary_lib, "_IDS_PER_BLOCK", 7)
    assert CharacterVocabulary(f"éa{UNKNOWN}").count_bytes(np.arange(100) % 2) == 150


# The saved form


def saved(vocabulary):
    return loads(dumps(vocabulary), KINDS)


@given(words=st.lists(AWKWARD), line_mark=st.sampled_from(LineMark), lower_case=st.booleans())
@settings(max_examples=200)
def test_saved_words_and_characters_are_the_same(words, line_mark, lower_case):
    distinct = tuple(dict.fromkeys([*words, "<UNK>", "<eos>", "<S>"]))
    characters = CharacterVocabulary("".join(dict.fromkeys("".join([*words, UNKNOWN]))), lower_case)
    symbols = ByteVocabulary(bytes(range(32, 127)), Newlines.DROP if lower_case else Newlines.KEEP)
    for own in (WordVocabulary(distinct, line_mark, lower_case, "<UNK>"), characters, symbols):
        assert saved(own) == own and digest(own) == hashlib.sha256(dumps(own).encode()).hexdigest()
        assert dumps(own).count("\n") == 1 + own.size, "a line per token"
        assert saved(own).encode(b"<eos> x").tolist() == own.encode(b"<eos> x").tolist()


BYTE = 'txl_jax vocabulary byte {"newlines": "keep"}\n'
WORD = 'txl_jax vocabulary word {"line_mark": "eos", "lower_case": false, "unknown": "<unk>"}\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[10, 97]",  # As it was saved before there were other tokens than bytes.
        'byte {"newlines": "keep"}\n97\n',
        BYTE,
        BYTE.replace("byte", "bit") + "97\n",
        BYTE.replace("{", "") + "97\n",
        BYTE.replace('"keep"', '"lose"') + "97\n",
        BYTE.replace('{"newlines": "keep"}', "7") + "97\n",
        *(BYTE + symbols for symbols in ("97\n97\n", "97\n\n98\n", "256\n", "a\n")),
        WORD.replace("unknown", "known") + "<eos>\n<unk>\n",
        "txl_jax vocabulary sentencepiece {}\n",
    ],
)
def test_a_damaged_form_is_one_clear_error(text):
    start = re.escape(repr(text.partition("\n")[0][:60]))
    with pytest.raises(UserError, match=start):
        loads(text, KINDS)
