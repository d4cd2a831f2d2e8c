"""Tests text to token ids and back: bytes, characters and words against plain Python, and the saved form."""

import hashlib
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.encoded_text import in_blocks, joined, words_of
from txl_jax.config import LineMark, Newlines
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import KINDS
from txl_jax.data.ready_ids import IdVocabulary
from txl_jax.data.vocabulary import digest, dumps, loads
from txl_jax.data.word_tokens import CharacterVocabulary, WordVocabulary
from txl_jax.errors import UserError
from txl_jax.metrics import Measure

SIZES = st.integers(1, 9)
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
# What the saved form must not take for the end of a line, or for one of its own escapes.
AWKWARD = st.text(st.sampled_from("\n\r\\nr\x0b\x0c\x1c\x85\N{LINE SEPARATOR}😀") | CHARACTERS)


# Bytes


@given(st.binary(min_size=1))
def test_text_survives_encoding_with_its_own_vocabulary(text):
    own = ByteVocabulary.of(text)
    ids = own.encode(text)
    assert ids.dtype == np.uint8 and ids.shape == (len(text),)
    assert own.symbols == bytes(sorted(set(text))), "ids are ranks"
    assert own.symbols[ids.max()] == max(text) and own.decode(ids) == text


@given(texts=st.lists(st.binary(), max_size=3), size=SIZES)
def test_bytes_of_several_files_follow_each_other(texts, size):
    every = ByteVocabulary.all_bytes()
    assert bytes(joined(every.blocks(in_blocks(text, size) for text in texts))) == b"".join(texts)


@given(text=st.binary(), size=SIZES)
def test_newlines_may_be_dropped(text, size):
    text += b"a\n\na"
    for kept in (ByteVocabulary.all_bytes(Newlines.DROP), ByteVocabulary(bytes(sorted({*text} - {10})), Newlines.DROP)):
        assert kept.decode(joined(kept.blocks([in_blocks(text, size)]))) == text.replace(b"\n", b"")
        assert kept.decode(kept.encode(text)) == text.replace(b"\n", b"")


def test_a_foreign_byte_is_named_with_its_first_offset():
    with pytest.raises(UserError, match=r"\b120\b.*\b2\b.*\b2\b"):
        ByteVocabulary.of(b"ab").encode(b"abxayx")
    with pytest.raises(UserError, match=r"\b120\b.*\b3\b.*\b2\b"):
        ByteVocabulary(b"ab", Newlines.DROP).encode(b"\n\naxab")


@given(start=st.binary().map(lambda start: start.replace(b"x", b"")), size=SIZES, offset=st.integers(0, 99))
def test_a_foreign_byte_of_a_file_is_named_with_its_place(start, size, offset):
    others = ByteVocabulary(bytes(set(range(256)) - {ord("x")}))
    files = [in_blocks(b"ab", size, name="other.txt"), in_blocks(start + b"xax", size, offset=offset)]
    with pytest.raises(UserError, match=rf"^some\.txt\b.*\b120\b.*\b{offset + len(start)}\b.*\b255\b"):
        joined(others.blocks(files))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_decoding_takes_any_integers(dtype):
    assert ByteVocabulary.of(b"abc").decode(np.array([[2, 0], [1, 1]], dtype)) == b"cabb"
    assert (
        CharacterVocabulary("a\N{REPLACEMENT CHARACTER}é").decode(np.array([[2, 0], [2, 2]], dtype)).decode() == "éaéé"
    )
    assert words_of(LineMark.EOS).decode(np.array([[2, 0], [1, 5]], dtype)) == b"cat the \nsat "
    for vocabulary in (ByteVocabulary.of(b"abc"), words_of(LineMark.EOS)):
        assert vocabulary.decode([]) == b""


@pytest.mark.parametrize("foreign", [-1, 3])
def test_a_foreign_id_is_named(foreign):
    for three in (
        ByteVocabulary.of(b"abc"),
        CharacterVocabulary("a\N{REPLACEMENT CHARACTER}é"),
        WordVocabulary(("a", "<unk>", "<eos>")),
    ):
        with pytest.raises(UserError, match=rf"{foreign}\b.*\b0\b.*\b2\b"):
            three.decode([0, foreign])


def test_symbols_and_characters_must_be_distinct():
    unknown = "\N{REPLACEMENT CHARACTER}"
    for symbols in (b"", b"ba", b"aa"):
        with pytest.raises(UserError, match=re.escape(str([*symbols]))):
            ByteVocabulary(symbols)
    for characters in ("", "abc", f"a{unknown}a"):
        with pytest.raises(UserError, match=rf"\b{len(characters)}\b.*\bchar\b.*'{unknown}'.*\b{len({*characters})}\b"):
            CharacterVocabulary(characters)


# Characters


@given(characters=st.text(CHARACTERS), others=st.text(CHARACTERS), size=SIZES)
def test_characters_are_known_or_replaced(characters, others, size):
    known = "".join(dict.fromkeys(characters + "\N{REPLACEMENT CHARACTER}"))
    vocabulary, text = CharacterVocabulary(known), others + characters
    ids = joined(vocabulary.blocks([in_blocks(text.encode(), size)]))
    seen = "".join(c if c in known else "\N{REPLACEMENT CHARACTER}" for c in text)
    assert ids == [known.index(c) for c in seen] == vocabulary.encode(text.encode()).tolist()
    assert vocabulary.decode(ids).decode() == seen


def test_lower_case_characters():
    vocabulary = CharacterVocabulary("aé\N{REPLACEMENT CHARACTER}i\N{COMBINING DOT ABOVE}", lower_case=True)
    assert vocabulary.encode("AaÉB".encode()).tolist() == [0, 0, 1, 2]
    assert vocabulary.encode("İ".encode()).tolist() == [3, 4], "one capital of two lower-case characters"
    assert joined(vocabulary.blocks([in_blocks("É A".encode(), 1)])) == [1, 2, 0]


# All


def test_what_an_unprompted_text_follows():
    unknown = "\N{REPLACEMENT CHARACTER}"
    assert ByteVocabulary(b"\n a").start.tolist() == [0]
    assert ByteVocabulary(b" a").start.tolist() == [0]
    assert ByteVocabulary(b"!a").start.tolist() == [0]
    assert ByteVocabulary.all_bytes(Newlines.DROP).start.tolist() == [ord(" ")], "never the newline that is dropped"
    assert ByteVocabulary(b"\nab", Newlines.DROP).start.tolist() == [1]
    assert CharacterVocabulary(f"a {unknown}\n").start.tolist() == [3]
    assert CharacterVocabulary(f"a {unknown}").start.tolist() == [1]
    assert CharacterVocabulary(f"a{unknown}").start.tolist() == [0]
    starts = [words_of(line_mark).start.tolist() for line_mark in LineMark]
    assert starts == [[1], [4], [4], [0]] and [words_of(line_mark).mark for line_mark in LineMark] == [1, 4, 4, None]


def test_a_byte_and_a_character_are_called_what_they_are():
    for vocabulary in (ByteVocabulary(b"\n\x80\xc3"), CharacterVocabulary("a\n\N{REPLACEMENT CHARACTER}é")):
        assert vocabulary.names() == [vocabulary.decode([token]) for token in range(vocabulary.size)]


def test_the_id_of_unknown_tokens():
    assert ByteVocabulary.of(b"abc").unknown_id is None
    for vocabulary in (CharacterVocabulary("a\N{REPLACEMENT CHARACTER}"), words_of(LineMark.EOS)):
        assert vocabulary.encode("ž".encode()).tolist() == [vocabulary.unknown_id]
        with pytest.raises(UserError, match=r"\b0xff\b.*\b3\b"):
            vocabulary.encode("é\n".encode() + b"\xff")
    assert WordVocabulary(("a", "<UNK>", "<eos>"), unknown="<UNK>").unknown_id == 1


def test_only_words_are_measured_by_perplexity():
    assert [kind.measure for kind in KINDS] == [Measure.BPC] * 2 + [Measure.PPL] * 3


def test_ids_as_tokens():
    own = IdVocabulary(300)
    assert own.size == 300 and own.encode(b"5 17\n299").tolist() == [5, 17, 299]
    assert own.encode(b"").shape == (0,) and own.decode([5, 17]) == b"5 17 " and own.start.tolist() == [0]
    assert joined(own.blocks([in_blocks(b"5 17 299")])) == [5, 17, 299] and own.names()[17] == b"17"
    assert loads(dumps(own), KINDS) == own
    for text, named in ((b"5 the", "'the'"), (b"300", r"\b300\b"), (b"-1", "-1")):
        with pytest.raises(UserError, match=named):
            own.encode(text)


# Ranks


# The saved form


def saved(vocabulary):
    return loads(dumps(vocabulary), KINDS)


@given(characters=AWKWARD, lower_case=st.booleans())
@settings(max_examples=200)
def test_saved_characters_are_the_same(characters, lower_case):
    distinct = "".join(dict.fromkeys(characters + "\N{REPLACEMENT CHARACTER}"))
    own = CharacterVocabulary(distinct, lower_case)
    assert saved(own) == own
    assert dumps(own).count("\n") == 1 + len(distinct), "a line per token"


@given(words=st.lists(AWKWARD), line_mark=st.sampled_from(LineMark), lower_case=st.booleans())
def test_saved_words_are_the_same(words, line_mark, lower_case):
    own = WordVocabulary(tuple(dict.fromkeys([*words, "<UNK>", "<eos>", "<S>"])), line_mark, lower_case, "<UNK>")
    assert saved(own) == own
    assert saved(own).encode(b"<eos> x").tolist() == own.encode(b"<eos> x").tolist()


BYTE, CHAR = 'txl_jax vocabulary byte {"newlines": "keep"}\n', 'txl_jax vocabulary char {"lower_case": false}\n'
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
        *(BYTE + symbols for symbols in ("97\n96\n", "97\n97\n", "97\n\n98\n", "256\n", "a\n")),
        CHAR + "a\n\N{REPLACEMENT CHARACTER}\na\n",
        WORD + "<unk>\na\n",
        WORD.replace("unknown", "known") + "<eos>\n<unk>\n",
        "txl_jax vocabulary sentencepiece {}\n",
    ],
)
def test_a_damaged_form_is_one_clear_error(text):
    start = re.escape(repr(text.partition("\n")[0][:60]))
    with pytest.raises(UserError, match=start):
        loads(text, KINDS)


def test_equality_and_digest_know_every_setting():
    words = ("<eos>", "<S>", "a", "<unk>", "<UNK>")
    different = [
        ByteVocabulary(b"ab"),
        ByteVocabulary(b"ac"),
        ByteVocabulary(b"ab", Newlines.DROP),
        CharacterVocabulary("ab\N{REPLACEMENT CHARACTER}"),
        CharacterVocabulary("ba\N{REPLACEMENT CHARACTER}"),
        CharacterVocabulary("ab\N{REPLACEMENT CHARACTER}", lower_case=True),
        WordVocabulary(words),
        WordVocabulary(words[::-1]),
        WordVocabulary(words, lower_case=True),
        WordVocabulary(words, unknown="<UNK>"),
        *(WordVocabulary(words, mark) for mark in LineMark if mark is not LineMark.EOS),
    ]
    for one, other in itertools.combinations(different, 2):
        assert one != other and digest(one) != digest(other)
    for one in different:
        assert saved(one) == one and digest(saved(one)) == digest(one)
        assert digest(one) == hashlib.sha256(dumps(one).encode()).hexdigest()
