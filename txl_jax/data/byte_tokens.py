"""Byte tokens."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from txl_jax.config import LineMark, Newlines
from txl_jax.data.text import File
from txl_jax.data.vocabulary import check_ids
from txl_jax.errors import UserError
from txl_jax.metrics import Measure

# -- Decodes UTF-8 files, with errors that name the file and the offset.

_BYTE_ORDER_MARK = "\ufeff"  # Windows writes it before a file's first word.
_LONGEST_WORD = 1 << 16  # Bytes; longer ranges without white space are cut between characters.


def text_blocks(files: Iterable[File], *, close_lines: bool) -> Iterator[str]:
    """Yields the files' text in blocks that cut neither a character nor a word of usual length.

    Args:
      files: UTF-8.
      close_lines: a file whose last line has no newline gets one, so that its line ends with the file.

    Raises:
      UserError: a byte that is not UTF-8, or a zero byte: the file is no text. Names file and offset.
    """
    for file in files:
        rest, offset = b"", file.offset
        for block in file.blocks():
            block = rest + block
            cut = _last_border(block)
            yield _decode(block[:cut], file.name, offset)
            rest, offset = block[cut:], offset + cut
        last = _decode(rest, file.name, offset)
        # A text that ends in a newline leaves no remainder.
        yield last + "\n" if close_lines and last else last


def _last_border(block: bytes) -> int:
    """Returns where to cut: after the last newline, else white space, else, in a very long word, before a character."""
    # White space at the very end stays with the next block: a line without its newline leaves a remainder.
    for white, end in ((b"\n", None), (b" ", -1), (b"\t", -1), (b"\r", -1)):
        if (found := block.rfind(white, 0, end)) >= 0:
            return found + 1
    if len(block) < _LONGEST_WORD:
        return 0
    start = len(block) - 1
    while start > 0 and block[start] & 0xC0 == 0x80:  # Inside a character of several bytes.
        start -= 1
    return max(start, 0)


def _decode(block: bytes, name: str, offset: int) -> str:
    if (zero := block.find(b"\0")) >= 0:
        raise UserError(
            f"{name} holds a zero byte at offset {offset + zero}, so it is no text; give a text file, or read its "
            "bytes as they are with --data.tokenizer.kind=byte"
        )
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8: byte {block[error.start]:#04x} at offset {offset + error.start}; convert it (iconv "
            "-f LATIN1 -t UTF-8, for example), or read its bytes as they are with --data.tokenizer.kind=byte"
        ) from None
    return text.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else text


@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """The byte values that may occur in a text; a byte's token id is its rank among them.

    >>> vocabulary = ByteVocabulary.of(b"banana")
    >>> vocabulary.encode(b"nab").tolist()
    [2, 0, 1]
    """

    symbols: bytes  # Distinct byte values, increasing.
    newlines: Newlines = Newlines.KEEP  # Whether newline bytes are dropped before they become tokens.

    kind: ClassVar[str] = "byte"
    measure: ClassVar[Measure] = Measure.BPC
    line_mark: ClassVar[LineMark] = LineMark.NONE
    mark: ClassVar[int | None] = None
    unknown_id: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if not self.symbols or self.symbols != distinct(self.symbols):
            raise UserError(
                f"the symbols of a vocabulary are {list(self.symbols)}; they must be distinct, increasing and not empty"
            )

    @classmethod
    def all_bytes(cls, newlines: Newlines = Newlines.KEEP) -> "ByteVocabulary":
        """Returns the vocabulary of all 256 values, where an id is the byte itself."""
        return cls(bytes(range(256)), newlines)

    @classmethod
    def of(cls, text: bytes, newlines: Newlines = Newlines.KEEP) -> "ByteVocabulary":
        """Returns the vocabulary of the values that occur in `text`, without newlines if they are dropped."""
        return cls(distinct(text if newlines is Newlines.KEEP else text.replace(b"\n", b"")), newlines)

    @property
    def size(self) -> int:
        """Returns V, the number of tokens."""
        return len(self.symbols)

    @property
    def start(self) -> np.ndarray:
        """Returns a newline, else a space, else the first symbol."""
        kept = self.symbols if self.newlines is Newlines.KEEP else self.symbols.replace(b"\n", b"")
        return self.encode(next(symbol for symbol in (b"\n", b" ", kept[:1]) if symbol in kept))

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, in blocks.

        Raises:
          UserError: a byte that is not in the vocabulary; names file and offset.
        """
        for file in files:
            offset = file.offset
            for block in file.blocks():
                yield self._encode(block, f"{file.name}: ", offset)
                offset += len(block)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the token ids of a text, uint8 [at most len(text)], read-only.

        Raises:
          UserError: a byte that is not in the vocabulary.
        """
        return self._encode(text, "", 0)

    def decode(self, ids: Any) -> bytes:
        """Returns the text of integer token ids, in row-major order if they have several axes.

        Raises:
          UserError: an id below 0 or not below the size.
        """
        return np.frombuffer(self.symbols, np.uint8)[check_ids(ids, self.size)].tobytes()

    def names(self) -> list[bytes]:
        """Returns the name of each token."""
        return [bytes([symbol]) for symbol in self.symbols]

    def header(self) -> dict[str, Any]:
        """Returns the settings of the saved form."""
        return {"newlines": self.newlines.value}

    def lines(self) -> Iterator[str]:
        """Yields the tokens of the saved form."""
        return map(str, self.symbols)

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "ByteVocabulary":
        """Builds a vocabulary from its `header` and `lines`."""
        return cls(bytes(map(int, lines)), Newlines(header["newlines"]))

    def _encode(self, block: bytes, where: str, offset: int) -> np.ndarray:
        dropped = b"\n" if self.newlines is Newlines.DROP else b""
        foreign = block.translate(None, delete=self.symbols + dropped)
        if foreign:
            raise UserError(
                f"{where}byte {foreign[0]} at offset {offset + block.index(foreign[0])} is not among the {self.size} "
                "symbols of the vocabulary; remove it from the text, or use the vocabulary of a corpus that holds it"
            )
        return np.frombuffer(block.translate(self._ids, delete=dropped), np.uint8)

    @functools.cached_property
    def _ids(self) -> bytes:
        """Returns the id of each byte value."""
        ids = bytearray(256)
        for token, symbol in enumerate(self.symbols):
            ids[symbol] = token
        return bytes(ids)


def distinct(text: bytes) -> bytes:
    """Returns the byte values that occur, increasing."""
    # Each `in` stops at the first hit, and takes no memory.
    return bytes(value for value in range(256) if value in text)
