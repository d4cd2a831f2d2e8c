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


def attributes(words=WORDS, **more) -> dict:
    counts = collections.Counter(dict.fromkeys(words, 3))
    ids = collections.OrderedDict((word, token) for token, word in enumerate(words))
    return {
        "counter": counts,
        "special": ["<eos>"],
        "idx2sym": list(words),
        "sym2idx": ids,
        "delimiter": None,
    } | more


def write_plain(path, value):
    path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize("write", [write_plain, torch_bytes.write_legacy])
def test_a_tokenizer_of_hugging_face(write, tmp_path):
    value = attributes(lower_case=False, unk_idx=3)
    if write is write_plain:
        value["punction_pattern"] = re.compile("[.,]")
    write(tmp_path / "vocab.bin", value)
    found = foreign_vocabulary.find(tmp_path, len(WORDS))
    assert found.vocabulary == WordVocabulary(tuple(WORDS), LineMark.EOS, False, "<unk>")
    assert found.vocabulary.encode(b"the \xc3\x9cnder x\n").tolist() == [1, 4, 3, 0]


@torch_bytes.by_format
def test_a_corpus_of_the_pytorch_release(write, tmp_path):
    vocab = Object(Name("vocabulary", "Vocab"), attributes(lower_case=True))
    whole = {"dataset": "ptb", "vocab": vocab, "train": np.arange(50)}
    write(tmp_path / "cache.pt", Object(Name("data_utils", "Corpus"), whole))
    found = foreign_vocabulary.find(tmp_path, len(WORDS)).vocabulary
    assert found == WordVocabulary(tuple(WORDS), LineMark.EOS, True, "<unk>")


class Vocab:
    """A class of the release by another name."""

    def __init__(self, **values):
        self.__dict__ |= values


def test_a_corpus_of_the_tensorflow_release(tmp_path):
    vocab = Vocab(**attributes(ONE_BILLION, lower_case=False))
    whole = Vocab(dataset="lm1b", vocab=vocab, train=["a"], valid=np.arange(9))
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(whole, 2))
    found = foreign_vocabulary.find(tmp_path, 4).vocabulary
    assert found == WordVocabulary(tuple(ONE_BILLION), LineMark.DOUBLE_S, False, "<UNK>")


@pytest.mark.parametrize(
    ("symbols", "dataset", "expected"),
    [
        (["101", "32", "97"], "enwik8", ByteVocabulary(b"e a", Newlines.DROP)),
        (["101", "10", "97"], None, ByteVocabulary(b"e\na", Newlines.KEEP)),
        (["_", "e", "a"], "text8", ByteVocabulary(b" ea", Newlines.KEEP)),
    ],
)
def test_bytes(symbols, dataset, expected):
    found = foreign_vocabulary.of_symbols(
        symbols, lower_case=False, dataset=dataset, name="cache.pkl"
    )
    assert found.vocabulary == expected, "with the same ids"


def test_lists_of_words(tmp_path):
    (tmp_path / "1b_word_vocab.txt").write_text("<S> 30\nthe 20\n\n<UNK> 3\nof\n", encoding="utf-8")
    found = foreign_vocabulary.find(tmp_path, 4).vocabulary
    assert found == WordVocabulary(tuple(ONE_BILLION), LineMark.DOUBLE_S, False, "<UNK>")
    ours = WordVocabulary(tuple(WORDS), LineMark.EOS, True)
    (tmp_path / "vocabulary.txt").write_text(vocabulary_lib.dumps(ours), encoding="utf-8")
    assert foreign_vocabulary.find(tmp_path, len(WORDS)).vocabulary == ours


def test_a_byte_order_mark_is_not_part_of_the_first_word(tmp_path):
    for name, text in (("vocab.txt", "\n".join(WORDS)), ("vocabulary.txt", None)):
        words = WordVocabulary(tuple(WORDS), LineMark.EOS)
        content = (text or vocabulary_lib.dumps(words)).encode()
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content)
        found = foreign_vocabulary.find(tmp_path, len(WORDS)).vocabulary
        assert found == words and found.line_mark is LineMark.EOS


def test_added_tokens_continue_the_words(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    size = len(WORDS)
    (tmp_path / "added_tokens.json").write_text(f'{{"<b>": {size + 1}, "<a>": {size}, "the": 1}}')
    found = foreign_vocabulary.find(tmp_path, size + 2)
    assert found.vocabulary.words == (*WORDS, "<a>", "<b>")
    assert any("added_tokens.json" in note for note in found.notes)
    assert foreign_vocabulary.find(tmp_path, size).vocabulary.words == tuple(WORDS), (
        "the table decides"
    )
    for content in (
        f'{{"<a>": {size + 1}}}',
        f'{{"the": {size}}}',
        '{"<a>": "x"}',
        "[1]",
        "null",
        "{",
        "[" * 100_000,
    ):
        (tmp_path / "added_tokens.json").write_text(content)
        with pytest.raises(UserError, match=r"added_tokens\.json"):
            foreign_vocabulary.find(tmp_path, size + 1)


def test_a_long_token_that_is_repeated_is_not_searched_each_time(monkeypatch):
    """A pickle repeats a text for two bytes. Equal ones are found without a look into them."""
    searched = []
    monkeypatch.setattr(foreign_vocabulary, "_SURROGATE", Searches(searched))
    with pytest.raises(UserError, match="distinct"):
        foreign_vocabulary.of_symbols(["N" * 1000] * 1000, name="vocab.pkl")
    assert not searched
    with pytest.raises(UserError, match="distinct"):
        foreign_vocabulary.of_symbols([["a"], "b"], name="vocab.pkl")


class Searches:
    """A pattern that notes each search."""

    def __init__(self, searched):
        self.searched = searched

    def search(self, text):
        self.searched.append(text)


def test_what_has_no_usable_words(tmp_path):
    found = foreign_vocabulary.of_symbols(["<eos>", "the"], lower_case=False, name="vocab.txt")
    assert found.vocabulary is None and "unknown" in found.notes[0]
    # No bytes.
    assert (
        foreign_vocabulary.of_symbols(["256", "7"], lower_case=False, name="a").vocabulary is None
    )
    assert foreign_vocabulary.find(tmp_path, 3).vocabulary is None
    (tmp_path / "vocab.txt").write_bytes(b"the\n\xff\n")
    with pytest.raises(UserError, match=r"vocab\.txt .*\b4\b"):
        foreign_vocabulary.find(tmp_path, 2)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"words": ["a"]}, "idx2sym"),
        ({"idx2sym": [1, 2]}, "distinct"),
        ({"idx2sym": ["a", "a"]}, "distinct"),
        ({"idx2sym": ["a", "\ud800"]}, "distinct"),
        ({"vocab": {"vocab": {"vocab": {"idx2sym": ["a"]}}}}, "idx2sym"),
        ({"idx2sym": WORDS[:-1]}, r"\b5\b.*\b6\b"),
    ],
)
def test_what_is_no_vocabulary(value, named, tmp_path):
    write_plain(tmp_path / "vocab.pkl", value)
    with pytest.raises(UserError, match=rf"vocab\.pkl .*{named}"):
        foreign_vocabulary.find(tmp_path, len(WORDS))


@pytest.mark.nightly(part="huggingface")
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
def test_the_tokenizer_that_transformers_saves(tmp_path):
    """Its pickle holds the whole tokenizer, with objects of other packages."""
    import transformers

    (tmp_path / "words.txt").write_text("\n".join([*WORDS, "<formula>"]), encoding="utf-8")
    tokenizer = transformers.TransfoXLTokenizer(vocab_file=str(tmp_path / "words.txt"))
    tokenizer.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "vocab.pkl").exists()
    found = foreign_vocabulary.find(tmp_path / "saved", len(WORDS) + 1).vocabulary
    assert found == WordVocabulary((*WORDS, "<formula>"), LineMark.EOS, False, "<unk>")
