"""Text to token ids and back: bytes, characters, words. Pieces of words: `txl_jax.data.tokens.sentencepiece`.

Ids of characters and words are ranked by how often the training text holds them, as the adaptive softmax
needs it; what is equally frequent keeps the order of first occurrence, as in the original release.
A vocabulary is saved as text: a line that says what it is, and a line per token.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol

import numpy as np

from txl_jax.config import LineMark, Newlines
from txl_jax.data.sources.text import File
from txl_jax.data.tokens.utf8 import text_blocks
from txl_jax.metrics import Measure

UNKNOWN_WORD = "<unk>"
UNKNOWN_CHARACTER = "\N{REPLACEMENT CHARACTER}"
MARKS = {LineMark.EOS: "<eos>", LineMark.S: "<S>", LineMark.DOUBLE_S: "<S>"}
_TITLE = "txl_jax vocabulary"


class Vocabulary(Protocol):
    """What the ids of a text mean."""

    kind: ClassVar[str]  # What a token is; the first word of the saved form.
    measure: ClassVar[Measure]  # How a loss per token is usually told.

    @property
    def size(self) -> int:
        """V, the number of tokens."""

    @property
    def start(self) -> np.ndarray:
        """The ids [1] that an unprompted text is taken to follow."""

    @property
    def mark(self) -> int | None:
        """The id that ends a line; None if lines are not marked."""

    @property
    def unknown_id(self) -> int | None:
        """The id of what the vocabulary lacks; None if it refuses such a text."""

    def names(self) -> list[bytes]:
        """What each token is called: its text, but a word without the space after it, and a mark by its own word."""

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """The ids of a split, in blocks of one axis."""

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a text that may go on: its end is not marked."""

    def decode(self, ids: Any) -> bytes:
        """The text of ids of any shape, in row-major order; texts of successive ids may be joined."""

    def header(self) -> dict[str, Any]:
        """The settings of the saved form."""

    def lines(self) -> Iterator[str]:
        """The tokens of the saved form; none holds a newline."""


def id_type(size: int) -> np.dtype:
    """The smallest type that holds ids below `size`."""
    return np.dtype(np.uint8 if size <= 1 << 8 else np.uint16 if size <= 1 << 16 else np.int32)


@dataclasses.dataclass(frozen=True)
class ByteVocabulary:
    """The byte values that a text may hold; a byte's token id is its rank among them.

    >>> vocabulary = ByteVocabulary.of(b"banana")
    >>> vocabulary.encode(b"nab").tolist()
    [2, 0, 1]
    """

    symbols: bytes  # Distinct byte values, increasing.
    newlines: Newlines = Newlines.KEEP  # Whether newline bytes are dropped before they become tokens.

    kind: ClassVar[str] = "byte"
    measure: ClassVar[Measure] = Measure.BPC
    mark: ClassVar[int | None] = None
    unknown_id: ClassVar[int | None] = None

    def __post_init__(self):
        if not self.symbols or self.symbols != distinct(self.symbols):
            raise ValueError(
                f"the symbols of a vocabulary are {list(self.symbols)}; they must be distinct, increasing and not empty"
            )

    @classmethod
    def all_bytes(cls, newlines: Newlines = Newlines.KEEP) -> "ByteVocabulary":
        """The vocabulary of all 256 values, where an id is the byte itself."""
        return cls(bytes(range(256)), newlines)

    @classmethod
    def of(cls, text: bytes, newlines: Newlines = Newlines.KEEP) -> "ByteVocabulary":
        """The vocabulary of exactly the values that `text` holds, without newlines if they are dropped."""
        return cls(distinct(text if newlines is Newlines.KEEP else text.replace(b"\n", b"")), newlines)

    @property
    def size(self) -> int:
        return len(self.symbols)

    @property
    def start(self) -> np.ndarray:
        """A newline, else a space, else the first symbol."""
        kept = self.symbols if self.newlines is Newlines.KEEP else self.symbols.replace(b"\n", b"")
        return self.encode(next(symbol for symbol in (b"\n", b" ", kept[:1]) if symbol in kept))

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """The ids of a split, in blocks.

        Raises:
          ValueError: a byte that is not in the vocabulary; names file and offset.
        """
        for file in files:
            offset = file.offset
            for block in file.blocks():
                yield self._encode(block, f"{file.name}: ", offset)
                offset += len(block)

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of a text, uint8 [at most len(text)], read-only.

        Raises:
          ValueError: a byte that is not in the vocabulary.
        """
        return self._encode(text, "", 0)

    def decode(self, ids: Any) -> bytes:
        """The text of integer token ids, in row-major order if they have several axes.

        Raises:
          ValueError: an id below 0 or not below the size.
        """
        return np.frombuffer(self.symbols, np.uint8)[checked(ids, self.size)].tobytes()

    def names(self) -> list[bytes]:
        return [bytes([symbol]) for symbol in self.symbols]

    def header(self) -> dict[str, Any]:
        return {"newlines": self.newlines.value}

    def lines(self) -> Iterator[str]:
        return map(str, self.symbols)

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "ByteVocabulary":
        return cls(bytes(map(int, lines)), Newlines(header["newlines"]))

    def _encode(self, block: bytes, where: str, offset: int) -> np.ndarray:
        dropped = b"\n" if self.newlines is Newlines.DROP else b""
        foreign = block.translate(None, delete=self.symbols + dropped)
        if foreign:
            raise ValueError(
                f"{where}byte {foreign[0]} at offset {offset + block.index(foreign[0])} is not among the {self.size} "
                "symbols of the vocabulary; remove it from the text, or use the vocabulary of a corpus that holds it"
            )
        return np.frombuffer(block.translate(self._ids, delete=dropped), np.uint8)

    @functools.cached_property
    def _ids(self) -> bytes:
        """The id of each byte value."""
        ids = bytearray(256)
        for token, symbol in enumerate(self.symbols):
            ids[symbol] = token
        return bytes(ids)


@dataclasses.dataclass(frozen=True)
class CharacterVocabulary:
    """Unicode characters by rank; the replacement character stands for those that the training text lacks."""

    characters: str = dataclasses.field(repr=False)  # Distinct.
    lower_case: bool = False

    kind: ClassVar[str] = "char"
    measure: ClassVar[Measure] = Measure.BPC
    mark: ClassVar[int | None] = None

    def __post_init__(self):
        _check_distinct(self.characters, UNKNOWN_CHARACTER, self.kind)

    @property
    def size(self) -> int:
        return len(self.characters)

    @property
    def start(self) -> np.ndarray:
        """A newline, else a space, else the first character."""
        return self._encode(next(c for c in ("\n", " ", self.characters[0]) if c in self.characters))

    @property
    def unknown_id(self) -> int:
        return self.characters.index(UNKNOWN_CHARACTER)

    def names(self) -> list[bytes]:
        return [character.encode() for character in self.characters]

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        for block in text_blocks(files, close_lines=False):
            yield self._encode(block)

    def encode(self, text: bytes) -> np.ndarray:
        return self._encode(prompt_text(text))

    def decode(self, ids: Any) -> bytes:
        return "".join(map(self.characters.__getitem__, checked(ids, self.size).tolist())).encode()

    def header(self) -> dict[str, Any]:
        return {"lower_case": self.lower_case}

    def lines(self) -> Iterator[str]:
        return map(escape, self.characters)

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "CharacterVocabulary":
        return cls("".join(map(unescape, lines)), header["lower_case"])

    def _encode(self, text: str) -> np.ndarray:
        text = text.lower() if self.lower_case else text
        return self._ids[np.frombuffer(text.encode("utf-32-le"), np.uint32)]

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        """The id of each of Unicode's code points."""
        ids = np.full(0x110000, self.unknown_id, id_type(self.size))
        ids[np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)] = np.arange(self.size)
        return ids


@dataclasses.dataclass(frozen=True)
class WordVocabulary:
    """Words, as white space separates them, by rank; the line mark, if there is one, comes first."""

    words: tuple[str, ...] = dataclasses.field(repr=False)  # Distinct.
    line_mark: LineMark = LineMark.EOS
    lower_case: bool = False
    unknown: str = UNKNOWN_WORD  # One of `words`: stands for those that are not.

    kind: ClassVar[str] = "word"
    measure: ClassVar[Measure] = Measure.PPL

    def __post_init__(self):
        _check_distinct(self.words, self.unknown, self.kind)
        if self.line_mark in MARKS and MARKS[self.line_mark] not in self._ids:
            raise ValueError(f"a vocabulary with line mark {self.line_mark} lacks the word {MARKS[self.line_mark]}")

    @property
    def size(self) -> int:
        return len(self.words)

    @property
    def start(self) -> np.ndarray:
        """The line mark, or without one the likeliest word."""
        return np.array([self.mark or 0])

    @property
    def mark(self) -> int | None:
        return self._ids[MARKS[self.line_mark]] if self.line_mark in MARKS else None

    @property
    def unknown_id(self) -> int:
        return self._ids[self.unknown]

    def names(self) -> list[bytes]:
        return [word.encode() for word in self.words]

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """The ids of a split, every line ended by its mark.

        <eos>:     w w <eos> w <eos>           each line and a mark
        one <S>:   <S> w w <S> w <S>           a mark before all, and each line and a mark
        two <S>:   <S> w w <S> <S> w <S>       a mark before and after each line
        """
        blocks = (self._encode(block) for block in text_blocks(files, close_lines=True))
        if self.line_mark in (LineMark.S, LineMark.DOUBLE_S):
            yield np.array([self.mark], self._type)
        # Where a line's end opens the next line too, the last one opens nothing.
        yield from (_without_last(blocks) if self.line_mark is LineMark.DOUBLE_S else blocks)

    def encode(self, text: bytes) -> np.ndarray:
        return self._encode(prompt_text(text))

    def decode(self, ids: Any) -> bytes:
        """Each word and a space; a newline for a mark."""
        texts = [self._texts[token] for token in checked(ids, self.size).tolist()]
        return "".join(texts).encode()

    def header(self) -> dict[str, Any]:
        return {"line_mark": self.line_mark.value, "lower_case": self.lower_case, "unknown": self.unknown}

    def lines(self) -> Iterator[str]:
        return map(escape, self.words)

    @classmethod
    def load(cls, header: dict[str, Any], lines: list[str]) -> "WordVocabulary":
        words = tuple(map(unescape, lines))
        return cls(words, LineMark(header["line_mark"]), header["lower_case"], header["unknown"])

    def _encode(self, text: str) -> np.ndarray:
        text = text.lower() if self.lower_case else text
        if self.line_mark in MARKS:
            marks = " ".join([MARKS[self.line_mark]] * (2 if self.line_mark is LineMark.DOUBLE_S else 1))
            text = text.replace("\n", f" {marks} ")
        words = text.split()
        unknown = itertools.repeat(self.unknown_id)
        return np.fromiter(map(self._ids.get, words, unknown), self._type, len(words))

    @property
    def _type(self) -> np.dtype:
        return id_type(self.size)

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.words)}

    @functools.cached_property
    def _texts(self) -> list[str]:
        mark = MARKS.get(self.line_mark)
        return ["\n" if word == mark else word + " " for word in self.words]


def rank(counts: collections.Counter[str], *, min_count: int, unknown: str, first: Iterable[str] = ()) -> list[str]:
    """The tokens of a vocabulary: `first`, then by falling count, equals in the order in which they were counted.

    What is rarer than `min_count` is counted as `unknown`, which is always there.

    >>> rank(collections.Counter("abracadabra"), min_count=2, unknown="?")
    ['a', 'b', 'r', '?']
    """
    kept = collections.Counter({token: count for token, count in counts.items() if count >= min_count})
    kept[unknown] += sum(count for token, count in counts.items() if count < min_count)
    first = list(first)
    return first + [token for token, _ in kept.most_common() if token not in first]


def dumps(vocabulary: Vocabulary) -> str:
    """The saved form: a title with the settings, and a line per token."""
    return "\n".join([f"{_TITLE} {vocabulary.kind} {json.dumps(vocabulary.header())}", *vocabulary.lines()]) + "\n"


def loads(text: str, kinds: Iterable[type]) -> Any:
    """The inverse of `dumps` for a vocabulary of one of `kinds`.

    Raises:
      ValueError: `text` is no saved vocabulary.
    """
    title, *lines = text.removesuffix("\n").split("\n")
    try:
        if not title.startswith(_TITLE):
            raise ValueError("another title")
        kind, header = title.removeprefix(f"{_TITLE} ").split(" ", 1)
        loader: Callable = {cls.kind: cls.load for cls in kinds}[kind]
        return loader(json.loads(header), lines)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:  # Runtime: SentencePiece's own.
        raise ValueError(
            f"a saved vocabulary has a line '{_TITLE} KIND SETTINGS' and a line per token, but this one starts "
            f"{title[:60]!r} ({error})"
        ) from error


def digest(vocabulary: Vocabulary) -> str:
    """sha256 of the saved form, in hexadecimal."""
    return hashlib.sha256(dumps(vocabulary).encode()).hexdigest()


def _without_last(blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The blocks without their very last id."""
    held = None
    for block in blocks:
        if not len(block):
            continue
        if held is not None:
            yield held
        held = block
    if held is not None:
        yield held[:-1]


def prompt_text(text: bytes) -> str:
    """The characters of UTF-8 bytes; raises `ValueError` for others."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {text[error.start]:#04x} at offset {error.start} is not UTF-8") from None


def checked(ids: Any, size: int) -> np.ndarray:
    """Ids along one axis; raises if one lies outside the vocabulary."""
    ids = np.ravel(ids)
    foreign = ids[(ids < 0) | (ids >= size)]
    if foreign.size:
        raise ValueError(f"token id {foreign[0]} is outside the vocabulary; ids run from 0 to {size - 1}")
    return ids.astype(np.intp)


def _check_distinct(tokens: Any, unknown: str, kind: str) -> None:
    if len(set(tokens)) != len(tokens) or unknown not in tokens:
        raise ValueError(
            f"the {len(tokens)} tokens of a {kind} vocabulary must be distinct and hold {unknown!r}; "
            f"{len(set(tokens))} are distinct"
        )


_ESCAPES = {"\\": "\\\\", "\n": "\\n", "\r": "\\r"}


def escape(token: str) -> str:
    """A token on one line of a file."""
    return token.translate(str.maketrans(_ESCAPES))


def unescape(line: str) -> str:
    """The inverse of `escape`."""
    parts = line.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)


def distinct(text: bytes) -> bytes:
    """The byte values that occur, increasing."""
    # Each `in` stops at the first hit, and takes no memory.
    return bytes(value for value in range(256) if value in text)
