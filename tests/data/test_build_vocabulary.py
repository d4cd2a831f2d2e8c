"""Tests which vocabulary a text gives rise to: counted on its training part alone, or taken from a file."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.encoded_text import in_blocks
from support.own_text import data_config
from txl_jax.config import DataConfig, LineMark, Newlines, Tokenizer
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import make_vocabulary
from txl_jax.data.text import Text
from txl_jax.errors import UserError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def text_of(train, valid="", test="", *, block=5, closed_alphabet=False):
    """A text of three splits, each a list of files' contents or just one."""
    contents = [[split] if isinstance(split, str) else split for split in (train, valid, test)]
    files = [tuple(in_blocks(content.encode(), block) for content in split) for split in contents]
    splits = dict(zip(("train", "valid", "test"), files, strict=True))
    return Text("text", "made up", "digest", splits, closed_alphabet)


def words(text, **fields):
    return list(make_vocabulary(data_config(kind=Tokenizer.WORD, **fields), text).words)


def characters(text, **fields):
    return make_vocabulary(data_config(kind=Tokenizer.CHAR, **fields), text).characters


# Bytes


def test_own_text_has_all_bytes():
    for newlines in Newlines:
        assert make_vocabulary(data_config(newlines=newlines), text_of("ab")) == ByteVocabulary.all_bytes(newlines)


def test_a_closed_alphabet_is_counted_over_all_splits():
    text = text_of(["cab\n", "é"], "bax", "y\n", closed_alphabet=True)
    assert make_vocabulary(DataConfig(), text) == ByteVocabulary(bytes(sorted("\nabcxyé".encode())))
    dropped = make_vocabulary(data_config(newlines=Newlines.DROP), text)
    assert dropped == ByteVocabulary(bytes(sorted("abcxyé".encode())), Newlines.DROP)


# Words


@given(
    texts=st.lists(st.lists(st.sampled_from(["a ", "b ", "B\n", "c\r\n", "\n", "日本\t", "<unk> "])).map("".join)),
    line_mark=st.sampled_from(LineMark),
    lower_case=st.booleans(),
    min_count=st.integers(1, 3),
    block=st.integers(1, 9),
)
@settings(max_examples=100)
def test_words_are_ranked_by_count_and_first_occurrence(texts, line_mark, lower_case, min_count, block):
    found = [word for text in texts for word in (text.lower() if lower_case else text).split()]
    counts = collections.Counter(found)
    kept = [word for word in counts if counts[word] >= min_count]
    rare = sum(counts[word] for word in counts if word not in kept)
    ranks = {word: (-counts[word], place) for place, word in enumerate(kept)}
    ranks["<unk>"] = (-(counts["<unk>"] if "<unk>" in kept else 0) - rare, ranks.get("<unk>", (0, 99))[1])
    mark = {LineMark.EOS: ["<eos>"], LineMark.NONE: []}.get(line_mark, ["<S>"])
    got = words(text_of(texts, block=block), line_mark=line_mark, lower_case=lower_case, min_count=min_count)
    assert got == mark + sorted(ranks, key=ranks.get)


def test_only_the_training_text_is_counted():
    text = text_of("a b b", "valid valid valid", "test test test test")
    assert words(text, line_mark=LineMark.NONE) == ["b", "a", "<unk>"]
    vocabulary = make_vocabulary(data_config(kind=Tokenizer.WORD), text)
    ids = [token for block in vocabulary.blocks(text.splits["valid"]) for token in block.tolist()]
    assert vocabulary.decode(ids) == b"<unk> <unk> <unk> \n"


def test_an_unknown_word_and_a_mark_in_the_text_are_those_tokens():
    text = text_of("a <unk> b <unk>\n")
    assert words(text) == ["<eos>", "<unk>", "a", "b"]
    vocabulary = make_vocabulary(data_config(kind=Tokenizer.WORD), text)
    assert vocabulary.encode(b"a <unk> c <unk>").tolist() == [2, 1, 1, 1]
    assert words(text_of("a <eos> b <eos>")) == ["<eos>", "a", "b", "<unk>"]
    assert words(text_of("a <S> b <eos>"), line_mark=LineMark.S) == ["<S>", "a", "b", "<eos>", "<unk>"]


# Characters


@given(texts=st.lists(st.text("abcA \n\r\\é日😀\N{LINE SEPARATOR}" + UNKNOWN)), lower_case=st.booleans())
@settings(max_examples=100)
def test_characters_are_ranked_by_count_and_first_occurrence(texts, lower_case):
    text = "".join(texts).lower() if lower_case else "".join(texts)
    ranked = sorted(dict.fromkeys(text), key=lambda character: -text.count(character))
    expected = ranked if UNKNOWN in ranked else [*ranked, UNKNOWN]
    assert characters(text_of(texts), lower_case=lower_case) == "".join(expected)


def test_rarer_characters_count_for_the_unknown():
    assert characters(text_of("aaabbcdé", "xxx", "yyyy"), min_count=2) == f"a{UNKNOWN}b"
    assert characters(text_of("a\n"), min_count=1) == f"a\n{UNKNOWN}", "no newline is added where lines are not marked"
    assert characters(text_of("ab")) == f"ab{UNKNOWN}"


# Given words


@pytest.fixture
def given_words(tmp_path):
    """Reads a vocabulary from a file of this content."""

    def read(content, **fields):
        path = tmp_path / "vocab.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        config = data_config(kind=Tokenizer.WORD, vocab_file=str(path), **fields)
        return make_vocabulary(config, text_of("never counted"))

    return read


@pytest.mark.parametrize(
    ("content", "line_mark", "expected"),
    [
        ("the\ncat", LineMark.NONE, ["the", "cat", "<unk>"]),
        ("the\n<S>\n<unk>\ncat\n", LineMark.S, ["the", "<S>", "<unk>", "cat"]),
        ("the\n<unk>\n", LineMark.DOUBLE_S, ["<S>", "the", "<unk>"]),
        ("the 12\r\ncat\t7\r\n\r\n  日本  3\r\n", LineMark.EOS, ["<eos>", "the", "cat", "日本", "<unk>"]),
        ("the\ncat 1\nthe 3\n", LineMark.EOS, ["<eos>", "the", "cat", "<unk>"]),
        ("the\n<UNK>\n", LineMark.EOS, ["<eos>", "the", "<UNK>"]),
    ],
)
def test_words_of_a_file_keep_their_order(content, line_mark, expected, given_words):
    vocabulary = given_words(content, line_mark=line_mark)
    assert list(vocabulary.words) == expected
    unknown = vocabulary.encode(b"never-seen").tolist()
    assert unknown == [expected.index("<unk>" if "<unk>" in expected else "<UNK>")]


@pytest.mark.parametrize("content", ["", " \r\n\t\n", b"the\n\xff"])
def test_a_file_without_words_is_named(content, given_words, tmp_path):
    with pytest.raises(UserError, match=rf"{tmp_path}/vocab\.txt\b"):
        given_words(content)


def test_subwords_are_trained_on_the_training_split():
    own = make_vocabulary(data_config(kind=Tokenizer.SUBWORD, vocab_size=258), text_of("ab ab abab\n" * 9))
    assert own.size == 258 and b"ab" in own.names()


def test_a_file_that_cannot_be_read_is_named_with_its_flag(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        for kind, field in ((Tokenizer.WORD, "vocab_file"), (Tokenizer.SUBWORD, "hf_file")):
            with pytest.raises(UserError, match=rf"--data\.tokenizer\.{field}\b.*{path}\b"):
                make_vocabulary(data_config(kind=kind, **{field: str(path)}), text_of("a"))
