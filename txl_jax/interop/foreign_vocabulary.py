"""Vocabularies of other implementations.

They are pickles from Hugging Face and from the authors' releases, and lists of words.

An id is a token's index in their list `idx2sym`, and is kept. The releases write the
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
    "vocabulary.txt",
    "vocab.pkl",
    "vocab.bin",
    "vocab.pt",
    "cache.pkl",
    "cache.pt",
    "vocab.txt",
    "1b_word_vocab.txt",
)
# Tokens that were added to a vocabulary of transformers.
_ADDED = "added_tokens.json"
# Tokens for unknown words, in order of preference.
_UNKNOWN = (UNKNOWN_WORD, UNKNOWN_WORD.upper())
# Tokens that end a line, in order of preference.
_LINE_MARKS = (LineMark.EOS, LineMark.DOUBLE_S)
# All tokens that the releases write for bytes of enwik8.
_DECIMAL_BYTES = frozenset(map(str, range(256)))
_SPACE_OF_TEXT8 = "_"
# Half of a pair, which a pickle may contain and UTF-8 may not.
_SURROGATE = re.compile("[\ud800-\udfff]")
# Pickled objects in objects that are searched for the list of tokens. A corpus has a vocabulary.
_MAX_DEPTH = 3
# Characters of the added tokens in a note.
_MAX_SHOWN = 100


class ForeignVocabulary(NamedTuple):
    """A vocabulary of another implementation."""

    vocabulary: Vocabulary | None  # None if it is missing.
    notes: list[str]  # Lines for the user about choices and omissions.


def find(folder: Path, vocab_size: int) -> ForeignVocabulary:
    """Reads a directory's vocabulary, if present.

    It is a pickle, a PyTorch file, or a text with one token per line.

    Args:
      folder: The directory.
      vocab_size: The model's number of tokens.

    Raises:
      UserError: If the file is corrupted, would run code, or does not contain a vocabulary of the
        model's size.
    """
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        return ForeignVocabulary(None, [f"{folder} has no vocabulary ({', '.join(NAMES[:-1])})"])
    with reading(str(path)):
        if path.suffix == ".txt":
            foreign = _of_text(path)
        else:
            foreign = of_object(torch_files.read(path).root, name=str(path))
    if foreign.vocabulary and foreign.vocabulary.size < vocab_size:
        foreign = _with_added(foreign, folder / _ADDED)
    return check_size(foreign, vocab_size, name=str(path))


def _with_added(foreign: ForeignVocabulary, path: Path) -> ForeignVocabulary:
    """Returns a vocabulary of words with the words of added_tokens.json.

    In this file, transformers stores ids by token for tokens that were added later.

    Raises:
      UserError: If the file is corrupted, or its ids do not continue the vocabulary's.
    """
    vocabulary = foreign.vocabulary
    if not (isinstance(vocabulary, WordVocabulary) and path.is_file()):
        return foreign
    damaged = (
        f"{path} must contain ids by token, from {vocabulary.size} on (%s). "
        "Copy or download it again."
    )
    with rephrased(damaged, OSError, ValueError, TypeError, AttributeError):
        by_id = {number: token for token, number in storage.read_json(path).items()}
        added: list[Any] = []
        for number in sorted(by_id):
            # Tokens of the vocabulary may be listed again.
            if vocabulary.words[number : number + 1] == (by_id[number],):
                continue
            # A gap, or an id that is taken, would give words the rows of other words.
            if number != vocabulary.size + len(added):
                raise ValueError("its ids do not continue the vocabulary's")
            added.append(by_id[number])
        words = (*vocabulary.words, *added)
        # A token that is there already would have two ids.
        if not _are_distinct_texts(list(words)):
            raise ValueError("its tokens must be distinct strings that are not in the vocabulary")
        vocabulary = dataclasses.replace(vocabulary, words=words)
    examples = ", ".join(added)[:_MAX_SHOWN]
    note = f"{len(added)} tokens come from {path.name}: {examples}"
    return ForeignVocabulary(vocabulary, [*foreign.notes, note])


def check_size(foreign: ForeignVocabulary, vocab_size: int, *, name: str) -> ForeignVocabulary:
    """Returns a file's vocabulary after checking its size.

    Raises:
      UserError: If the model has another number of tokens.
    """
    # Another model's vocabulary would give words that the model did not mean.
    if foreign.vocabulary and foreign.vocabulary.size != vocab_size:
        raise UserError(
            f"{name} must have {vocab_size} tokens, like the model, got {foreign.vocabulary.size}. "
            f"Pass the vocabulary that the model was trained with, and {_ADDED} if tokens were "
            "added to it."
        )
    return foreign


def of_object(root: Any, *, name: str) -> ForeignVocabulary:
    """Returns the vocabulary in a pickled Vocab, Corpus or tokenizer.

    Args:
      root: The pickle's value.
      name: Name of the file in errors.

    Raises:
      UserError: If it has no vocabulary.
    """
    dataset = None
    # An object may contain itself, so that the search must end.
    for _ in range(_MAX_DEPTH):
        if isinstance(root, Record):
            root = root.attributes()
        # The file determines its content.
        if not isinstance(root, dict):
            break
        symbols = root.get("idx2sym")
        if isinstance(symbols, list):
            return of_symbols(
                symbols, lower_case=root.get("lower_case") is True, dataset=dataset, name=name
            )
        # In a corpus, the vocabulary is next to the name of the data set.
        dataset = root.get("dataset")
        root = root.get("vocab")
    raise UserError(
        f"{name} has no list idx2sym of tokens. Pass the vocabulary of the model's tokenizer."
    )


def of_symbols(
    symbols: list[Any], *, name: str, lower_case: bool = False, dataset: Any = None
) -> ForeignVocabulary:
    """Returns the vocabulary of a list of tokens.

    Args:
      symbols: The tokens by id. They may be anything.
      name: Name of the file in errors.
      lower_case: Whether the tokenizer puts text in lower case.
      dataset: The release's name of the corpus, if known.

    Raises:
      UserError: If the tokens are not distinct texts.
    """
    # The list is a stranger's. A token twice would have two ids, so that encoding loses one.
    if not _are_distinct_texts(symbols):
        raise UserError(
            f"the {len(symbols)} tokens of {name} must be distinct strings. Download it again."
        )

    values = _bytes_of(symbols)
    if values is not None:
        newlines = Newlines.DROP
        if ord("\n") in values or dataset == "text8":
            newlines = Newlines.KEEP
        return ForeignVocabulary(ByteVocabulary(values, newlines), [])

    unknown = next((token for token in _UNKNOWN if token in symbols), None)
    if unknown is None:
        note = f"{name} has no token for unknown words ({' or '.join(_UNKNOWN)}), so it is omitted"
        return ForeignVocabulary(None, [note])
    mark = next((mark for mark in _LINE_MARKS if MARKS[mark] in symbols), LineMark.NONE)

    marks = "lines are not marked"
    if mark is not LineMark.NONE:
        marks = f"lines end with {MARKS[mark]}"
    case = " and put in lower case" if lower_case else ""
    notes = [
        f"text is split only at white space{case}: tokenize it like the model's training corpus",
        f"words that are not in the vocabulary become {unknown}, and {marks}",
    ]
    return ForeignVocabulary(WordVocabulary(tuple(symbols), mark, lower_case, unknown), notes)


def _are_distinct_texts(symbols: list[Any]) -> bool:
    """Returns whether symbols are a non-empty list of distinct texts.

    The time this takes is bounded by the file's size.
    """
    # A pickle can repeat one long text for two bytes. The same object twice is found without
    # looking into it.
    if not symbols or len(set(map(id, symbols))) != len(symbols):
        return False
    for symbol in symbols:
        # The list may have numbers or other lists in it.
        if not isinstance(symbol, str):
            return False
        # Such a text cannot be written as UTF-8.
        if _SURROGATE.search(symbol):
            return False
    return len(set(symbols)) == len(symbols)


def _bytes_of(symbols: list[str]) -> bytes | None:
    """Returns each token's byte, or None if the tokens are not bytes."""
    if _DECIMAL_BYTES.issuperset(symbols):
        return bytes(map(int, symbols))
    are_letters = all(len(symbol) == 1 and symbol.isascii() for symbol in symbols)
    # With a token for a space, "_" is a character like any other.
    if are_letters and " " not in symbols:
        return "".join(symbols).replace(_SPACE_OF_TEXT8, " ").encode()
    return None


def _of_text(path: Path) -> ForeignVocabulary:
    """Returns a text file's vocabulary: our own format, or the first word of each line."""
    # A list in another encoding would give other words, or bytes of a binary file.
    not_text = f"{path} is not UTF-8 (%s). Pass a list of words in UTF-8."
    unreadable = f"{path} cannot be read (%s). Check the path."
    with rephrased(unreadable, OSError), rephrased(not_text, UnicodeDecodeError):
        # Without the byte-order mark that some editors write.
        decoded = storage.read(path).decode("utf-8-sig")
    if decoded.startswith(TITLE):
        return ForeignVocabulary(read_vocabulary(path), [])
    symbols: list[Any] = []
    for line in decoded.split("\n"):
        words = line.split()
        if words:
            symbols.append(words[0])
    return of_symbols(symbols, name=str(path))
