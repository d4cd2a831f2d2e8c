"""Token ids as tokens, for ids or weights that came without a vocabulary: the text "5 17" has the ids 5 and 17."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from txl_jax.config import LineMark
from txl_jax.data.sources.text import File
from txl_jax.data.tokens.utf8 import text_blocks
from txl_jax.data.tokens.vocabulary import check_ids, id_type, prompt_text
from txl_jax.errors import UserError
from txl_jax.metrics import Measure


@dataclasses.dataclass(frozen=True)
class IdVocabulary:
    """Decimal numbers from 0 to V - 1, separated by white space.

    >>> IdVocabulary(20).encode(b"5 17").tolist()
    [5, 17]
    """

    size: int  # V.

    kind: ClassVar[str] = "id"
    measure: ClassVar[Measure] = Measure.PPL
    line_mark: ClassVar[LineMark] = LineMark.NONE
    mark: ClassVar[int | None] = None
    unknown_id: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if type(self.size) is not int or self.size < 1:
            raise UserError(f"a vocabulary of ids has size {self.size!r}; it must be a whole number from 1 on")

    @property
    def start(self) -> np.ndarray:
        """Returns the id 0."""
        return np.zeros(1, id_type(self.size))

    def names(self) -> list[bytes]:
        """Returns the number of each token."""
        return [str(token).encode() for token in range(self.size)]

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, in blocks."""
        for block in text_blocks(files, close_lines=True):
            yield self._encode(block)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids of a text; raises `UserError` for a word that is none."""
        return self._encode(prompt_text(text))

    def decode(self, ids: Any) -> bytes:
        """Returns each number and a space."""
        return "".join(f"{token} " for token in check_ids(ids, self.size).tolist()).encode()

    def header(self) -> dict[str, Any]:
        """Returns the settings of the saved form."""
        return {"size": self.size}

    def lines(self) -> Iterator[str]:
        """Yields nothing: the size is all."""
        yield from ()

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "IdVocabulary":
        """Builds a vocabulary from its `header`."""
        return cls(header["size"])

    def _encode(self, text: str) -> np.ndarray:
        words = text.split()
        foreign = next((word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 10)), None)
        if foreign is not None:
            raise UserError(
                f"{foreign[:40]!r} is no token id; this model has ids and no vocabulary, so that a text is ids from "
                f"0 to {self.size - 1} with spaces between them"
            )
        return check_ids(np.array(words, dtype=np.int64), self.size).astype(id_type(self.size))
