"""Words and characters: tokens that are ranked by frequency."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from txl_jax.config import LineMark
from txl_jax.data.text import File, text_blocks
from txl_jax.data.vocabulary import MARKS, Vocabulary, id_type
from txl_jax.errors import UserError
from txl_jax.metrics import Measure

UNKNOWN_WORD = "<unk>"
UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
# Number of Unicode's code points.
_CODE_POINTS = 0x110000


@dataclasses.dataclass(frozen=True)
class WordVocabulary(Vocabulary):
    """Words, separated by white space, by rank. The line mark, if any, comes first."""

    # Distinct words.
    words: tuple[str, ...] = dataclasses.field(repr=False)
    # How ends of lines are marked.
    line_mark: LineMark = LineMark.EOS
    # Whether texts are changed to lower case before they become tokens.
    lower_case: bool = False
    # The word in `words` that encodes all words that are not among them.
    unknown: str = UNKNOWN_WORD

    kind: ClassVar[str] = "word"
    per_byte: ClassVar[str] = "approximate_bits_per_byte"
    join: ClassVar[Any] = tuple

    def __post_init__(self) -> None:
        _check_distinct(self.words, self.unknown, self.kind)
        if self.line_mark in MARKS and MARKS[self.line_mark] not in self._ids:
            raise UserError(
                f"a vocabulary with line mark {self.line_mark} must contain {MARKS[self.line_mark]}"
            )

    @property
    def start(self) -> np.ndarray:
        """Returns the line mark, or the most frequent word if lines are not marked."""
        return np.array([self.mark or 0])

    @property
    def mark(self) -> int | None:
        """Returns the id that ends a line, or None if lines are not marked."""
        if self.line_mark not in MARKS:
            return None
        return self._ids[MARKS[self.line_mark]]

    @property
    def unknown_id(self) -> int:
        """Returns the id of words that the vocabulary lacks."""
        return self._ids[self.unknown]

    def names(self) -> list[bytes]:
        """Returns the name of each token."""
        return [word.encode() for word in self.words]

    @property
    def byte_lengths(self) -> np.ndarray:
        """Returns the bytes of each word [V] and of the one space or newline after it."""
        lengths = np.array([len(word.encode()) + 1 for word in self.words])
        # The newline is already counted for a line's last word.
        if self.mark is not None:
            lengths[self.mark] = 0
        return lengths

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, every line ended by its mark, if there are marks.

        <eos>:     w w <eos> w <eos>           each line and a mark
        one <S>:   <S> w w <S> w <S>           a mark before all, and each line and a mark
        two <S>:   <S> w w <S> <S> w <S>       a mark before and after each line
        """
        if self.line_mark in (LineMark.S, LineMark.DOUBLE_S):
            yield np.array([self.mark], id_type(self.size))

        # A block of ids is held back until another follows, because the last one may lose its last
        # mark.
        pending = np.empty(0, id_type(self.size))
        for block in text_blocks(files, close_lines=True):
            ids = self._encode(block)
            if ids.size:
                yield pending
                pending = ids
        # With two marks per line, the second opens the next line. The last one opens nothing.
        if self.line_mark is LineMark.DOUBLE_S:
            pending = pending[:-1]
        yield pending

    def _encode(self, text: str) -> np.ndarray:
        if self.lower_case:
            text = text.lower()
        if self.line_mark in MARKS:
            n_marks = 2 if self.line_mark is LineMark.DOUBLE_S else 1
            text = text.replace("\n", f" {MARKS[self.line_mark]} " * n_marks)
        words = text.split()
        unknown = itertools.repeat(self.unknown_id)
        return np.fromiter(map(self._ids.get, words, unknown), id_type(self.size), len(words))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        """Returns the id of each word."""
        return {word: token for token, word in enumerate(self.words)}

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        """Returns each word with a space after it, or a newline for a mark."""
        texts = [f"{word} ".encode() for word in self.words]
        if self.mark is not None:
            texts[self.mark] = b"\n"
        return texts


@dataclasses.dataclass(frozen=True)
class CharacterVocabulary(Vocabulary):
    """Unicode characters by rank.

    The replacement character encodes those not in the training split.
    """

    # Distinct characters.
    characters: str = dataclasses.field(repr=False)

    kind: ClassVar[str] = "char"
    measure: ClassVar[Measure] = Measure.BPC

    def __post_init__(self) -> None:
        _check_distinct(self.characters, UNKNOWN_CHARACTER, self.kind)

    @property
    def start(self) -> np.ndarray:
        """Returns the id of a newline if present, otherwise of a space or the first character."""
        for character in ("\n", " "):
            if character in self.characters:
                return self._encode(character)
        return self._encode(self.characters[0])

    @property
    def unknown_id(self) -> int:
        """Returns the id of tokens that the vocabulary lacks."""
        return self.characters.index(UNKNOWN_CHARACTER)

    def _encode(self, text: str) -> np.ndarray:
        # UTF-32 has the code point of each character in four bytes.
        return self._ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)]

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        return [character.encode() for character in self.characters]

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        """Returns the id of each of Unicode's code points."""
        ids = np.full(_CODE_POINTS, self.unknown_id, id_type(self.size))
        code_points = np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)
        ids[code_points] = np.arange(self.size)
        return ids


def _check_distinct(tokens: Sequence[str], unknown: str, kind: str) -> None:
    """Raises `UserError` unless tokens are distinct and include the unknown one.

    A saved vocabulary may come from a stranger. If two ids had the same token, only one could be
    encoded. Without the unknown token, no text could be encoded.
    """
    n_distinct = len(set(tokens))
    if n_distinct < len(tokens) or unknown not in tokens:
        raise UserError(
            f"the {len(tokens)} tokens of a {kind} vocabulary must be distinct and include "
            f"{unknown!r}, got {n_distinct} distinct tokens"
        )
