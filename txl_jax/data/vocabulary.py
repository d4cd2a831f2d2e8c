"""Vocabularies: the interface of all kinds of tokens, their saved form, and their text in pieces.

Ids of characters and words are ranked by their counts in the training split, as the adaptive
softmax requires. Tokens with equal counts are ranked by first occurrence, as in the original
release.
"""

import codecs
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from txl_jax.config import LineMark, Newlines
from txl_jax.data.text import File, text_blocks
from txl_jax.errors import UserError, rephrased
from txl_jax.metrics import Measure

MARKS = {LineMark.EOS: "<eos>", LineMark.S: "<S>", LineMark.DOUBLE_S: "<S>"}
# The first words of a saved vocabulary.
TITLE = "txl_jax vocabulary"
# The end of a generated text, which is part of it: a token, or a string of more than one token.
Ending = int | bytes | None
# Number of ids that are counted at a time.
_IDS_PER_BLOCK = 1 << 20
# Largest fraction of unknown tokens with which a text's bytes are counted. The bytes of unknown
# tokens are not known.
MOST_UNKNOWN = 0.001
# Maximum number of characters of a text that an error shows.
_SHOWN_CHARACTERS = 60
# Settings of the saved form that are not plain JSON.
_ENUMS = {"newlines": Newlines, "line_mark": LineMark}


class Vocabulary(Protocol):
    """A map between text and token ids.

    Each kind of tokens is a dataclass. Its first field is the tokens, the others are settings.
    """

    # Kind of tokens, as in the saved form's title.
    kind: ClassVar[str]
    # Usual measure of a per-token loss.
    measure: ClassVar[Measure] = Measure.PPL
    # Name of a loss per byte of text in records.
    per_byte: ClassVar[str] = "bits_per_byte"
    # Makes the value of the first field from the saved tokens.
    join: ClassVar[Any] = "".join

    @property
    def _tokens(self) -> Sequence[Any]:
        """Returns the value of the first field."""
        return getattr(self, dataclasses.fields(self)[0].name)  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """Returns V, the number of tokens."""
        return len(self._tokens)

    @property
    def start(self) -> np.ndarray:
        """Returns the ids [1] that an unprompted text continues."""

    @property
    def line_mark(self) -> LineMark:
        """Returns the kind of mark at the end of a line."""
        return LineMark.NONE

    @property
    def mark(self) -> int | None:
        """Returns the id that ends a line, or None if lines are not marked."""
        return None

    @property
    def unknown_id(self) -> int | None:
        """Returns the id of tokens that the vocabulary lacks, or None if such text is an error."""
        return None

    def names(self) -> list[bytes]:
        """Returns the name of each token.

        A name is the token's text. A word's name omits the space after it, and a mark's name is its
        own word.
        """
        return [self.decode([token]) for token in range(self.size)]

    def blocks(self, files: Iterable[File]) -> Iterator[np.ndarray]:
        """Yields the ids of a split, in blocks.

        Raises:
          UserError: If a text cannot be encoded. The error has the file's name.
        """
        for block in text_blocks(files, close_lines=False):
            yield self._encode(block)

    def encode(self, text: bytes) -> np.ndarray:
        """Returns the ids of a text that may continue: its end is not marked.

        Raises:
          UserError: If the text cannot be encoded.
        """
        try:
            return self._encode(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(
                f"byte {text[error.start]:#04x} at offset {error.start} is not UTF-8"
            ) from None

    def _encode(self, text: str) -> np.ndarray:
        """Does the work of `encode`. A kind defines one of the two."""
        return self.encode(text.encode())

    def decode(self, ids: Any) -> bytes:
        """Returns the text of ids of any shape, in row-major order.

        Texts of successive ids may be concatenated. A kind defines this, or `_texts`.

        Raises:
          UserError: If an id is out of range.
        """
        texts = self._texts
        return b"".join(texts[token] for token in check_ids(ids, self.size).tolist())

    @property
    def _texts(self) -> Sequence[bytes]:
        """Returns the text of each token, or () if a kind defines `decode`."""
        return ()

    @property
    def byte_lengths(self) -> np.ndarray | None:
        """Returns the number of bytes of text per token [V], or None if the tokens have no text."""
        if not self._texts:
            return None
        return np.array(list(map(len, self._texts)))

    def count_bytes(self, ids: np.ndarray) -> int:
        """Returns the number of bytes of text that ids [T] stand for, or 0 if it is unknown.

        It is unknown if the tokens have no text, or if more than 0.1 % of the ids are unknown
        tokens.
        """
        lengths = self.byte_lengths
        if lengths is None:
            return 0
        counts = np.zeros(self.size, np.int64)
        for first in range(0, len(ids), _IDS_PER_BLOCK):
            counts += np.bincount(ids[first : first + _IDS_PER_BLOCK], minlength=self.size)
        if self.unknown_id is not None and counts[self.unknown_id] > MOST_UNKNOWN * len(ids):
            return 0
        return int(counts @ lengths)

    def count_unknown(self, *arrays: np.ndarray) -> int:
        """Returns the number of ids in arrays [T] that stand for unknown tokens.

        The arrays may be memory-mapped.
        """
        if self.unknown_id is None:
            return 0
        count = 0
        for ids in arrays:
            for first in range(0, len(ids), _IDS_PER_BLOCK):
                is_unknown = ids[first : first + _IDS_PER_BLOCK] == self.unknown_id
                count += int(np.count_nonzero(is_unknown))
        return count

    def header(self) -> dict[str, Any]:
        """Returns the settings of the saved form: the fields after the tokens."""
        fields = dataclasses.fields(self)[1:]  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields if field.init}

    def lines(self) -> Iterable[str]:
        """Returns the tokens of the saved form, without newlines."""
        return map(escape, self._tokens)

    @classmethod
    def load(cls, lines: list[str], **header: Any) -> Self:
        """Builds a vocabulary from its `lines` and its `header`."""
        return cls(cls.join(map(unescape, lines)), **header)  # type: ignore[call-arg]


def id_type(size: int) -> np.dtype:
    """Returns the smallest integer dtype for ids below `size`."""
    if size <= 1 << 8:
        return np.dtype(np.uint8)
    if size <= 1 << 16:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def dumps(vocabulary: Vocabulary) -> str:
    """Returns the saved form: a title with the settings, and a line per token."""
    title = f"{TITLE} {vocabulary.kind} {json.dumps(vocabulary.header())}"
    return "\n".join([title, *vocabulary.lines()]) + "\n"


def loads(text: str, kinds: Iterable[type[Vocabulary]]) -> Vocabulary:
    """Parses the saved form of a vocabulary of one of `kinds`.

    Raises:
      UserError: If `text` is not a saved vocabulary.
    """
    title, *lines = text.removesuffix("\n").split("\n")
    # The text may come from a stranger: an unknown kind or setting, or a byte that is not a number,
    # raises one of the errors below.
    with rephrased(
        f"a saved vocabulary must have a line '{TITLE} KIND SETTINGS' and a line per token, "
        f"got {title[:_SHOWN_CHARACTERS]!r} as the first line (%s)",
        KeyError,
        IndexError,
        TypeError,
        ValueError,
    ):
        if not title.startswith(TITLE):
            raise ValueError("another title")
        kind, settings = title.removeprefix(f"{TITLE} ").split(" ", 1)
        header = dict(json.loads(settings))
        for name, enum in _ENUMS.items():
            if name in header:
                header[name] = enum(header[name])
        class_of_kind = {cls.kind: cls for cls in kinds}
        return class_of_kind[kind].load(lines, **header)


def digest(vocabulary: Vocabulary) -> str:
    """Returns sha256 of the saved form, in hexadecimal."""
    return hashlib.sha256(dumps(vocabulary).encode()).hexdigest()


def check_ids(ids: Any, size: int) -> np.ndarray:
    """Returns ids of any shape along one axis, as numpy's dtype of indices.

    Raises:
      UserError: If an id is outside the vocabulary.
    """
    ids = np.ravel(ids)
    foreign = ids[(ids < 0) | (ids >= size)]
    if foreign.size:
        raise UserError(f"token ids must be between 0 and {size - 1}, got {foreign[0]}")
    return ids.astype(np.intp)


_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


def escape(token: str) -> str:
    """Escapes the newlines of a token, for one line of a file."""
    return token.translate(_ESCAPES)


def unescape(line: str) -> str:
    r"""Inverts `escape`. Users may also write \t for a tab."""
    # The backslash of an escaped backslash does not escape what follows it.
    parts = []
    for part in line.split("\\\\"):
        parts.append(part.replace("\\n", "\n").replace("\\r", "\r").replace("\\t", "\t"))
    return "\\".join(parts)


class TextStream:
    r"""The text of one sequence of tokens, piece by piece, up to the first stop string.

    A stop string is found in the text, independent of its tokens. The string that is complete first
    counts. Text that may be the beginning of a stop string is held back, and so are the bytes of an
    incomplete character.

    >>> stream = TextStream(bytes, ["\n\n", "end"])
    >>> [stream.add(piece) for piece in (b"one\n", b"two\ne", b"n", b"ough end.")]
    ['one', '\ntwo\n', '', 'enough ']
    >>> stream.ended
    True
    """

    def __init__(
        self,
        decode: Callable[[Any], bytes],
        stop: Sequence[str],
        ending: Ending = None,
        errors: str = "replace",
    ):
        """Begins an empty text.

        Args:
          decode: Returns the text of ids, as `Vocabulary.decode`.
          stop: Non-empty stop strings.
          ending: A token or string that also ends the text, but is part of it, or None.
          errors: Treatment of bytes that are not UTF-8, as in `open`.
        """
        self._decode = decode
        self._ending = ending
        # Bytes that are not returned yet.
        self._held = b""
        # Number of bytes that the text keeps, for each string that ends it: all bytes of the
        # ending, and none of a stop string.
        self._stop: dict[bytes, int] = {}
        if isinstance(ending, bytes):
            self._stop[ending] = len(ending)
        for string in stop:
            self._stop[string.encode()] = 0
        # Keeps the bytes of an incomplete character.
        self._characters = codecs.getincrementaldecoder("utf-8")(errors=errors)
        # Whether a stop string or the ending was found.
        self.ended = False

    def add(self, ids: Any) -> str:
        """Returns the text that is certain once ids [T] are added.

        It never includes a stop string.
        """
        if self.ended:
            return ""
        if isinstance(self._ending, int):
            endings = np.flatnonzero(ids == self._ending)
            if endings.size:
                self.ended = True
                ids = ids[: endings[0] + 1]
        self._held += self._decode(ids)

        # For each string in the text: its end, and the position at which to cut the text.
        completions: list[tuple[int, int]] = []
        for string, n_kept in self._stop.items():
            first = self._held.find(string)
            if first >= 0:
                completions.append((first + len(string), first + n_kept))
        if completions:
            # The string that is complete first ends the text.
            _, cut = min(completions)
            self.ended = True
            self._held = self._held[:cut]
        if self.ended:
            return self.finish()

        n_certain = self._count_certain()
        piece = self._held[:n_certain]
        self._held = self._held[n_certain:]
        return self._characters.decode(piece)

    def _count_certain(self) -> int:
        """Returns the number of held bytes before the longest suffix that begins a stop string.

        Without stop strings these are all bytes.
        """
        longest = max(map(len, self._stop), default=0)
        for first in range(max(len(self._held) - longest, 0), len(self._held)):
            if any(string.startswith(self._held[first:]) for string in self._stop):
                return first
        return len(self._held)

    def finish(self) -> str:
        """Returns the text that was held back, when no more tokens come.

        Bytes that are not UTF-8 become U+FFFD, or are treated as `errors` specifies.
        """
        piece = self._held
        self._held = b""
        return self._characters.decode(piece, final=True)
