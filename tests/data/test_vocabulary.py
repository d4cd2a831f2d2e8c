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
CHARACTERS = st.characters(codec="utf-8", exclude_characters="\0")
# What the saved form must not take for the end of a line, or for one of its own escapes.
AWKWARD = st.text(st.sampled_from("\n\r\\nr\x0b\x0c\x1c\x85\N{LINE SEPARATOR}😀") | CHARACTERS)


def test_decoding_takes_any_integers_and_names_a_foreign_one():
    for vocabulary, expected in (
        (ByteVocabulary.of(b"abc"), "caac"),
        (CharacterVocabulary(f"a{UNKNOWN}é"), "éaaé"),
        (WordVocabulary(("a", "<unk>", "<eos>")), "\na a \n"),
    ):
        for dtype in (np.uint8, np.int32, np.int64):
            assert vocabulary.decode(np.array([[2, 0], [0, 2]], dtype)).decode() == expected
        assert vocabulary.decode([]) == b""
        for foreign in (-1, 3):
            with pytest.raises(UserError, match=rf"\b0\b.*\b2\b.*{foreign}$"):
                vocabulary.decode([0, foreign])


def test_tokens_must_be_distinct_and_hold_the_unknown_and_the_mark():
    for symbols in (b"", b"aa"):
        with pytest.raises(UserError, match=re.escape(str([*symbols]))):
            ByteVocabulary(symbols)
    for characters in ("", "abc", f"a{UNKNOWN}a"):
        with pytest.raises(
            UserError,
            match=rf"\b{len(characters)}\b.*\bchar\b.*'{UNKNOWN}'.*\b{len({*characters})}\b",
        ):
            CharacterVocabulary(characters)
    for words, line_mark in (
        ((), LineMark.NONE),
        (("a", "<unk>", "a"), LineMark.NONE),
        (("a", "<unk>"), LineMark.EOS),
        *((("a", "<unk>", "<eos>"), mark) for mark in (LineMark.S, LineMark.DOUBLE_S)),
    ):
        with pytest.raises(UserError, match=MARKS.get(line_mark, "'<unk>'")):
            WordVocabulary(words, line_mark)


def test_what_an_unprompted_text_follows():
    assert all(ByteVocabulary(symbols).start.tolist() == [0] for symbols in (b"\n a", b" a", b"!a"))
    assert ByteVocabulary.all_bytes(Newlines.DROP).start.tolist() == [ord(" ")], (
        "never the newline that is dropped"
    )
    assert ByteVocabulary(b"\nab", Newlines.DROP).start.tolist() == [1]
    assert CharacterVocabulary(f"a {UNKNOWN}\n").start.tolist() == [3]
    assert CharacterVocabulary(f"a {UNKNOWN}").start.tolist() == [1]
    assert CharacterVocabulary(f"a{UNKNOWN}").start.tolist() == [0]
    starts = [words_of(line_mark).start.tolist() for line_mark in LineMark]
    assert starts == [[1], [4], [4], [0]] and [
        words_of(line_mark).mark for line_mark in LineMark
    ] == [1, 4, 4, None]


def test_the_id_of_unknown_tokens():
    assert ByteVocabulary.of(b"abc").unknown_id is None
    for vocabulary in (CharacterVocabulary("a\N{REPLACEMENT CHARACTER}"), words_of(LineMark.EOS)):
        assert vocabulary.encode("ž".encode()).tolist() == [vocabulary.unknown_id]
        with pytest.raises(UserError, match=r"\b0xff\b.*\b3\b"):
            vocabulary.encode("é\n".encode() + b"\xff")


@pytest.mark.parametrize("line_mark", LineMark)
@given(lines=st.lists(st.lists(st.sampled_from(["a", "wörd", "é"]), min_size=1), min_size=1))
def test_the_bytes_of_words_are_those_of_the_text_with_single_spaces(line_mark, lines):
    marks = [MARKS[line_mark]] if line_mark in MARKS else []
    vocabulary = WordVocabulary((*marks, "<unk>", "a", "wörd", "é"), line_mark)
    text = "".join(f"{' '.join(line)}\n" for line in lines).encode()
    for spaced in (text, text.replace(b" ", b"  ").replace(b"\n", b" \n")):
        assert vocabulary.count_bytes(vocabulary.encode(spaced)) == len(text)


@pytest.mark.parametrize(
    "vocabulary", [CharacterVocabulary(f"a{UNKNOWN}"), WordVocabulary(("<eos>", "a", "<unk>"))]
)
def test_bytes_are_not_known_above_a_thousandth_of_unknown_tokens(vocabulary, monkeypatch):
    monkeypatch.setattr(vocabulary_lib, "_IDS_PER_BLOCK", 7)
    token = vocabulary.encode(b"a").item()
    ids = np.full(2000, token, np.uint8)
    ids[:2] = vocabulary.unknown_id
    assert vocabulary.count_bytes(ids) == vocabulary.byte_lengths[ids].sum() > 0
    ids[2] = vocabulary.unknown_id
    assert vocabulary.count_bytes(ids) == 0 == IdVocabulary(size=300).count_bytes(ids)


# The saved form


def saved(vocabulary):
    return loads(dumps(vocabulary), KINDS)


@given(words=st.lists(AWKWARD), line_mark=st.sampled_from(LineMark), lower_case=st.booleans())
@settings(max_examples=200)
def test_saved_words_and_characters_are_the_same(words, line_mark, lower_case):
    distinct = tuple(dict.fromkeys([*words, "<UNK>", "<eos>", "<S>"]))
    characters = CharacterVocabulary("".join(dict.fromkeys("".join([*words, UNKNOWN]))))
    symbols = ByteVocabulary(bytes(range(32, 127)), Newlines.DROP if lower_case else Newlines.KEEP)
    for own in (WordVocabulary(distinct, line_mark, lower_case, "<UNK>"), characters, symbols):
        assert saved(own) == own and digest(own) == hashlib.sha256(dumps(own).encode()).hexdigest()
        assert dumps(own).count("\n") == 1 + own.size, "a line per token"
        assert saved(own).encode(b"<eos> x").tolist() == own.encode(b"<eos> x").tolist()


BYTE = 'txl_jax vocabulary byte {"newlines": "keep"}\n'
WORD = 'txl_jax vocabulary word {"line_mark": "eos", "lower_case": false, "unknown": "<unk>"}\n'


def test_a_damaged_form_is_one_clear_error():
    for text in (
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
    ):
        start = re.escape(repr(text.partition("\n")[0][:60]))
        with pytest.raises(UserError, match=start):
            loads(text, KINDS)


SIZES = st.integers(1, 9)


@given(text=st.binary(), size=SIZES)
def test_newlines_may_be_dropped(text, size):
    text += b"a\n\na"
    for kept in (
        ByteVocabulary.all_bytes(Newlines.DROP),
        ByteVocabulary(bytes(sorted({*text} - {10})), Newlines.DROP),
    ):
        assert kept.decode(joined(kept.blocks([in_blocks(text, size)] * 2))) == 2 * text.replace(
            b"\n", b""
        )
        assert kept.decode(kept.encode(text)) == text.replace(b"\n", b"")


@given(
    start=st.binary().map(lambda start: start.replace(b"x", b"")),
    size=SIZES,
    offset=st.integers(0, 99),
)
def test_a_foreign_byte_of_a_file_is_named_with_its_place(start, size, offset):
    others = ByteVocabulary(bytes(set(range(256)) - {ord("x")}))
    files = [
        in_blocks(b"ab", size, name="other.txt"),
        in_blocks(start + b"xax", size, offset=offset),
    ]
    with pytest.raises(
        UserError, match=rf"^some\.txt\b.*\b120\b.*\b{offset + len(start)}\b.*\b255\b"
    ):
        joined(others.blocks(files))


# Words and characters


def plain_words(texts, line_mark, *, lower_case=False):
    lines = []
    for text in texts:
        lines += text.removesuffix("\n").split("\n") if text else []
    ids = {word: i for i, word in enumerate(WORDS)}
    lines = [
        [ids.get(word, ids["<unk>"]) for word in (line.lower() if lower_case else line).split()]
        for line in lines
    ]
    match line_mark:
        case LineMark.EOS:
            lines = [[*line, ids["<eos>"]] for line in lines]
        case LineMark.S:
            lines = [[ids["<S>"]], *([*line, ids["<S>"]] for line in lines)]
        case LineMark.DOUBLE_S:
            lines = [[ids["<S>"], *line, ids["<S>"]] for line in lines] or [[ids["<S>"]]]
    return [token for line in lines for token in line]


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
    assert joined(blocks) == plain_words(texts, line_mark, lower_case=lower_case)
    assert all(block.dtype == np.uint8 and block.ndim == 1 for block in blocks)
    mark, found = MARKS.get(line_mark), vocabulary.decode(joined(blocks)).decode()
    assert found == "".join(
        "\n" if WORDS[token] == mark else f"{WORDS[token]} " for token in joined(blocks)
    )


def test_the_end_of_a_prompt_is_open():
    for line_mark, ids in (
        (LineMark.EOS, [0, 1, 2]),
        (LineMark.DOUBLE_S, [0, 4, 4, 2]),
        (LineMark.NONE, [0, 2]),
    ):
        assert words_of(line_mark).encode(b"the\ncat").tolist() == ids
    other = WordVocabulary(("a", "<UNK>", "<eos>"), unknown="<UNK>")
    assert other.encode(b"a b <UNK> <unk>").tolist() == [0, 1, 1, 1], (
        "the unknown word can be another"
    )


@given(characters=st.text(CHARACTERS), others=st.text(CHARACTERS), size=st.integers(1, 9))
def test_characters_are_known_or_replaced_and_their_bytes_are_counted(characters, others, size):
    known = "".join(dict.fromkeys(characters + "\N{REPLACEMENT CHARACTER}"))
    vocabulary, text = CharacterVocabulary(known), others + characters
    ids = joined(vocabulary.blocks([in_blocks(text.encode(), size)]))
    seen = "".join(c if c in known else "\N{REPLACEMENT CHARACTER}" for c in text)
    assert ids == [known.index(c) for c in seen] == vocabulary.encode(text.encode()).tolist()
    assert vocabulary.decode(ids).decode() == seen
    assert vocabulary.count_bytes(ids) == (0 if UNKNOWN in seen else len(text.encode()))


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


OWN, PACKAGE = (
    SubwordVocabulary(made.byte_level()),
    tokenizers.Tokenizer.from_str(made.byte_level()),
)


@given(lines=st.lists(st.sampled_from(SAMPLES)), size=st.integers(1, 30))
def test_the_ids_are_those_of_the_package_in_blocks_too(lines, size):
    text = "".join(lines)
    expected = PACKAGE.encode(text, add_special_tokens=False).ids
    assert (
        OWN.encode(text.encode()).tolist()
        == joined(OWN.blocks([in_blocks(text.encode(), size)]))
        == expected
    )
    assert (
        OWN.encode(b"one").dtype == np.uint16 and OWN.size == PACKAGE.get_vocab_size() == made.SIZE
    )
    assert (OWN.mark, OWN.unknown_id, OWN.kind, OWN.start.tolist()) == (None, None, "subword", [0])


@given(text=st.text())
def test_every_text_comes_back_also_token_by_token(text):
    ids = OWN.encode(text.encode())
    assert OWN.decode(ids) == text.encode() and OWN.count_bytes(ids) == len(text.encode())
    assert b"".join(OWN.decode([token]) for token in ids) == text.encode()


def test_ids_may_lack_a_token():
    gapped = SubwordVocabulary(made.byte_level().replace('"!":1', f'"!":{made.SIZE}'))
    assert gapped.size == made.SIZE + 1 and gapped.names()[1] == gapped.decode([1]) == b""
    assert gapped.encode(b"one!").tolist() == [*OWN.encode(b"one"), made.SIZE]


def test_what_is_for_other_uses_has_no_effect():
    changed = tokenizers.Tokenizer.from_str(made.byte_level())
    changed.enable_truncation(max_length=3)
    changed.enable_padding(length=50)
    changed.model.dropout = 0.9
    changed.post_processor = tokenizers.processors.TemplateProcessing(
        f"{END} $A {END}", special_tokens=[(END, 0)]
    )
    text = "".join(SAMPLES)
    for _ in range(3):
        assert (
            SubwordVocabulary(changed.to_str()).encode(text.encode()).tolist()
            == PACKAGE.encode(text).ids
        )


def test_pieces_of_words_are_spelt_as_in_a_text():
    for content, text, expected in (
        (made.word_pieces(), b"banana do unseen", b" banana do [UNK]"),
        (made.meta_space(), "ban é".encode(), " ban é".encode()),
        (made.whole_words(), b"ba  do", b" ba do"),
    ):
        own = SubwordVocabulary(content)
        assert own.decode(own.encode(text)) == expected
        assert b"".join(own.decode([token]) for token in own.encode(text)) == expected
    assert SubwordVocabulary(made.byte_level(special=())).start.tolist() == [
        made.ALPHABET.index("Ċ")
    ]
    pieces = SubwordVocabulary(made.word_pieces())
    assert pieces.start.tolist() == [0] and pieces.names()[pieces.unknown_id] == b" [UNK]"


TEXT = "".join(made.TEXT)


def trained(content=TEXT, *, size=290, block=1000):
    return train([in_blocks(content.encode(), block)], size=size)


def test_training_has_all_bytes_and_frequent_words_and_any_text_comes_back():
    own = trained()
    assert own.size == 290 and set(range(256)) == {
        name[0] for name in own.names() if len(name) == 1
    }
    assert len(own.encode(b"once upon a time")) < 16 / 2
    text = " unseen\r\n\n\t日本 😀\x00".encode()
    assert own.decode(own.encode(text)) == text
    assert trained("a\n", size=1000).size == 256  # Nothing to merge.


def test_hosts_learn_the_same_bytes():
    """In other processes, on other threads and in other blocks; Python's and Rust's hashes differ
    between processes.
    """
    words = (
        "import sys; from data.test_vocabulary import trained; "
        "sys.stdout.write(trained(block=77).content)"
    )
    found = set()
    for threads in ("1", "2"):
        environment = os.environ | {
            "RAYON_NUM_THREADS": threads,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        environment |= {"TOKENIZERS_PARALLELISM": str(threads == "2").lower()}
        found.add(
            subprocess.run(
                [sys.executable, "-c", words], env=environment, capture_output=True, check=True
            ).stdout
        )
    assert found == {trained().content.encode()}


def test_what_cannot_be_trained_on_is_named():
    with pytest.raises(UserError, match=r"vocab_size must be at least 256.*255"):
        trained(size=255)
    with pytest.raises(UserError, match=r"^some\.txt\b.*\b2\b"):
        train([in_blocks(b"ab\xff", 9)], size=290)


def test_the_saved_form_is_two_lines_and_keeps_the_file():
    for content in (
        made.byte_level(),
        made.byte_level(pretty=True),
        made.byte_level().replace("<|", "\\u003c|"),
    ):
        vocabulary = SubwordVocabulary(content)
        text = dumps(vocabulary)
        assert text.count("\n") == 2
        assert loads(text, KINDS) == vocabulary and loads(text, KINDS).content == content
    assert digest(OWN) != digest(SubwordVocabulary(made.byte_level(pretty=True)))
    title, content = dumps(OWN).splitlines()
    for damaged in ("", "{}", content[: len(content) // 2]):
        with pytest.raises(UserError, match="'txl_jax vocabulary subword "):
            loads(f"{title}\n{damaged}\n", KINDS)


def test_what_is_no_tokenizer_is_named(tmp_path):
    for content in (b"", b"{}", b'{"model": {"type": "BPE"}}', b"\xff\xfe"):
        (tmp_path / "old.model").write_bytes(content)
        with pytest.raises(
            UserError, match=rf"--data\.tokenizer\.hf_file\b.*{tmp_path}/old\.model\b"
        ):
            given_tokenizer(str(tmp_path / "old.model"))


def test_a_tokenizer_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xef\xbb\xbf" + made.byte_level().encode())
    assert given_tokenizer(str(tmp_path / "tokenizer.json")) == OWN


def changed_tokenizer(**parts):
    return json.dumps(json.loads(made.few_letters()) | parts)


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def in_sequence(part, steps):
    name = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[
        part
    ]
    return {part: {"type": "Sequence", name: steps}}


def table(text):
    """SentencePiece's table of characters without a trie, which maps nothing, and with one text."""
    return {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(bytes(4) + text.encode() + b"\0").decode(),
    }


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ADDED = {
    "id": 3,
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
GROWING = {
    "doubling": in_sequence("normalizer", [replace("a", "aa")] * 16),
    "doubling of an added token": {
        **in_sequence("normalizer", [replace("a", "aa")] * 30),
        "added_tokens": [ADDED | {"content": "aaaa"}],
    },
    "nested": in_sequence(
        "normalizer", [in_sequence("normalizer", [replace("q", "qq")] * 4)["normalizer"]] * 4
    ),
    "of two letters": in_sequence("normalizer", [replace("qz", "qzqz")] * 16),
    "of matches": in_sequence("normalizer", [replace("[k-m]", "mm", "Regex")] * 16),
    "of empty matches": in_sequence("normalizer", [replace("(?=q)", "q", "Regex")] * 16),
    "by turns": in_sequence("normalizer", [replace("q", "zz"), replace("z", "qq")] * 8),
    "in one step": {"normalizer": replace("a", "b" * 100)},
    "in one long step": {"normalizer": replace("a", "b" * 100_000)},
    "in a table": {"normalizer": table("b" * 1000)},
    "in two tables": in_sequence("normalizer", [table("bb")] * 2),
    "decoder": in_sequence("decoder", [replace("a", "aa")] * 16),
    "bytes of bytes": in_sequence("pre_tokenizer", [BYTES] * 16),
    "many": in_sequence("normalizer", [replace("a", "b")] * 1000),
}


@pytest.mark.parametrize("parts", GROWING.values(), ids=GROWING)
def test_a_tokenizer_that_lets_a_text_grow_without_bound_is_refused(parts):
    """A file of 2 kB would take all memory. Also as the vocabulary.txt of a model."""
    content = changed_tokenizer(**parts)
    part = next(name for name in ("normalizer", "pre_tokenizer", "decoder") if name in parts)
    with pytest.raises(UserError, match=f" {part} "):
        SubwordVocabulary(content)
    saved = dumps(OWN).splitlines()[0] + "\n" + escape(content) + "\n"
    with pytest.raises(UserError, match=f" {part} "):
        loads(saved, KINDS)


def test_a_tokenizer_may_change_a_text_in_many_steps():
    quotes = [replace("``", '"'), replace("''", '"'), replace(" {2,}", " ", "Regex")]
    steps = [
        {"type": "NFKC"},
        {"type": "NFD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        *quotes,
    ]
    vocabulary = SubwordVocabulary(changed_tokenizer(**in_sequence("normalizer", steps)))
    assert vocabulary.encode("b\u00c0 AB".encode()).tolist() == [1, 0, 2]


@pytest.mark.parametrize("added", [[ADDED | {"content": ""}], [1], 1.5, True, "ab"])
def test_added_tokens_without_texts_are_refused(added):
    with pytest.raises(UserError, match=r"added.tokens"):
        SubwordVocabulary(changed_tokenizer(added_tokens=added))


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

    What remains is the whole text, and short words are not cut.
    """
    text = "a short word\n" + "".join(random.Random(0).choices(letters, k=5000)) + "b c"
    parts = list(subwords._cut_words(text))
    assert "".join(parts) == text
    assert len(parts) == 5
    assert list(subwords._cut_words(text[:1000])) == [text[:1000]]


def test_a_character_that_would_vanish_is_refused_with_the_file():
    own = SubwordVocabulary(made.few_letters())
    assert own.decode(own.encode(b"ab ba")) == b"abba"
    with pytest.raises(UserError, match=r"'c' \(U\+0063\)"):
        own.encode(b"abc")
    with pytest.raises(UserError, match=r"^some\.txt: .*'é' \(U\+00E9\)"):
        list(own.blocks([in_blocks("ab é".encode(), 3)]))
    with pytest.raises(UserError, match=r"^some\.txt: .*UNK"):
        list(SubwordVocabulary(made.whole_words(unknown=None)).blocks([in_blocks(b"ba zebra", 99)]))
