"""Character tokens."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from txl_jax.config import LineMark
from txl_jax.data.sources.text import File
from txl_jax.data.tokens.utf8 import text_blocks
from txl_jax.data.tokens.vocabulary import check_distinct, check_ids, escape, id_type, prompt_text, unescape
from txl_jax.metrics import Measure

UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class CharacterVocabulary:
    """Unicode characters by rank; the replacement character encodes those that the training text lacks."""

    characters: str = dataclasses.field(repr=False)  # Distinct.
    lower_case: bool = False

    kind: ClassVar[str] = "char"
    measure: ClassVar[Measure] = Measure.BPC
    line_mark: ClassVar[LineMark] = LineMark.NONE
    mark: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        check_distinct(self.characters, UNKNOWN_CHARACTER, self.kind)

    @property
    def size(self) -> int:
        """Returns V, the number of tokens."""
        return len(self.characters)

    @property
    def start(self) -> np.ndarray:
        """Returns a newline, else a space, else the first character."""
        return self._encode(next(c for c in ("\n", " ", self.characters[0]) if c in self.characters))

    @property
    def unknown_id(self) -> int:
        """Returns the id of tokens that the vocabulary lacks."""
        return self.characters.index(UNKNOWN_CHARACTER)

    def names(self) -> list[bytes]:
        """Returns the name of each token."""
        return [character.encode() for character in self.characters]

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, in blocks of one axis."""
        for block in text_blocks(files, close_lines=False):
            yield self._encode(block)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids of a text that may go on."""
        return self._encode(prompt_text(text))

    def decode(self, ids: Any) -> bytes:
        """Returns the text of ids of any shape, in row-major order."""
        return "".join(map(self.characters.__getitem__, check_ids(ids, self.size).tolist())).encode()

    def header(self) -> dict[str, Any]:
        """Returns the settings of the saved form."""
        return {"lower_case": self.lower_case}

    def lines(self) -> Iterator[str]:
        """Yields the tokens of the saved form."""
        return map(escape, self.characters)

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "CharacterVocabulary":
        """Builds a vocabulary from its `header` and `lines`."""
        return cls("".join(map(unescape, lines)), header["lower_case"])

    def _encode(self, text: str) -> np.ndarray:
        text = text.lower() if self.lower_case else text
        return self._ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)]

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        """Returns the id of each of Unicode's code points."""
        ids = np.full(0x110000, self.unknown_id, id_type(self.size))
        ids[np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)] = np.arange(self.size)
        return ids
