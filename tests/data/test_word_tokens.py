"""Tests words and characters as tokens: against plain Python, marks of lines, unknown words."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.encoded_text import WORDS, in_blocks, joined, words_of
from txl_jax.config import LineMark
from txl_jax.data.vocabulary import MARKS
from txl_jax.data.word_tokens import CharacterVocabulary, WordVocabulary
from txl_jax.errors import UserError


def plain_words(texts, line_mark, *, lower_case=False):
    """The ids of files, line by line, in plain Python."""
    lines = []
    for text in texts:
        lines += text.removesuffix("\n").split("\n") if text else []
    ids = {word: i for i, word in enumerate(WORDS)}
    lines = [[ids.get(word, ids["<unk>"]) for word in (line.lower() if lower_case else line).split()] for line in lines]
    match line_mark:
        case LineMark.EOS:
            lines = [[*line, ids["<eos>"]] for line in lines]
        case LineMark.S:
            lines = [[ids["<S>"]], *([*line, ids["<S>"]] for line in lines)]
        case LineMark.DOUBLE_S:
            lines = [[ids["<S>"], *line, ids["<S>"]] for line in lines] or [[ids["<S>"]]]
    return [token for line in lines for token in line]


# Known and unknown words, all kinds of white space, empty lines, and lines that are open at a file's end.
PARTS = ["the ", "cat ", "<S> ", "日本", "THE ", "unheard-of", " ", "\t", "\N{LINE SEPARATOR}", "\n", "\n", "\r\n"]
LINES = st.lists(st.sampled_from(PARTS)).map("".join)


@pytest.mark.parametrize("line_mark", LineMark)
@given(texts=st.lists(LINES, max_size=3), size=st.integers(1, 9), lower_case=st.booleans())
@settings(max_examples=100)
def test_words_against_plain_python(line_mark, texts, size, lower_case):
    vocabulary = words_of(line_mark, lower_case=lower_case)
    blocks = list(vocabulary.blocks(in_blocks(text.encode(), size) for text in texts))
    assert joined(blocks) == plain_words(texts, line_mark, lower_case=lower_case)
    assert all(block.dtype == np.uint8 and block.ndim == 1 for block in blocks)
    mark, found = MARKS.get(line_mark), vocabulary.decode(joined(blocks)).decode()
    assert found == "".join("\n" if WORDS[token] == mark else f"{WORDS[token]} " for token in joined(blocks))


@pytest.mark.parametrize(
    ("line_mark", "ids"), [(LineMark.EOS, [0, 1, 2]), (LineMark.DOUBLE_S, [0, 4, 4, 2]), (LineMark.NONE, [0, 2])]
)
def test_the_end_of_a_prompt_is_open(line_mark, ids):
    assert words_of(line_mark).encode(b"the\ncat").tolist() == ids
    other = WordVocabulary(("a", "<UNK>", "<eos>"), unknown="<UNK>")
    assert other.encode(b"a b <UNK> <unk>").tolist() == [0, 1, 1, 1], "the unknown word can be another"


@pytest.mark.parametrize(
    ("words", "line_mark"),
    [
        ((), LineMark.NONE),
        (("a", "<unk>", "a"), LineMark.NONE),
        (("a", "<unk>"), LineMark.EOS),
        (("a", "<unk>", "<eos>"), LineMark.S),
        (("a", "<unk>", "<eos>"), LineMark.DOUBLE_S),
    ],
)
def test_words_must_be_distinct_and_hold_the_unknown_and_the_mark(words, line_mark):
    mark = {LineMark.NONE: "'<unk>'", LineMark.EOS: "<eos>", LineMark.S: "<S>", LineMark.DOUBLE_S: "<S>"}[line_mark]
    with pytest.raises(UserError, match=mark):
        WordVocabulary(words, line_mark)


# Characters

CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")


@given(characters=st.text(CHARACTERS), others=st.text(CHARACTERS), size=st.integers(1, 9))
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
