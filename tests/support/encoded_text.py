"""Text in blocks, as vocabularies encode it, and data configs by flat field names."""

import dataclasses
import itertools
from typing import Any

from txl_jax.config import CorpusName, DataConfig, TokenizerConfig
from txl_jax.data.text import SPLITS, File, Text
from txl_jax.data.word_tokens import WordVocabulary

WORDS = ("the", "<eos>", "cat", "<unk>", "<S>", "sat", "日本")


def in_blocks(content, size=4, *, name="some.txt", offset=0):
    """A file that comes in blocks of a size, or of several sizes over and over."""
    sizes = [size] if isinstance(size, int) else size

    def blocks():
        edges = itertools.accumulate(itertools.cycle(sizes), initial=0)
        for first, last in itertools.pairwise(edges):
            if first >= len(content):
                return
            yield content[first:last]

    return File(name, len(content), blocks, offset)


def text_of(
    train=b"the cat\nsat\n",
    valid=b"cat\n",
    test=b"sat",
    *,
    digest="d",
    block=5,
    closed_alphabet=False,
):
    """A text of three splits, each one file or a list of files, of bytes or str."""
    splits = {}
    for name, content in zip(SPLITS, (train, valid, test), strict=True):
        contents = [content] if isinstance(content, bytes | str) else content
        splits[name] = tuple(in_blocks(_as_bytes(content), block) for content in contents)
    return Text("own text", "made up", digest, splits, closed_alphabet)


def _as_bytes(content):
    return content.encode() if isinstance(content, str) else content


def joined(blocks):
    """The tokens of all blocks, as one list."""
    tokens = []
    for block in blocks:
        tokens += block.tolist()
    return tokens


def words_of(line_mark, **fields):
    return WordVocabulary(WORDS, line_mark, **fields)


_TOKENIZER_FIELDS = {field.name for field in dataclasses.fields(TokenizerConfig)}


def data_config(**fields: Any) -> DataConfig:
    """Builds a config. Fields of the tokenizer (`kind`, `line_mark`, ...) go to its group."""
    tokenizer_fields = {}
    for name in _TOKENIZER_FIELDS & fields.keys():
        tokenizer_fields[name] = fields.pop(name)
    return DataConfig(tokenizer=TokenizerConfig(**tokenizer_fields), **fields)


def own_text(**fields: Any) -> DataConfig:
    return data_config(corpus=CorpusName.TEXT, **fields)
