"""Small texts for token stores, and comparing what is in a store."""

import numpy as np

from txl_jax.data.text import SPLITS, File, Text
from txl_jax.data.word_tokens import WordVocabulary

SETTINGS = {"tokenizer": "word", "min_count": 1}
WORDS = ("the", "<eos>", "cat", "<unk>", "<S>", "sat")


def file_of(content, block=5):
    return File("some.txt", len(content), lambda: (content[i : i + block] for i in range(0, len(content), block)))


def text_of(train=b"the cat\nsat\n", valid=b"cat\n", test=b"sat", *, digest="d", block=5):
    splits = (
        tuple(file_of(content, block) for content in ([s] if isinstance(s, bytes) else s)) for s in (train, valid, test)
    )
    return Text("own text", "made up", digest, dict(zip(SPLITS, splits, strict=True)))


def words():
    return WordVocabulary(WORDS)


def never():
    raise AssertionError("the store is there already")


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def assert_same(one, other):
    assert one.vocabulary == other.vocabulary
    for split in SPLITS:
        np.testing.assert_array_equal(one.splits[split], other.splits[split], strict=True)
    np.testing.assert_array_equal(one.sentences, other.sentences, strict=True)
