"""Batching of documents: many texts of different lengths in the rows of a batch, each from an empty memory.

A row reads one document after the other, L positions per step, and a document begins where a step begins. With L = 3
and B = 2, documents a (5 positions), b (2) and c (4) are read in these steps:

    row 0:   a a a | a a . | . . .
    row 1:   b b . | c c c | c . .

The reset bits of a's, b's and c's first steps empty the row's memory. Positions of padding (the dots) are read too, but
the memory that holds them is emptied before the row is used again, so a document's results are those that it has alone.
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from txl_jax.errors import UserError
from txl_jax.recurrence import Segments

# Maximum number of documents per row that have begun and are not delivered: while a long document is read, the results
# of the documents after it are kept.
_LOOKAHEAD = 16


class Pairs(NamedTuple):
    """Inputs and targets of a document, T positions."""

    inputs: np.ndarray  # Integer ids [T], or vectors [T, D].
    targets: np.ndarray  # Integer ids [T], the token after each input.


class Part(NamedTuple):
    """Place of a part of a document in the segments of a call: positions [segment, row, :length]."""

    number: int  # Of the document, in the order of the source.
    segment: int
    row: int
    length: int
    ends: bool  # Whether it is the document's last part.


class Call(NamedTuple):
    """The segments of one call."""

    segments: Segments  # S of them; those from `n_segments` on are padding.
    n_segments: int
    parts: list[Part]


@dataclasses.dataclass
class _Row:
    """A document that is being read."""

    number: int
    document: Pairs
    position: int = 0


class DocumentRows:
    """Segments of an iterator's documents. The iterator is asked for the next one when a row becomes free."""

    def __init__(
        self,
        source: Iterator[Pairs],
        *,
        batch_size: int,
        segment_len: int,
        segments_per_call: int,
        vectors: tuple[int, np.dtype] | None = None,
    ):
        """Reads nothing yet.

        Args:
          source: Iterator over the documents. If it raises `UserError`, the documents before it are read first.
          batch_size: B.
          segment_len: L.
          segments_per_call: S.
          vectors: Size D and dtype of inputs that are vectors, or None if they are ids.
        """
        self._source = source
        self._rows: list[_Row | None] = [None] * batch_size
        self._shape = segments_per_call, batch_size, segment_len
        # Axes of an input beyond [S, B, L], and its dtype.
        self._input = ((), np.dtype(np.int32)) if vectors is None else ((vectors[0],), vectors[1])
        self._at_most = _LOOKAHEAD * batch_size
        self._begun = 0
        self.delivered = 0  # Documents whose results are no longer kept; set by the caller.
        self.ended = False  # Whether no more documents come.
        self.error: UserError | None = None  # Raised by the source, which ended with it.

    def next_call(self) -> Call | None:
        """Returns the segments to read next, or None if no document may begin before others are delivered."""
        n_segment, batch_size, _ = self._shape
        call = Call(self._padding(), n_segment, [])
        for segment in range(n_segment):
            busy = False
            for row in range(batch_size):
                self._begin(row, call, segment)
                reading = self._rows[row]
                if reading is not None:
                    busy = True
                    call.parts.append(self._read(reading, call.segments, segment, row))
                    if call.parts[-1].ends:
                        self._rows[row] = None
            if not busy:
                return call._replace(n_segments=segment) if call.parts else None
        return call

    def _begin(self, row: int, call: Call, segment: int) -> None:
        """Gives a free row its next document. Documents without positions end at once."""
        while self._rows[row] is None and not self.ended and self._begun - self.delivered < self._at_most:
            try:
                document = next(self._source, None)
            except UserError as error:  # The documents before it are read first.
                self.error, document = error, None
            if document is None:
                self.ended = True
                return
            if len(document.inputs):
                self._rows[row] = _Row(self._begun, document)
            else:
                call.parts.append(Part(self._begun, segment, row, 0, True))
            self._begun += 1

    def _read(self, reading: _Row, segments: Segments, segment: int, row: int) -> Part:
        """Writes a row's next positions into the segments."""
        first, document = reading.position, reading.document
        inputs = document.inputs[first : first + self._shape[2]]
        length = len(inputs)
        segments.inputs[segment, row, :length] = inputs
        segments.targets[segment, row, :length] = document.targets[first : first + length]
        segments.weights[segment, row, :length] = 1
        segments.reset[segment, row] = first == 0
        reading.position += length
        return Part(reading.number, segment, row, length, reading.position == len(document.inputs))

    def _padding(self) -> Segments:
        """Returns segments of padding, in arrays of their own: those of an earlier call may still be in transfer."""
        shape, (size, dtype) = self._shape, self._input
        inputs = np.zeros((*shape, *size), dtype)
        return Segments(inputs, np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(shape[:2], bool))
