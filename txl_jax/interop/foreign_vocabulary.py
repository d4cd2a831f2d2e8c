"""Vocabularies of other implementations.

They are pickles from Hugging Face and from the authors' releases, and lists of words.

An id is a token's place in their list `idx2sym`, and stays the same here. The releases write the
bytes of enwik8 as decimal numbers, and text8 as letters with "_" for a space, by decreasing count:
these become a `ByteVocabulary`.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

from txl_jax.config import LineMark, Newlines
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.vocabulary import MARKS, TITLE, Vocabulary
from txl_jax.data.word_tokens import UNKNOWN_WORD, WordVocabulary
from txl_jax.errors import UserError, reading, rephrased
from txl_jax.interop import torch_files
from txl_jax.interop.pickles import Record
from txl_jax.interop.portable import read_vocabulary
from txl_jax.runtime import storage

# Files of vocabularies in order of preference: our own format has the line marks too.
NAMES = (
    *("vocabulary.txt", "vocab.pkl", "vocab.bin", "vocab.pt", "cache.pkl", "cache.pt"),
    *("vocab.txt", "1b_word_vocab.txt"),
)
_ADDED = "added_tokens.json"
_UNKNOWN = (UNKNOWN_WORD, UNKNOWN_WORD.upper())
_SPACE_OF_TEXT8 = "_"
# Half of a pair, which a pickle may contain and UTF-8 may not.
_SURROGATE = re.compile("[\ud800-\udfff]")


class Found(NamedTuple):
    """A vocabulary of another implementation."""

    vocabulary: Vocabulary | None  # None if absent.
    notes: list[str]  # For people.


def find(folder: Path, vocab_size: int) -> Found:
    """Reads a directory's vocabulary, if present.

    The vocabulary is a pickle, a PyTorch file, or a text with one token per line.

    Raises `UserError` if the file is corrupted, would run code, or has no vocabulary of the model's
    size.
    """
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        return Found(None, [f"{folder} has no vocabulary ({', '.join(NAMES[:-1])})"])
    with reading(str(path)):
        found = (
            _of_text(path)
            if path.suffix == ".txt"
            else of_object(torch_files.read(path).root, name=str(path))
        )
    if found.vocabulary and found.vocabulary.size < vocab_size:
        found = _with_added(found, folder / _ADDED)
    return check_size(found, vocab_size, name=str(path))


def _with_added(found: Found, path: Path) -> Found:
    """Returns a vocabulary of words with the words of added_tokens.json.

    This is the file in which transformers keeps later words, by their ids.

    Raises `UserError` if the file is corrupted, or its ids do not continue the vocabulary's.
    """
    vocabulary = found.vocabulary
    if not (isinstance(vocabulary, WordVocabulary) and path.is_file()):
        return found
    damaged = (
        f"{path} must contain ids by token, from {vocabulary.size} on (%s). "
        "Copy or download it again."
    )
    with rephrased(damaged, OSError, ValueError, TypeError, AttributeError):
        by_id = {number: token for token, number in storage.read_json(path).items()}
        # Tokens of the vocabulary may be listed again.
        new = {
            number: token
            for number, token in by_id.items()
            if vocabulary.words[number : number + 1] != (token,)
        }
        added = [new[number] for number in sorted(new)]
        if sorted(new) != list(range(vocabulary.size, vocabulary.size + len(new))):
            raise ValueError("its ids do not continue the vocabulary's")
        words = (*vocabulary.words, *added)
        if not _are_distinct_texts(list(words)):
            raise ValueError("its tokens must be distinct strings that the vocabulary lacks")
        vocabulary = dataclasses.replace(vocabulary, words=words)
    return Found(
        vocabulary,
        [*found.notes, f"{len(added)} tokens come from {path.name}: {', '.join(added)[:100]}"],
    )


def check_size(found: Found, vocab_size: int, *, name: str) -> Found:
    """Returns a file's vocabulary after checking its size.

    Raises `UserError` if the model has another number of tokens.
    """
    if found.vocabulary and found.vocabulary.size != vocab_size:
        wrong = f"{name} has {found.vocabulary.size} tokens, but the model has {vocab_size}"
        raise UserError(
            f"{wrong}. Pass the vocabulary that it was trained with, and {_ADDED} if tokens were "
            "added to it."
        )
    return found


def of_object(root: Any, *, name: str) -> Found:
    """Returns the vocabulary in a pickled Vocab, Corpus or tokenizer.

    Raises `UserError` if it has no vocabulary.
    """
    dataset = None
    for _ in range(3):
        parts = root.attributes() if isinstance(root, Record) else root
        if not isinstance(parts, dict):
            break
        if isinstance(symbols := parts.get("idx2sym"), list):
            return of_symbols(
                symbols, lower_case=parts.get("lower_case") is True, dataset=dataset, name=name
            )
        dataset = parts.get("dataset")
        root = parts.get("vocab")
    raise UserError(
        f"{name} has no list idx2sym of tokens. Pass the vocabulary of the model's tokenizer."
    )


def of_symbols(
    symbols: list[Any], *, name: str, lower_case: bool = False, dataset: Any = None
) -> Found:
    """Returns the vocabulary of a list of tokens.

    `dataset` is the release's name of the corpus, if known.
    """
    if not _are_distinct_texts(symbols):
        raise UserError(
            f"{name} has {len(symbols)} tokens, but they must be distinct strings. "
            "Download it again."
        )
    if (values := _bytes_of(symbols)) is not None:
        newlines = Newlines.KEEP if 10 in values or dataset == "text8" else Newlines.DROP
        return Found(ByteVocabulary(values, newlines), [])
    mark = next(
        (mark for mark in (LineMark.EOS, LineMark.DOUBLE_S) if MARKS[mark] in symbols),
        LineMark.NONE,
    )
    unknown = next((symbol for symbol in _UNKNOWN if symbol in symbols), None)
    if unknown is None:
        return Found(
            None,
            [f"{name} has no token for unknown words ({' or '.join(_UNKNOWN)}), so it is omitted"],
        )
    vocabulary = WordVocabulary(tuple(symbols), mark, lower_case, unknown)
    case = " and put in lower case" if lower_case else ""
    marks = f"lines end with {MARKS[mark]}" if mark in MARKS else "lines are not marked"
    notes = [
        f"text is split only at white space{case}: tokenize it like the model's training corpus",
        f"words that are not in the vocabulary become {unknown}, and {marks}",
    ]
    return Found(vocabulary, notes)


def _are_distinct_texts(symbols: list[Any]) -> bool:
    """Returns whether symbols are a non-empty list of distinct texts.

    The time this takes is bounded by the file's size.
    """
    # A pickle can repeat one long text for two bytes. The same object twice is found without
    # looking into it.
    if not symbols or len({id(symbol) for symbol in symbols}) != len(symbols):
        return False
    if not all(isinstance(symbol, str) for symbol in symbols):
        return False
    return len(set(symbols)) == len(symbols) and not any(
        _SURROGATE.search(symbol) for symbol in symbols
    )


def _bytes_of(symbols: list[str]) -> bytes | None:
    """Returns each token's byte, or None if the tokens are not bytes."""
    if {*symbols} <= {*map(str, range(256))}:
        return bytes(map(int, symbols))
    if all(len(symbol) == 1 and symbol.isascii() for symbol in symbols) and " " not in symbols:
        return "".join(symbols).replace(_SPACE_OF_TEXT8, " ").encode()
    return None


def _of_text(path: Path) -> Found:
    """Returns a text file's vocabulary: our own format, or the first word of each line."""
    foreign = f"{path} is not UTF-8 (%s). Pass a list of words in UTF-8."
    with (
        rephrased(f"{path} cannot be read (%s). Check the path.", OSError),
        rephrased(foreign, UnicodeDecodeError),
    ):
        # Without the byte-order mark that some editors write.
        decoded = storage.read(path).decode("utf-8-sig")
    if decoded.startswith(TITLE):
        return Found(read_vocabulary(path), [])
    fields = [line.split() for line in decoded.split("\n")]
    return of_symbols([words[0] for words in fields if words], name=str(path))
