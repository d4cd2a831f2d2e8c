"""Vocabularies of other implementations: pickles of Hugging Face and of the authors' releases, and lists of words.

An id is a token's place in their list `idx2sym`. Words become a `WordVocabulary` with their ids. The releases write
the bytes of enwik8 as decimal numbers, and text8 as letters with "_" for a space, by decreasing count: these become a
`ByteVocabulary`, whose ids increase with the byte, so that rows of the embedding take another order (`Found.order`).
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from txl_jax.config import LineMark, Newlines
from txl_jax.data import vocabulary as vocabulary_lib
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.data.corpus import KINDS
from txl_jax.data.vocabulary import MARKS, Vocabulary
from txl_jax.data.word_tokens import UNKNOWN_WORD, WordVocabulary
from txl_jax.errors import UserError
from txl_jax.interop import torch_files
from txl_jax.interop.pickles import Record

# Files of vocabularies in a folder, in the order in which they are tried: our own form holds the line marks too.
NAMES = (
    *("vocabulary.txt", "vocab.pkl", "vocab.bin", "vocab.pt", "cache.pkl", "cache.pt"),
    *("vocab.txt", "1b_word_vocab.txt"),
)
_UNKNOWN = (UNKNOWN_WORD, UNKNOWN_WORD.upper())
_SPACE_OF_TEXT8 = "_"


class Found(NamedTuple):
    """A vocabulary.

    Attributes:
      vocabulary: None: there is none.
      order: for each id of `vocabulary`, the id that the files have; None: the same.
      notes: lines for people.
    """

    vocabulary: Vocabulary | None
    order: np.ndarray | None
    notes: list[str]


def find(folder: Path, vocab_size: int) -> Found:
    """Reads the vocabulary of a folder, if there is one; the arguments and errors are those of `read`."""
    path = next((folder / name for name in NAMES if (folder / name).is_file()), None)
    if path is None:
        return Found(None, None, [f"{folder} holds no vocabulary ({', '.join(NAMES[:-1])})"])
    return read(path, vocab_size)


def read(path: Path, vocab_size: int) -> Found:
    """Reads the vocabulary of a file.

    Args:
      path: a pickle, a file of PyTorch, or a text with a token on each line.
      vocab_size: V of the model.

    Raises:
      UserError: the file is damaged or would run something, holds no vocabulary, or one of another size.
    """
    found = _of_text(path) if path.suffix == ".txt" else of_object(torch_files.read(path).root, name=str(path))
    return check_size(found, vocab_size, name=str(path))


def check_size(found: Found, vocab_size: int, *, name: str) -> Found:
    """Returns the vocabulary of a file; raises `UserError` if the model has another number of tokens."""
    if found.vocabulary and found.vocabulary.size != vocab_size:
        raise UserError(
            f"{name} holds {found.vocabulary.size} tokens and the model has {vocab_size}; give the vocabulary that it "
            "was trained with"
        )
    return found


def of_object(root: Any, *, name: str) -> Found:
    """Returns the vocabulary of a pickled object: a Vocab, a Corpus that holds one, or a tokenizer's attributes.

    Raises:
      UserError: there is none.
    """
    dataset = None
    for _ in range(3):
        parts = root.attributes() if isinstance(root, Record) else root
        if not isinstance(parts, dict):
            break
        if isinstance(symbols := parts.get("idx2sym"), list):
            lower_case = parts.get("lower_case") is True
            return of_symbols(symbols, lower_case=lower_case, dataset=dataset, name=name)
        dataset = parts.get("dataset")
        root = parts.get("vocab")
    raise UserError(f"{name} holds no list idx2sym of tokens; give the vocabulary of the model's tokenizer")


def of_symbols(symbols: list[Any], *, lower_case: bool, dataset: Any = None, name: str) -> Found:
    """Returns the vocabulary of a list of tokens.

    Args:
      symbols: the tokens, by id.
      lower_case: whether texts are turned to lower case first.
      dataset: the release's name of the corpus, if it is known.
      name: of the file, for errors.

    Raises:
      UserError: tokens are no texts, or not distinct.
    """
    if not symbols or not all(isinstance(symbol, str) for symbol in symbols) or len(set(symbols)) != len(symbols):
        raise UserError(f"{name} holds {len(symbols)} tokens, expected distinct texts; download it again")
    if (values := _bytes_of(symbols)) is not None:
        order = np.argsort(values)
        newlines = Newlines.KEEP if 10 in values or dataset == "text8" else Newlines.DROP
        return Found(ByteVocabulary(bytes(sorted(values)), newlines), order, [])
    mark = next((mark for mark in (LineMark.EOS, LineMark.DOUBLE_S) if MARKS[mark] in symbols), LineMark.NONE)
    unknown = next((symbol for symbol in _UNKNOWN if symbol in symbols), None)
    if unknown is None:
        return Found(
            None, None, [f"{name} has no token for unknown words ({' or '.join(_UNKNOWN)}), so it is left out"]
        )
    vocabulary = WordVocabulary(tuple(symbols), mark, lower_case, unknown)
    marks = f"lines end with {MARKS[mark]}" if mark in MARKS else "lines are not marked"
    notes = [f"words are separated by white space, as in the tokenized corpus that the model was trained on; {marks}"]
    return Found(vocabulary, None, notes)


def _bytes_of(symbols: list[str]) -> list[int] | None:
    """Returns the byte of each token; None: they are no bytes."""
    if all(symbol.isdecimal() and symbol.isascii() and str(int(symbol)) == symbol for symbol in symbols):
        values = [int(symbol) for symbol in symbols]
        return values if max(values) < 256 else None
    if all(len(symbol) == 1 and symbol.isascii() for symbol in symbols) and " " not in symbols:
        return [ord(" " if symbol == _SPACE_OF_TEXT8 else symbol) for symbol in symbols]
    return None


def _of_text(path: Path) -> Found:
    """Returns the vocabulary of a text: our own form, or the first word of each line."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path") from error
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 at byte {error.start}; give a list of words in UTF-8") from error
    if text.startswith(vocabulary_lib.TITLE.encode()):
        return Found(vocabulary_lib.loads(decoded, KINDS), None, [])
    fields = [line.split() for line in decoded.split("\n")]
    return of_symbols([words[0] for words in fields if words], lower_case=False, name=str(path))
