"""Bytes to token ids and back: the vocabulary of every character-level corpus."""

import dataclasses
import json

import numpy as np


@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """The byte values that a text may hold; a byte's token id is its rank among them.

    >>> vocabulary = ByteVocabulary.of(b"banana")
    >>> vocabulary.encode(b"nab").tolist()
    [2, 0, 1]
    """

    symbols: bytes  # Distinct byte values, increasing.

    def __post_init__(self):
        if not self.symbols or self.symbols != _distinct(self.symbols):
            raise ValueError(
                f"the symbols of a vocabulary are {list(self.symbols)}; they must be distinct, increasing and not empty"
            )

    @classmethod
    def all_bytes(cls) -> "ByteVocabulary":
        """The vocabulary of all 256 values, where an id is the byte itself."""
        return cls(bytes(range(256)))

    @classmethod
    def of(cls, text: bytes) -> "ByteVocabulary":
        """The vocabulary of exactly the values that `text` holds."""
        return cls(_distinct(text))

    @classmethod
    def from_json(cls, text: str) -> "ByteVocabulary":
        """The inverse of `to_json`; raises `ValueError` if `text` is no list of byte values."""
        try:
            return cls(bytes(json.loads(text)))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a saved vocabulary is an increasing JSON list of byte values, but this one starts {text[:40]!r} "
                f"({error}); delete the file to have it written anew"
            ) from error

    def to_json(self) -> str:
        """The byte values as a JSON list."""
        return json.dumps(list(self.symbols))

    @property
    def size(self) -> int:
        """V, the number of tokens."""
        return len(self.symbols)

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of a text, uint8 [len(text)], read-only.

        Raises:
          ValueError: a byte that is not in the vocabulary.
        """
        foreign = text.translate(None, delete=self.symbols)
        if foreign:
            raise ValueError(
                f"byte {foreign[0]} at offset {text.index(foreign[0])} is not among the {self.size} symbols of the "
                "vocabulary; remove it from the text, or use the vocabulary of a corpus that holds it"
            )
        ids = bytearray(256)
        for token, symbol in enumerate(self.symbols):
            ids[symbol] = token
        return np.frombuffer(text.translate(ids), np.uint8)

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of integer token ids, in row-major order if they have several axes.

        Raises:
          ValueError: an id below 0 or not below the size.
        """
        ids = np.ravel(ids)
        foreign = ids[(ids < 0) | (ids >= self.size)]
        if foreign.size:
            raise ValueError(f"token id {foreign[0]} is outside the vocabulary; ids run from 0 to {self.size - 1}")
        return np.frombuffer(self.symbols, np.uint8)[ids.astype(np.intp)].tobytes()


def _distinct(text: bytes) -> bytes:
    # Each `in` stops at the first hit, and takes no memory: half a second for the 100 MB of enwik8.
    return bytes(value for value in range(256) if value in text)
