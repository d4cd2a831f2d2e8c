"""Tests of other implementations' vocabularies: tokens, ids and marks of each kind of file."""

import collections
import pickle
import re

import numpy as np
import pytest

from support import torch_bytes
from support.torch_bytes import Name, Object
from txl_jax.config import LineMark, Newlines
from txl_jax.data import vocabulary as vocabulary_lib
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import foreign_vocabulary

WORDS = ["<eos>", "the", ",", "<unk>", "Ünder", "@-@"]
ONE_BILLION = ["<S>", "the", "<UNK>", "of"]


def attributes(words=WORDS, **others) -> dict:
    """The attributes of a release's vocabulary."""
    counts = collections.Counter(dict.fromkeys(words, 3))
    ids = collections.OrderedDict((word, token) for token, word in enumerate(words))
    return {
        "counter": counts,
        "special": ["<eos>"],
        "idx2sym": list(words),
        "sym2idx": ids,
        "delimiter": None,
    } | others


def write_plain(path, value):
    path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("write", [write_plain, torch_bytes.write_legacy])
def test_a_tokenizer_of_hugging_face(write, tmp_path):
    value = attributes(lower_case=False, unk_idx=3)
    # Its tokenizer has a compiled pattern, under a misspelt name. Only the pickle module writes it.
    if write is write_plain:
        value["punction_pattern"] = re.compile("[.,]")
    write(tmp_path / "vocab.bin", value)

    vocabulary = foreign_vocabulary.find(tmp_path, len(WORDS)).vocabulary
    assert vocabulary == WordVocabulary(tuple(WORDS), LineMark.EOS, False, "<unk>")
    assert vocabulary.encode(b"the \xc3\x9cnder x\n").tolist() == [1, 4, 3, 0]


@torch_bytes.by_format
def test_a_corpus_of_the_pytorch_release(write, tmp_path):
    vocab = Object(Name("vocabulary", "Vocab"), attributes(lower_case=True))
    whole = {"dataset": "ptb", "vocab": vocab, "train": np.arange(50)}
    write(tmp_path / "cache.pt", Object(Name("data_utils", "Corpus"), whole))

    vocabulary = foreign_vocabulary.find(tmp_path, len(WORDS)).vocabulary
    assert vocabulary == WordVocabulary(tuple(WORDS), LineMark.EOS, True, "<unk>")


class Vocab:
    """A class of the release by another name."""

    def __init__(self, **values):
        self.__dict__ |= values


def test_a_corpus_of_the_tensorflow_release(tmp_path):
    vocab = Vocab(**attributes(ONE_BILLION, lower_case=False))
    whole = Vocab(dataset="lm1b", vocab=vocab, train=["a"], valid=np.arange(9))
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(whole, 2))

    vocabulary = foreign_vocabulary.find(tmp_path, 4).vocabulary
    assert vocabulary == WordVocabulary(tuple(ONE_BILLION), LineMark.DOUBLE_S, False, "<UNK>")


# The releases write bytes as decimal numbers, and text8 as letters with "_" for the space. Their
# enwik8 has no newlines.
@pytest.mark.parametrize(
    ("symbols", "dataset", "expected"),
    [
        (["101", "32", "97"], "enwik8", ByteVocabulary(b"e a", Newlines.DROP)),
        (["101", "10", "97"], None, ByteVocabulary(b"e\na", Newlines.KEEP)),
        (["_", "e", "a"], "text8", ByteVocabulary(b" ea", Newlines.KEEP)),
    ],
    ids=["enwik8", "own bytes", "text8"],
)
def test_bytes_keep_their_ids(symbols, dataset, expected):
    result = foreign_vocabulary.of_symbols(
        symbols, lower_case=False, dataset=dataset, name="cache.pkl"
    )
    assert result.vocabulary == expected


def test_the_list_of_one_billion_word(tmp_path):
    """Words with their counts, which are not needed."""
    content = "<S> 30\nthe 20\n\n<UNK> 3\nof\n"
    (tmp_path / "1b_word_vocab.txt").write_text(content, encoding="utf-8")
    vocabulary = foreign_vocabulary.find(tmp_path, 4).vocabulary
    assert vocabulary == WordVocabulary(tuple(ONE_BILLION), LineMark.DOUBLE_S, False, "<UNK>")


def test_our_own_vocabulary(tmp_path):
    ours = WordVocabulary(tuple(WORDS), LineMark.EOS, True)
    (tmp_path / "vocabulary.txt").write_text(vocabulary_lib.dumps(ours), encoding="utf-8")
    assert foreign_vocabulary.find(tmp_path, len(WORDS)).vocabulary == ours


WORDS_AND_ENDS = WordVocabulary(tuple(WORDS), LineMark.EOS)


@pytest.mark.parametrize(
    ("name", "text"),
    [("vocab.txt", "\n".join(WORDS)), ("vocabulary.txt", vocabulary_lib.dumps(WORDS_AND_ENDS))],
    ids=["words", "our own"],
)
def test_a_byte_order_mark_is_not_part_of_the_first_word(name, text, tmp_path):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    vocabulary = foreign_vocabulary.find(tmp_path, len(WORDS)).vocabulary
    assert vocabulary == WORDS_AND_ENDS
    assert vocabulary.line_mark is LineMark.EOS


def test_added_tokens_continue_the_words(tmp_path):
    """If the table has rows for them."""
    size = len(WORDS)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    (tmp_path / "added_tokens.json").write_text(f'{{"<b>": {size + 1}, "<a>": {size}, "the": 1}}')

    with_added = foreign_vocabulary.find(tmp_path, size + 2)
    assert with_added.vocabulary.words == (*WORDS, "<a>", "<b>")
    assert any("added_tokens.json" in note for note in with_added.notes)

    without = foreign_vocabulary.find(tmp_path, size)
    assert without.vocabulary.words == tuple(WORDS)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(f'{{"<a>": {len(WORDS) + 1}}}', id="a gap"),
        pytest.param(f'{{"the": {len(WORDS)}}}', id="a word twice"),
        pytest.param('{"<a>": "x"}', id="not an id"),
        pytest.param("[1]", id="a list"),
        pytest.param("null", id="null"),
        pytest.param("{", id="cut"),
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_corrupted_added_tokens_are_named(content, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    (tmp_path / "added_tokens.json").write_text(content)
    with pytest.raises(UserError, match=r"added_tokens\.json"):
        foreign_vocabulary.find(tmp_path, len(WORDS) + 1)


class Searches:
    """A pattern that records each search."""

    def __init__(self):
        self.texts = []

    def search(self, text):
        self.texts.append(text)


def test_a_long_token_that_is_repeated_is_not_searched_each_time(monkeypatch):
    """A pickle repeats a text for two bytes. Equal ones are found without a look into them."""
    searches = Searches()
    # The pattern that finds what UTF-8 cannot encode, for which each token is searched.
    monkeypatch.setattr(foreign_vocabulary, "_SURROGATE", searches)
    with pytest.raises(UserError, match="distinct"):
        foreign_vocabulary.of_symbols(["N" * 1000] * 1000, name="vocab.pkl")
    assert searches.texts == []


def test_symbols_that_are_not_texts_are_an_error():
    with pytest.raises(UserError, match="distinct"):
        foreign_vocabulary.of_symbols([["a"], "b"], name="vocab.pkl")


def test_what_has_no_usable_words(tmp_path):
    """There is no vocabulary then, and the ids can still be used."""
    result = foreign_vocabulary.of_symbols(["<eos>", "the"], lower_case=False, name="vocab.txt")
    assert result.vocabulary is None
    assert "unknown" in result.notes[0]

    # 256 is not a byte, so these are words, and none of them is for unknown ones.
    not_bytes = foreign_vocabulary.of_symbols(["256", "7"], lower_case=False, name="a")
    assert not_bytes.vocabulary is None
    assert foreign_vocabulary.find(tmp_path, 3).vocabulary is None


def test_words_that_are_not_utf_8_are_named(tmp_path):
    """With the position of the first byte that is not text."""
    (tmp_path / "vocab.txt").write_bytes(b"the\n\xff\n")
    with pytest.raises(UserError, match=r"vocab\.txt .*\b4\b"):
        foreign_vocabulary.find(tmp_path, 2)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        pytest.param({"words": ["a"]}, "idx2sym", id="no symbols"),
        pytest.param({"idx2sym": [1, 2]}, "distinct", id="numbers"),
        pytest.param({"idx2sym": ["a", "a"]}, "distinct", id="a word twice"),
        pytest.param({"idx2sym": ["a", "\ud800"]}, "distinct", id="a surrogate"),
        # Objects are searched down to the second "vocab", because one may contain itself.
        pytest.param(
            {"vocab": {"vocab": {"vocab": {"idx2sym": ["a"]}}}}, "idx2sym", id="deep symbols"
        ),
        pytest.param({"idx2sym": WORDS[:-1]}, r"\b6\b.*\b5\b", id="a word too few"),
    ],
)
def test_a_pickle_without_a_vocabulary_is_named(value, named, tmp_path):
    write_plain(tmp_path / "vocab.pkl", value)
    with pytest.raises(UserError, match=rf"vocab\.pkl .*{named}"):
        foreign_vocabulary.find(tmp_path, len(WORDS))


@pytest.mark.nightly(part="huggingface")
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
def test_the_tokenizer_that_transformers_saves(tmp_path):
    """Its pickle contains the whole tokenizer, with objects of other packages."""
    import transformers

    # The tokenizer has a special token of its own, <formula>.
    (tmp_path / "words.txt").write_text("\n".join([*WORDS, "<formula>"]), encoding="utf-8")
    tokenizer = transformers.TransfoXLTokenizer(vocab_file=str(tmp_path / "words.txt"))
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "vocab.pkl").exists()

    vocabulary = foreign_vocabulary.find(tmp_path / "saved", len(WORDS) + 1).vocabulary
    assert vocabulary == WordVocabulary((*WORDS, "<formula>"), LineMark.EOS, False, "<unk>")
