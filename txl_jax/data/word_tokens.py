"""Words, and characters: tokens that are ranked by how often they occur."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from txl_jax.config import LineMark
from txl_jax.config.config_tree import require
from txl_jax.data.text import File, text_blocks
from txl_jax.data.vocabulary import MARKS, Vocabulary, id_type
from txl_jax.errors import UserError
from txl_jax.metrics import Measure

UNKNOWN_WORD = "<unk>"
UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class WordVocabulary(Vocabulary):
    """Words, separated by white space, by rank. The line mark, if any, comes first."""

    words: tuple[str, ...] = dataclasses.field(repr=False)  # Distinct.
    line_mark: LineMark = LineMark.EOS
    lower_case: bool = False
    unknown: str = UNKNOWN_WORD  # One of `words`: encodes all words that are not.

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
        """Returns the line mark, or without one the most frequent word."""
        return np.array([self.mark or 0])

    @property
    def mark(self) -> int | None:
        """Returns the id that ends a line, or None if lines are not marked."""
        return self._ids[MARKS[self.line_mark]] if self.line_mark in MARKS else None

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
        if self.mark is not None:
            lengths[self.mark] = 0  # A line's last word has counted its newline.
        return lengths

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, every line ended by its mark.

        <eos>:     w w <eos> w <eos>           each line and a mark
        one <S>:   <S> w w <S> w <S>           a mark before all, and each line and a mark
        two <S>:   <S> w w <S> <S> w <S>       a mark before and after each line
        """
        if self.line_mark in (LineMark.S, LineMark.DOUBLE_S):
            yield np.array([self.mark], id_type(self.size))
        pending = np.empty(0, id_type(self.size))
        for block in text_blocks(files, close_lines=True):
            if (ids := self._encode(block)).size:
                yield pending
                pending = ids
        # Where a line's end opens the next line too, the last one opens nothing.
        yield pending[:-1] if self.line_mark is LineMark.DOUBLE_S else pending

    def _encode(self, text: str) -> np.ndarray:
        text = text.lower() if self.lower_case else text
        if self.line_mark in MARKS:
            text = text.replace(
                "\n",
                f" {MARKS[self.line_mark]} " * (2 if self.line_mark is LineMark.DOUBLE_S else 1),
            )
        words = text.split()
        unknown = itertools.repeat(self.unknown_id)
        return np.fromiter(map(self._ids.get, words, unknown), id_type(self.size), len(words))

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.words)}

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        """Returns each word with a space after it, or a newline for a mark."""
        mark = MARKS.get(self.line_mark)
        return [b"\n" if word == mark else f"{word} ".encode() for word in self.words]


@dataclasses.dataclass(frozen=True)
class CharacterVocabulary(Vocabulary):
    """Unicode characters by rank.

    The replacement character encodes those not in the training split.
    """

    characters: str = dataclasses.field(repr=False)  # Distinct.

    kind: ClassVar[str] = "char"
    measure: ClassVar[Measure] = Measure.BPC

    def __post_init__(self) -> None:
        _check_distinct(self.characters, UNKNOWN_CHARACTER, self.kind)

    @property
    def start(self) -> np.ndarray:
        """Returns a newline, else a space, else the first character."""
        return self._encode(
            next(c for c in ("\n", " ", self.characters[0]) if c in self.characters)
        )

    @property
    def unknown_id(self) -> int:
        """Returns the id of tokens that the vocabulary lacks."""
        return self.characters.index(UNKNOWN_CHARACTER)

    def _encode(self, text: str) -> np.ndarray:
        return self._ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)]

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        return list(map(str.encode, self.characters))

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        """Returns the id of each of Unicode's code points."""
        ids = np.full(0x110000, self.unknown_id, id_type(self.size))
        ids[np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)] = np.arange(self.size)
        return ids


def _check_distinct(tokens: Sequence[str], unknown: str, kind: str) -> None:
    distinct = len(set(tokens))
    wanted = (
        f"the {len(tokens)} tokens of a {kind} vocabulary must be distinct and include {unknown!r}"
    )
    require(
        distinct == len(tokens) and unknown in tokens, f"{wanted}, got {distinct} distinct tokens"
    )
