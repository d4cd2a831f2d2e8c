"""Text in blocks, as vocabularies encode it."""

from txl_jax.data.text import File
from txl_jax.data.word_tokens import WordVocabulary

WORDS = ("the", "<eos>", "cat", "<unk>", "<S>", "sat", "日本")


def in_blocks(content, size=4, *, name="some.txt", offset=0):
    """A file that comes in blocks of a size."""
    return File(
        name, len(content), lambda: (content[i : i + size] for i in range(0, len(content), size)), offset=offset
    )


def joined(blocks):
    return [token for block in blocks for token in block.tolist()]


def words_of(line_mark, **fields):
    return WordVocabulary(WORDS, line_mark, **fields)
