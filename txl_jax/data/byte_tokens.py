"""Byte tokens."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import numpy as np

from txl_jax.config import Newlines
from txl_jax.data.text import File
from txl_jax.data.vocabulary import Vocabulary
from txl_jax.errors import UserError
from txl_jax.metrics import Measure


@dataclasses.dataclass(frozen=True)
class ByteVocabulary(Vocabulary):
    """The byte values that may occur in a text. A byte's token id is its index among them.

    >>> vocabulary = ByteVocabulary.of(b"banana")
    >>> vocabulary.encode(b"nab").tolist()
    [2, 0, 1]
    """

    # Distinct byte values. They are in increasing order, except in vocabularies of other
    # implementations.
    symbols: bytes
    # Whether newline bytes are dropped before they become tokens.
    newlines: Newlines = Newlines.KEEP

    kind: ClassVar[str] = "byte"
    measure: ClassVar[Measure] = Measure.BPB
    join: ClassVar[Any] = staticmethod(lambda lines: bytes(map(int, lines)))

    def __post_init__(self) -> None:
        # In a stranger's vocabulary two ids may be the same byte. Only one could be encoded.
        if not self.symbols or len(set(self.symbols)) < len(self.symbols):
            raise UserError(
                "the symbols of a vocabulary must be distinct and not empty, got "
                f"{list(self.symbols)}"
            )

    @classmethod
    def all_bytes(cls, newlines: Newlines = Newlines.KEEP) -> Self:
        """Returns the vocabulary of all 256 values, where an id is the byte itself."""
        return cls(bytes(range(256)), newlines)

    @classmethod
    def of(cls, text: bytes, newlines: Newlines = Newlines.KEEP) -> Self:
        """Returns the vocabulary of the values that occur in `text`.

        Newlines are not included if they are dropped.
        """
        if newlines is Newlines.DROP:
            text = text.replace(b"\n", b"")
        return cls(distinct(text), newlines)

    @property
    def start(self) -> np.ndarray:
        """Returns the id of a newline if present, otherwise of a space or the first symbol."""
        symbols = self.symbols
        if self.newlines is Newlines.DROP:
            symbols = symbols.replace(b"\n", b"")
        for symbol in (b"\n", b" "):
            if symbol in symbols:
                return self.encode(symbol)
        return self.encode(symbols[:1])

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split.

        Raises:
          UserError: If a byte is not in the vocabulary. The error contains the file and the offset.
        """
        for file in files:
            offset = file.offset
            for block in file.blocks():
                yield self._encode_block(block, offset, prefix=f"{file.name}: ")
                offset += len(block)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids, uint8 [<= len(text)], read-only.

        Raises:
          UserError: If a byte is not in the vocabulary.
        """
        return self._encode_block(text, 0, prefix="")

    @functools.cached_property
    def _texts(self) -> list[bytes]:
        return [bytes([symbol]) for symbol in self.symbols]

    def lines(self) -> Iterator[str]:
        """Returns the byte values, as numbers."""
        return map(str, self.symbols)

    def _encode_block(self, block: bytes, offset: int, *, prefix: str) -> np.ndarray:
        """Returns the ids of a block at this offset of its file. An error begins with `prefix`."""
        dropped = b"\n" if self.newlines is Newlines.DROP else b""
        foreign = block.translate(None, delete=self.symbols + dropped)
        if foreign:
            raise UserError(
                f"{prefix}byte {foreign[0]} at offset {offset + block.index(foreign[0])} is not "
                f"one of the {self.size} symbols of the vocabulary. "
                "Remove it from the text, or use a vocabulary that contains it."
            )
        return np.frombuffer(block.translate(self._ids, delete=dropped), np.uint8)

    @functools.cached_property
    def _ids(self) -> bytes:
        """Returns the id of each of the 256 byte values, which is arbitrary for foreign values."""
        return bytes.maketrans(self.symbols, bytes(range(self.size)))


def distinct(text: bytes) -> bytes:
    """Returns the byte values that occur, increasing."""
    # Each `in` stops at the first hit, and does not allocate memory.
    return bytes(value for value in range(256) if value in text)
