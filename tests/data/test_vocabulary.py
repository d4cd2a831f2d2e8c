"""Tests vocabularies against plain Python, and what all kinds share: foreign ids, names, starts,
the saved form.
"""

import base64
import hashlib
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from support import hf_tokenizers as made
from support.encoded_text import WORDS, in_blocks, joined, words_of
from txl_jax.config import LineMark, Newlines
from txl_jax.data import subwords
from txl_jax.data import vocabulary as vocabulary_lib
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import KINDS
from txl_jax.data.id_tokens import IdVocabulary
from txl_jax.data.subwords import SubwordVocabulary, given_tokenizer, train
from txl_jax.data.vocabulary import MARKS, digest, dumps, escape, loads
from txl_jax.data.word_tokens import CharacterVocabulary, WordVocabulary
from txl_jax.errors import UserError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
# All that UTF-8 can encode, i.e. no surrogates. Hypothesis computes for a second with `codec`.
ENCODABLE = st.characters(exclude_categories=["Cs"])
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
# What the saved form must not take for the end of a line, or for one of its own escapes.
AWKWARD = st.text(st.sampled_from("\n\r\\nr\x0b\x0c\x1c\x85\N{LINE SEPARATOR}😀") | CHARACTERS)


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (ByteVocabulary.of(b"abc"), "caac"),
        (CharacterVocabulary(f"a{UNKNOWN}é"), "éaaé"),
        (WordVocabulary(("a", "<unk>", "<eos>")), "\na a \n"),
    ],
    ids=["bytes", "characters", "words"],
)
def test_decoding_takes_any_integers_and_names_a_foreign_one(vocabulary, expected):
    """Each vocabulary has three tokens, so the error names the range 0 to 2."""
    for dtype in (np.uint8, np.int32, np.int64):
        assert vocabulary.decode(np.array([[2, 0], [0, 2]], dtype)).decode() == expected, dtype
    assert vocabulary.decode([]) == b""

    for foreign in (-1, 3):
        with pytest.raises(UserError, match=rf"\b0\b.*\b2\b.*{foreign}$"):
            vocabulary.decode([0, foreign])


@pytest.mark.parametrize("symbols", [b"", b"aa"])
def test_bytes_must_be_distinct(symbols):
    with pytest.raises(UserError, match=re.escape(str([*symbols]))):
        ByteVocabulary(symbols)


@pytest.mark.parametrize(
    ("characters", "size", "n_distinct"), [("", 0, 0), ("abc", 3, 3), (f"a{UNKNOWN}a", 3, 2)]
)
def test_characters_must_be_distinct_and_contain_the_unknown(characters, size, n_distinct):
    named = rf"\b{size}\b.*\bchar\b.*'{UNKNOWN}'.*\b{n_distinct}\b"
    with pytest.raises(UserError, match=named):
        CharacterVocabulary(characters)


@pytest.mark.parametrize(
    ("words", "line_mark", "named"),
    [
        ((), LineMark.NONE, "'<unk>'"),
        (("a", "<unk>", "a"), LineMark.NONE, "'<unk>'"),
        (("a", "<unk>"), LineMark.EOS, "<eos>"),
        (("a", "<unk>", "<eos>"), LineMark.S, "<S>"),
        (("a", "<unk>", "<eos>"), LineMark.DOUBLE_S, "<S>"),
    ],
    ids=["no words", "a word twice", "no <eos>", "no <S>", "no <S> of two"],
)
def test_words_must_be_distinct_and_contain_the_unknown_and_the_mark(words, line_mark, named):
    with pytest.raises(UserError, match=named):
        WordVocabulary(words, line_mark)


def test_an_unprompted_text_follows_a_newline_or_a_space_or_the_first_token():
    assert ByteVocabulary(b"\n a").start.tolist() == [0]
    assert ByteVocabulary(b" a").start.tolist() == [0]
    assert ByteVocabulary(b"!a").start.tolist() == [0]
    # Never the newline that is dropped.
    assert ByteVocabulary.all_bytes(Newlines.DROP).start.tolist() == [ord(" ")]
    assert ByteVocabulary(b"\nab", Newlines.DROP).start.tolist() == [1]
    assert CharacterVocabulary(f"a {UNKNOWN}\n").start.tolist() == [3]
    assert CharacterVocabulary(f"a {UNKNOWN}").start.tolist() == [1]
    assert CharacterVocabulary(f"a{UNKNOWN}").start.tolist() == [0]


@pytest.mark.parametrize(
    ("line_mark", "start", "mark"),
    [
        (LineMark.EOS, [1], 1),
        (LineMark.S, [4], 4),
        (LineMark.DOUBLE_S, [4], 4),
        (LineMark.NONE, [0], None),
    ],
    ids=["eos", "s", "double_s", "none"],
)
def test_an_unprompted_text_of_words_follows_the_mark(line_mark, start, mark):
    """In `WORDS`, <eos> is token 1 and <S> is token 4."""
    assert words_of(line_mark).start.tolist() == start
    assert words_of(line_mark).mark == mark


def test_bytes_have_no_unknown_token():
    assert ByteVocabulary.of(b"abc").unknown_id is None


@pytest.mark.parametrize(
    "vocabulary",
    [CharacterVocabulary(f"a{UNKNOWN}"), words_of(LineMark.EOS)],
    ids=["characters", "words"],
)
def test_unknown_tokens_have_one_id_and_bytes_that_are_not_text_are_named(vocabulary):
    assert vocabulary.encode("ž".encode()).tolist() == [vocabulary.unknown_id]
    # The letter and the newline before it take three bytes.
    with pytest.raises(UserError, match=r"\b0xff\b.*\b3\b"):
        vocabulary.encode("é\n".encode() + b"\xff")


@pytest.mark.parametrize("line_mark", LineMark)
@given(lines=st.lists(st.lists(st.sampled_from(["a", "wörd", "é"]), min_size=1), min_size=1))
def test_words_have_as_many_bytes_as_the_text_with_single_spaces(line_mark, lines):
    marks = [MARKS[line_mark]] if line_mark in MARKS else []
    vocabulary = WordVocabulary((*marks, "<unk>", "a", "wörd", "é"), line_mark)
    text = "".join(" ".join(line) + "\n" for line in lines).encode()

    assert vocabulary.count_bytes(vocabulary.encode(text)) == len(text)
    spaced = text.replace(b" ", b"  ").replace(b"\n", b" \n")
    assert vocabulary.count_bytes(vocabulary.encode(spaced)) == len(text)


@pytest.mark.parametrize(
    "vocabulary",
    [CharacterVocabulary(f"a{UNKNOWN}"), WordVocabulary(("<eos>", "a", "<unk>"))],
    ids=["characters", "words"],
)
def test_bytes_are_not_known_above_a_thousandth_of_unknown_tokens(vocabulary, monkeypatch):
    """0 says that the number of bytes is not known."""
    # The ids are counted in blocks, here in hundreds of them.
    monkeypatch.setattr(vocabulary_lib, "_IDS_PER_BLOCK", 7)
    ids = np.full(2000, vocabulary.encode(b"a").item(), np.uint8)

    ids[:2] = vocabulary.unknown_id
    n_bytes = vocabulary.count_bytes(ids)
    assert n_bytes == vocabulary.byte_lengths[ids].sum()
    assert n_bytes > 0

    ids[2] = vocabulary.unknown_id
    assert vocabulary.count_bytes(ids) == 0


def test_the_bytes_of_ids_are_not_known():
    assert IdVocabulary(size=300).count_bytes(np.full(2000, 1, np.uint8)) == 0


# The saved form


def saved(vocabulary):
    return loads(dumps(vocabulary), KINDS)


@given(words=st.lists(AWKWARD), line_mark=st.sampled_from(LineMark), lower_case=st.booleans())
@settings(max_examples=200)
def test_saved_words_and_characters_are_the_same(words, line_mark, lower_case):
    distinct = tuple(dict.fromkeys([*words, "<UNK>", "<eos>", "<S>"]))
    characters = "".join(dict.fromkeys("".join([*words, UNKNOWN])))
    newlines = Newlines.DROP if lower_case else Newlines.KEEP
    vocabularies = [
        WordVocabulary(distinct, line_mark, lower_case, "<UNK>"),
        CharacterVocabulary(characters),
        ByteVocabulary(bytes(range(32, 127)), newlines),
    ]
    for vocabulary in vocabularies:
        text = dumps(vocabulary)
        assert saved(vocabulary) == vocabulary
        assert digest(vocabulary) == hashlib.sha256(text.encode()).hexdigest()
        assert text.count("\n") == 1 + vocabulary.size, "a line per token"
        expected = vocabulary.encode(b"<eos> x").tolist()
        assert saved(vocabulary).encode(b"<eos> x").tolist() == expected


BYTE = 'txl_jax vocabulary byte {"newlines": "keep"}\n'
WORD = 'txl_jax vocabulary word {"line_mark": "eos", "lower_case": false, "unknown": "<unk>"}\n'


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        # As it was saved before there were other tokens than bytes.
        pytest.param("[10, 97]", id="a list"),
        pytest.param('byte {"newlines": "keep"}\n97\n', id="no title"),
        pytest.param(BYTE, id="no bytes"),
        pytest.param(BYTE.replace("byte", "bit") + "97\n", id="unknown kind"),
        pytest.param(BYTE.replace("{", "") + "97\n", id="cut settings"),
        pytest.param(BYTE.replace('"keep"', '"lose"') + "97\n", id="unknown value"),
        pytest.param(BYTE.replace('{"newlines": "keep"}', "7") + "97\n", id="settings a number"),
        pytest.param(BYTE + "97\n97\n", id="a byte twice"),
        pytest.param(BYTE + "97\n\n98\n", id="an empty line"),
        pytest.param(BYTE + "256\n", id="beyond a byte"),
        pytest.param(BYTE + "a\n", id="a letter"),
        pytest.param(WORD.replace("unknown", "known") + "<eos>\n<unk>\n", id="unknown setting"),
        pytest.param("txl_jax vocabulary sentencepiece {}\n", id="another tool's"),
    ],
)
def test_a_corrupted_form_is_one_clear_error(text):
    """It shows up to 60 characters of the first line."""
    start = re.escape(repr(text.partition("\n")[0][:60]))
    with pytest.raises(UserError, match=start):
        loads(text, KINDS)


SIZES = st.integers(1, 9)


@given(text=st.binary(), size=SIZES)
def test_newlines_may_be_dropped(text, size):
    text += b"a\n\na"  # There is a newline to drop, and something else to keep.
    without_newlines = text.replace(b"\n", b"")
    own_bytes = bytes(sorted(set(without_newlines)))
    for vocabulary in (
        ByteVocabulary.all_bytes(Newlines.DROP),
        ByteVocabulary(own_bytes, Newlines.DROP),
    ):
        assert vocabulary.decode(vocabulary.encode(text)) == without_newlines
        ids = joined(vocabulary.blocks([in_blocks(text, size)] * 2))
        assert vocabulary.decode(ids) == 2 * without_newlines


@given(
    start=st.binary().map(lambda start: start.replace(b"x", b"")),
    size=SIZES,
    offset=st.integers(0, 99),
)
def test_a_foreign_byte_of_a_file_is_named_with_its_place(start, size, offset):
    """The error also says how many bytes the vocabulary has."""
    vocabulary = ByteVocabulary(bytes(set(range(256)) - {ord("x")}))
    files = [
        in_blocks(b"ab", size, name="other.txt"),
        in_blocks(start + b"xax", size, offset=offset),
    ]
    named = rf"\b{ord('x')}\b.*\b{offset + len(start)}\b.*\b{vocabulary.size}\b"
    with pytest.raises(UserError, match=rf"^some\.txt\b.*{named}"):
        joined(vocabulary.blocks(files))


# Words and characters


def plain_words(texts, line_mark, *, lower_case=False):
    """The ids of some files, with marks between their lines, in plain Python."""
    ids = {word: i for i, word in enumerate(WORDS)}
    tokens = []
    n_lines = 0
    # With one <S> per line, a text begins with a mark, also without a line.
    if line_mark is LineMark.S:
        tokens.append(ids["<S>"])
    for text in texts:
        lines = text.removesuffix("\n").split("\n") if text else []
        n_lines += len(lines)
        for line in lines:
            if lower_case:
                line = line.lower()
            words = [ids.get(word, ids["<unk>"]) for word in line.split()]
            match line_mark:
                case LineMark.EOS:
                    tokens += [*words, ids["<eos>"]]
                case LineMark.S:
                    tokens += [*words, ids["<S>"]]
                case LineMark.DOUBLE_S:
                    tokens += [ids["<S>"], *words, ids["<S>"]]
                case LineMark.NONE:
                    tokens += words
    # With two of them, a text has its first mark also without a line.
    if line_mark is LineMark.DOUBLE_S and n_lines == 0:
        tokens.append(ids["<S>"])
    return tokens


# Known and unknown words, all kinds of white space, empty lines, and lines that are open at a
# file's end.
PARTS = [
    "the ",
    "cat ",
    "<S> ",
    "日本",
    "THE ",
    "unheard-of",
    " ",
    "\t",
    "\N{LINE SEPARATOR}",
    "\n",
    "\n",
    "\r\n",
]
LINES = st.lists(st.sampled_from(PARTS)).map("".join)


@pytest.mark.parametrize("line_mark", LineMark)
@given(texts=st.lists(LINES, max_size=3), size=st.integers(1, 9), lower_case=st.booleans())
@settings(max_examples=100)
def test_words_against_plain_python(line_mark, texts, size, lower_case):
    vocabulary = words_of(line_mark, lower_case=lower_case)
    blocks = list(vocabulary.blocks(in_blocks(text.encode(), size) for text in texts))

    expected = plain_words(texts, line_mark, lower_case=lower_case)
    assert joined(blocks) == expected
    for block in blocks:
        assert block.dtype == np.uint8
        assert block.ndim == 1

    expected_text = ""
    for token in expected:
        is_mark = WORDS[token] == MARKS.get(line_mark)
        expected_text += "\n" if is_mark else f"{WORDS[token]} "
    assert vocabulary.decode(joined(blocks)).decode() == expected_text


@pytest.mark.parametrize(
    ("line_mark", "ids"),
    [
        (LineMark.EOS, [0, 1, 2]),
        (LineMark.S, [0, 4, 2]),
        (LineMark.DOUBLE_S, [0, 4, 4, 2]),
        (LineMark.NONE, [0, 2]),
    ],
    ids=["eos", "s", "double_s", "none"],
)
def test_the_end_of_a_prompt_is_open(line_mark, ids):
    """Marks are between its lines, and none is before or after them."""
    assert words_of(line_mark).encode(b"the\ncat").tolist() == ids


def test_the_unknown_word_can_be_another():
    vocabulary = WordVocabulary(("a", "<UNK>", "<eos>"), unknown="<UNK>")
    assert vocabulary.encode(b"a b <UNK> <unk>").tolist() == [0, 1, 1, 1]


@given(characters=st.text(CHARACTERS), others=st.text(CHARACTERS), size=st.integers(1, 9))
def test_characters_are_known_or_replaced_and_their_bytes_are_counted(characters, others, size):
    """The bytes of a text with an unknown character are not known."""
    known = "".join(dict.fromkeys(characters + UNKNOWN))
    vocabulary = CharacterVocabulary(known)
    text = others + characters
    expected_text = text
    for character in set(text) - set(known):
        expected_text = expected_text.replace(character, UNKNOWN)
    expected = [known.index(character) for character in expected_text]

    ids = joined(vocabulary.blocks([in_blocks(text.encode(), size)]))
    assert ids == expected
    assert vocabulary.encode(text.encode()).tolist() == expected
    assert vocabulary.decode(ids).decode() == expected_text
    n_bytes = 0 if UNKNOWN in expected_text else len(text.encode())
    assert vocabulary.count_bytes(ids) == n_bytes


# Subwords: the package's own ids, the bytes of each token, what is trained, and files that cannot
# be used


END = "<|endoftext|>"
SAMPLES = (
    "Once upon a time\n",
    "the café  was\tshut.\n",
    "\n",
    "  indented\n",
    "日本 😀\n",
    END,
    "\n\n\n",
    "x" * 40,
)


OWN = SubwordVocabulary(made.byte_level())
PACKAGE = tokenizers.Tokenizer.from_str(made.byte_level())


@given(lines=st.lists(st.sampled_from(SAMPLES)), size=st.integers(1, 30))
def test_the_ids_are_those_of_the_package_in_blocks_too(lines, size):
    text = "".join(lines)
    expected = PACKAGE.encode(text, add_special_tokens=False).ids
    assert OWN.encode(text.encode()).tolist() == expected
    assert joined(OWN.blocks([in_blocks(text.encode(), size)])) == expected


def test_properties_of_subwords():
    assert OWN.kind == "subword"
    assert OWN.size == PACKAGE.get_vocab_size() == made.SIZE
    assert OWN.encode(b"one").dtype == np.uint16
    assert OWN.mark is None
    assert OWN.unknown_id is None
    assert OWN.start.tolist() == [0]  # The token that ends documents.


@given(text=st.text(ENCODABLE))
def test_every_text_comes_back_also_token_by_token(text):
    content = text.encode()
    ids = OWN.encode(content)
    assert OWN.decode(ids) == content
    assert OWN.count_bytes(ids) == len(content)
    assert b"".join(OWN.decode([token]) for token in ids) == content


def test_ids_may_lack_a_token():
    """Token 1, the exclamation mark, is moved behind all others."""
    gapped = SubwordVocabulary(made.byte_level().replace('"!":1', f'"!":{made.SIZE}'))
    assert gapped.size == made.SIZE + 1
    assert gapped.names()[1] == b""
    assert gapped.decode([1]) == b""
    assert gapped.encode(b"one!").tolist() == [*OWN.encode(b"one"), made.SIZE]


def test_what_is_for_other_uses_has_no_effect():
    """Truncation, padding, dropout of merges, and tokens around a text."""
    changed = tokenizers.Tokenizer.from_str(made.byte_level())
    changed.enable_truncation(max_length=3)
    changed.enable_padding(length=50)
    changed.model.dropout = 0.9
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        f"{END} $A {END}", special_tokens=[(END, 0)]
    )

    text = "".join(SAMPLES)
    expected = PACKAGE.encode(text).ids
    for _ in range(3):  # With dropout, one of the three would differ.
        vocabulary = SubwordVocabulary(changed.to_str())
        assert vocabulary.encode(text.encode()).tolist() == expected


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        (made.word_pieces(), "banana do unseen", " banana do [UNK]"),
        (made.meta_space(), "ban é", " ban é"),
        (made.whole_words(), "ba  do", " ba do"),
    ],
    ids=["pieces of words", "a mark for the space", "whole words"],
)
def test_pieces_of_words_are_spelt_as_in_a_text(content, text, expected):
    vocabulary = SubwordVocabulary(content)
    ids = vocabulary.encode(text.encode())
    assert vocabulary.decode(ids) == expected.encode()
    assert b"".join(vocabulary.decode([token]) for token in ids) == expected.encode()


def test_an_unprompted_text_of_subwords_follows_a_newline_or_the_first_token():
    newline = made.ALPHABET.index("Ċ")  # As byte-level tokenizers write it.
    assert SubwordVocabulary(made.byte_level(special=())).start.tolist() == [newline]

    pieces = SubwordVocabulary(made.word_pieces())
    assert pieces.start.tolist() == [0]
    assert pieces.names()[pieces.unknown_id] == b" [UNK]"


TEXT = "".join(made.TEXT)


def trained(content=TEXT, *, size=290, block=1000):
    return train([in_blocks(content.encode(), block)], size=size)


# Trains as `trained(block=77)`, and prints the tokenizer. It imports as little as it can.
TRAIN_ELSEWHERE = """
import sys
from support import hf_tokenizers
from support.encoded_text import in_blocks
from txl_jax.data.subwords import train
text = "".join(hf_tokenizers.TEXT)
sys.stdout.write(train([in_blocks(text.encode(), 77)], size=290).content)
"""


def test_training_has_all_bytes_and_frequent_words_and_any_text_comes_back():
    vocabulary = trained()
    assert vocabulary.size == 290
    single_bytes = {name[0] for name in vocabulary.names() if len(name) == 1}
    assert single_bytes == set(range(256))
    frequent = b"once upon a time"
    assert len(vocabulary.encode(frequent)) < len(frequent) / 2

    text = " unseen\r\n\n\t日本 😀\x00".encode()
    assert vocabulary.decode(vocabulary.encode(text)) == text


def test_training_ends_when_nothing_is_left_to_merge():
    """The vocabulary then has only the bytes."""
    assert trained("a\n", size=1000).size == 256


@pytest.mark.parametrize("threads", [1, 2])
def test_hosts_learn_the_same_bytes(threads):
    """In other processes, on other threads and in other blocks. Python's and Rust's hashes differ
    between processes.
    """
    environment = os.environ | {
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", TRAIN_ELSEWHERE]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == trained().content


def test_what_cannot_be_trained_on_is_named():
    with pytest.raises(UserError, match=r"vocab_size must be at least 256.*255"):
        trained(size=255)
    with pytest.raises(UserError, match=r"^some\.txt\b.*\b2\b"):
        train([in_blocks(b"ab\xff", 9)], size=290)


@pytest.mark.parametrize(
    "content",
    [
        made.byte_level(),
        made.byte_level(pretty=True),
        made.byte_level().replace("<|", "\\u003c|"),
    ],
    ids=["compact", "pretty", "escaped"],
)
def test_the_saved_form_is_two_lines_and_keeps_the_file(content):
    vocabulary = SubwordVocabulary(content)
    text = dumps(vocabulary)
    assert text.count("\n") == 2
    assert loads(text, KINDS) == vocabulary
    assert loads(text, KINDS).content == content


def test_the_digest_is_of_the_file():
    assert digest(OWN) != digest(SubwordVocabulary(made.byte_level(pretty=True)))


def test_a_corrupted_saved_tokenizer_is_an_error():
    title, content = dumps(OWN).splitlines()
    for corrupted in ("", "{}", content[: len(content) // 2]):
        with pytest.raises(UserError, match="'txl_jax vocabulary subword "):
            loads(f"{title}\n{corrupted}\n", KINDS)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe"],
    ids=["empty", "no model", "cut model", "not UTF-8"],
)
def test_a_file_that_is_not_a_tokenizer_is_named(content, tmp_path):
    path = tmp_path / "old.model"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"--data\.tokenizer\.hf_file\b.*{path}\b"):
        given_tokenizer(str(path))


def test_a_tokenizer_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + made.byte_level().encode())
    assert given_tokenizer(str(tmp_path / "tokenizer.json")) == OWN


def changed_tokenizer(**parts):
    return json.dumps(json.loads(made.few_letters()) | parts)


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def in_sequence(part, steps):
    """A part of a tokenizer that takes these steps one after the other."""
    names = {
        "normalizer": "normalizers",
        "pre_tokenizer": "pretokenizers",
        "decoder": "decoders",
    }
    return {part: {"type": "Sequence", names[part]: steps}}


def normalizers(*steps):
    return in_sequence("normalizer", list(steps))


def table(text):
    """SentencePiece's table of characters without a trie, which maps nothing, and with one text."""
    content = bytes(4) + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ADDED = {
    "id": 3,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
# The package also applies the normalizer to the text of such a token, when it reads the file.
ADDED_TOKEN = {"added_tokens": [ADDED | {"content": "aaaa"}]}
# A sequence of four doublings, as one step of another sequence.
NESTED = normalizers(*[replace("q", "qq")] * 4)["normalizer"]


# Steps may make a text at most 32 times as long, which five doublings do. There may be 32 of them,
# each with a replacement of up to 256 characters.
@pytest.mark.parametrize(
    ("part", "parts"),
    [
        pytest.param("normalizer", normalizers(*[replace("a", "aa")] * 16), id="doubling"),
        pytest.param(
            "normalizer",
            normalizers(*[replace("a", "aa")] * 30) | ADDED_TOKEN,
            id="doubling of an added token",
        ),
        pytest.param("normalizer", normalizers(*[NESTED] * 4), id="nested"),
        pytest.param("normalizer", normalizers(*[replace("qz", "qzqz")] * 16), id="of two letters"),
        pytest.param(
            "normalizer", normalizers(*[replace("[k-m]", "mm", "Regex")] * 16), id="of matches"
        ),
        pytest.param(
            "normalizer",
            normalizers(*[replace("(?=q)", "q", "Regex")] * 16),
            id="of empty matches",
        ),
        pytest.param(
            "normalizer", normalizers(*[replace("q", "zz"), replace("z", "qq")] * 8), id="by turns"
        ),
        pytest.param("normalizer", {"normalizer": replace("a", "b" * 100)}, id="in one step"),
        pytest.param(
            "normalizer", {"normalizer": replace("a", "b" * 100_000)}, id="in one long step"
        ),
        pytest.param("normalizer", {"normalizer": table("b" * 1000)}, id="in a table"),
        pytest.param("normalizer", normalizers(table("bb"), table("bb")), id="in two tables"),
        pytest.param("decoder", in_sequence("decoder", [replace("a", "aa")] * 16), id="decoder"),
        pytest.param(
            "pre_tokenizer", in_sequence("pre_tokenizer", [BYTES] * 16), id="bytes of bytes"
        ),
        # They do not make a text longer, but to try them all would take long.
        pytest.param("normalizer", normalizers(*[replace("a", "b")] * 1000), id="many"),
    ],
)
def test_a_tokenizer_that_lets_a_text_grow_too_much_or_has_too_many_steps_is_an_error(part, parts):
    """A file of 2 kB would take all memory. Also as the vocabulary.txt of a model."""
    content = changed_tokenizer(**parts)
    with pytest.raises(UserError, match=f" {part} "):
        SubwordVocabulary(content)

    saved_form = dumps(OWN).splitlines()[0] + "\n" + escape(content) + "\n"
    with pytest.raises(UserError, match=f" {part} "):
        loads(saved_form, KINDS)


def test_a_tokenizer_may_change_a_text_in_many_steps():
    steps = normalizers(
        {"type": "NFKC"},
        {"type": "NFD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        replace("``", '"'),
        replace("''", '"'),
        replace(" {2,}", " ", "Regex"),
    )
    vocabulary = SubwordVocabulary(changed_tokenizer(**steps))
    # The text becomes "ba ab", of which "ab" is one token.
    assert vocabulary.encode("b\u00c0 AB".encode()).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "added",
    [[ADDED | {"content": ""}], [1], 1.5, True, "ab"],
    ids=["an empty text", "a number", "not a list but a number", "a boolean", "a text"],
)
def test_added_tokens_without_texts_are_an_error(added):
    content = changed_tokenizer(added_tokens=added)
    with pytest.raises(UserError, match=r"added.tokens"):
        SubwordVocabulary(content)


ALPHABETS = {
    "DNA": "ACGT",
    "Chinese": "\u4e2d\u6587\u5b57",
    "digits": "0123",
    "signs": "-+",
    "white": " ",
}


@pytest.mark.parametrize("letters", ALPHABETS.values(), ids=ALPHABETS)
def test_words_are_cut_for_training_if_they_are_very_long(letters):
    """Training takes the square of a word's length.

    The parts together are the whole text. A word of 5,000 letters has four parts of 1,024, and
    words up to this length are not cut.
    """
    text = "a short word\n" + "".join(random.Random(0).choices(letters, k=5000)) + "b c"
    parts = list(subwords._cut_words(text))
    assert "".join(parts) == text
    assert len(parts) == 5
    assert list(subwords._cut_words(text[:1000])) == [text[:1000]]


def test_a_character_that_would_vanish_is_named_with_its_file():
    few_letters = SubwordVocabulary(made.few_letters())
    # White space vanishes without an error: it only separates words here.
    assert few_letters.decode(few_letters.encode(b"ab ba")) == b"abba"
    with pytest.raises(UserError, match=r"'c' \(U\+0063\)"):
        few_letters.encode(b"abc")
    with pytest.raises(UserError, match=r"^some\.txt: .*'é' \(U\+00E9\)"):
        list(few_letters.blocks([in_blocks("ab é".encode(), 3)]))

    whole_words = SubwordVocabulary(made.whole_words(unknown=None))
    with pytest.raises(UserError, match=r"^some\.txt: .*UNK"):
        list(whole_words.blocks([in_blocks(b"ba zebra", 99)]))
