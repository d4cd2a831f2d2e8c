"""Builds the vocabulary of a text from its training split alone."""

import collections
import functools
from collections.abc import Callable, Iterable
from pathlib import Path

from txl_jax.config import DataConfig, Tokenizer
from txl_jax.config.data import DEFAULT_SUBWORDS
from txl_jax.data.sources.text import SPLITS, File, Text, with_bar
from txl_jax.data.tokens import subwords
from txl_jax.data.tokens.byte_vocabulary import ByteVocabulary, distinct
from txl_jax.data.tokens.character_vocabulary import UNKNOWN_CHARACTER, CharacterVocabulary
from txl_jax.data.tokens.id_vocabulary import IdVocabulary
from txl_jax.data.tokens.subwords import SubwordVocabulary
from txl_jax.data.tokens.utf8 import text_blocks
from txl_jax.data.tokens.vocabulary import MARKS, Vocabulary
from txl_jax.data.tokens.word_vocabulary import UNKNOWN_WORD, WordVocabulary
from txl_jax.errors import MissingPackageError, UserError

KINDS: tuple[type[Vocabulary], ...] = (
    ByteVocabulary,
    CharacterVocabulary,
    WordVocabulary,
    SubwordVocabulary,
    IdVocabulary,
)


def make_vocabulary(config: DataConfig, text: Text) -> Vocabulary:
    """Builds the vocabulary of a text, or reads a given one.

    Raises:
      UserError: the training text, or a file that the config names, cannot be read or used.
    """
    match config.tokenizer.kind:
        case Tokenizer.BYTE:
            return _bytes_of(config, text)
        case Tokenizer.CHAR:
            counts = _count(with_bar("counting", text.splits["train"]), config, split=iter)
            ranked = rank(counts, min_count=config.tokenizer.min_count, unknown=UNKNOWN_CHARACTER)
            return CharacterVocabulary("".join(ranked), config.tokenizer.lower_case)
        case Tokenizer.WORD:
            return _words_of(config, text)
        case Tokenizer.SUBWORD if config.tokenizer.hf_file:
            return given_tokenizer(config.tokenizer.hf_file)
        case Tokenizer.SUBWORD:
            size = config.tokenizer.vocab_size or DEFAULT_SUBWORDS
            return subwords.train(with_bar("counting", text.splits["train"]), size=size)
    raise AssertionError(f"no vocabulary for {config.tokenizer.kind}")


def read_named(path: str, *, flag: str) -> bytes:
    """Returns the content of a file that the user named; raises `UserError` if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{flag} names {path}, which cannot be read ({error.strerror}); check the path") from error


def _bytes_of(config: DataConfig, text: Text) -> ByteVocabulary:
    """Returns all 256 values, or, for a whole published corpus, those of all splits, as the original counts."""
    if not text.closed_alphabet:
        return ByteVocabulary.all_bytes(config.tokenizer.newlines)
    found: set[int] = set()
    for split in SPLITS:
        for file in with_bar(f"counting {split}", text.splits[split]):
            for block in file.blocks():
                found.update(distinct(block))
    return ByteVocabulary.of(bytes(found), config.tokenizer.newlines)


def _words_of(config: DataConfig, text: Text) -> WordVocabulary:
    mark = [MARKS[config.tokenizer.line_mark]] if config.tokenizer.line_mark in MARKS else []
    if config.tokenizer.vocab_file:
        words, unknown = _given_words(config.tokenizer.vocab_file, mark)
    else:
        counts = _count(with_bar("counting", text.splits["train"]), config, split=str.split)
        unknown = UNKNOWN_WORD
        words = rank(counts, min_count=config.tokenizer.min_count, unknown=unknown, first=mark)
    return WordVocabulary(tuple(words), config.tokenizer.line_mark, config.tokenizer.lower_case, unknown)


def _given_words(path: str, mark: list[str]) -> tuple[list[str], str]:
    """Reads the first word of each line, in order; adds the line mark before and <unk> after them if missing."""
    text = read_named(path, flag="--data.tokenizer.vocab_file")
    whole = File(path, len(text), functools.partial(iter, [text]))
    lines = "".join(text_blocks([whole], close_lines=True)).split("\n")
    words = list(dict.fromkeys(fields[0] for fields in map(str.split, lines) if fields))
    if not words:
        raise UserError(
            f"--data.tokenizer.vocab_file names {path}, which holds no words; give a file with a word on each line"
        )
    unknown = next((word for word in (UNKNOWN_WORD, UNKNOWN_WORD.upper()) if word in words), UNKNOWN_WORD)
    return [m for m in mark if m not in words] + words + [u for u in [unknown] if u not in words], unknown


def given_tokenizer(path: str) -> SubwordVocabulary:
    """Reads a tokenizer.json; raises `UserError` if the file is not one."""
    content = read_named(path, flag="--data.tokenizer.hf_file")
    try:
        return SubwordVocabulary(content.decode("utf-8"))
    except MissingPackageError:
        raise
    except ValueError as error:
        hint = (
            "for a SentencePiece model, give the tokenizer.json that transformers writes with save_pretrained()"
            if path.endswith(".model")
            else "give the tokenizer.json that its save() wrote"
        )
        raise UserError(
            f"--data.tokenizer.hf_file must be a tokenizer of the package tokenizers, got {path} ({error}); {hint}"
        ) from error


def _count(
    files: Iterable[File], config: DataConfig, *, split: Callable[[str], Iterable[str]]
) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for block in text_blocks(files, close_lines=False):
        counts.update(split(block.lower() if config.tokenizer.lower_case else block))
    return counts


def rank(counts: collections.Counter[str], *, min_count: int, unknown: str, first: Iterable[str] = ()) -> list[str]:
    """Ranks tokens: `first`, then by decreasing count, equal ones in the order in which they were counted.

    Tokens rarer than `min_count` count as `unknown`, which is always there.

    >>> rank(collections.Counter("abracadabra"), min_count=2, unknown="?")
    ['a', 'b', 'r', '?']
    """
    kept = collections.Counter({token: count for token, count in counts.items() if count >= min_count})
    kept[unknown] += sum(count for token, count in counts.items() if count < min_count)
    first = list(first)
    return first + [token for token, _ in kept.most_common() if token not in first]
