"""Batching of documents: many texts of different lengths in the rows of a batch.

Each document is read from an empty memory.

A row reads one document after the other, L positions per step, and a document begins where a step
begins. With L = 3 and B = 2, documents a (5 positions), b (2) and c (4) are read in these steps:

    row 0:   a a a | a a . | . . .
    row 1:   b b . | c c c | c . .

The reset bits of a's, b's and c's first steps empty the row's memory. Positions of padding (the
dots) are read too, but the memory that holds them is emptied before the row is used again, so a
document's results are the same as by itself.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from txl_jax.errors import UserError
from txl_jax.recurrence import Segments

# Documents per row that may have begun: results of those after a long one are kept until it ends.
_LOOKAHEAD = 16


class Pairs(NamedTuple):
    """Inputs and targets of a document, T positions."""

    inputs: np.ndarray  # Integer ids [T], or vectors [T, D].
    targets: np.ndarray  # Integer ids [T], the token after each input.


class Part(NamedTuple):
    """Place of a part of a document in a call's segments: positions [segment, row, :length]."""

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


class DocumentRows:
    """Segments of an iterator's documents.

    The iterator is asked for the next one when a row becomes free.
    """

    def __init__(
        self,
        source: Iterator[Pairs],
        *,
        batch_size: int,
        segment_len: int,
        segments_per_call: int,
        vectors: tuple[int, np.dtype] | None = None,
    ):
        """Reads nothing yet. A call has S = `segments_per_call` segments of B rows and L positions.

        `vectors` is the size D and dtype of inputs that are vectors, or None if they are ids. If
        `source` raises `UserError`, the documents before it are read first.
        """
        self._source, self._vectors = source, vectors
        self._rows = [self._pieces(segment_len) for _ in range(batch_size)]
        self._shape = segments_per_call, batch_size, segment_len
        self._begun = 0
        self.delivered = 0  # Documents whose results are no longer kept; set by the caller.
        self.ended = False  # Whether no more documents come.
        self.error: UserError | None = None  # Raised by the source, which ended with it.

    def next_call(self) -> Call | None:
        """Returns the segments to read next, or None.

        None means that no document may begin before others are delivered.
        """
        call = Call(self._padding(), self._shape[0], [])
        for segment in range(call.n_segments):
            busy = False
            for row, pieces in enumerate(self._rows):
                while (piece := next(pieces)) is not None:
                    number, first, pairs, ends = piece
                    length = len(pairs.inputs)
                    call.parts.append(Part(number, segment, row, length, ends))
                    if length:  # Documents without positions take no place.
                        busy = True
                        call.segments.inputs[segment, row, :length] = pairs.inputs
                        call.segments.targets[segment, row, :length] = pairs.targets
                        call.segments.weights[segment, row, :length] = 1
                        call.segments.reset[segment, row] = first == 0
                        break
            if not busy:
                return call._replace(n_segments=segment) if call.parts else None
        return call

    def _pieces(self, size: int) -> Iterator[tuple[int, int, Pairs, bool] | None]:
        """Yields a row's pieces, or None to wait.

        A piece is (number of the document, first position, pairs, whether the document ends).
        """
        while True:
            if (document := self._next_document()) is None:
                yield None
                continue
            number, length = self._begun - 1, len(document.inputs)
            for first in range(0, max(length, 1), size):
                pairs = Pairs(*(array[first : first + size] for array in document))
                yield number, first, pairs, first + size >= length

    def _next_document(self) -> Pairs | None:
        if self.ended or self._begun >= self.delivered + _LOOKAHEAD * len(self._rows):
            return None
        try:
            document = next(self._source, None)
        except UserError as error:  # The documents before it are read first.
            document, self.error = None, error
        self.ended = document is None
        self._begun += not self.ended
        return document

    def _padding(self) -> Segments:
        """Returns segments of padding in new arrays.

        The arrays of an earlier call may still be in transfer.
        """
        shape = self._shape
        inputs = (
            np.zeros((*shape, self._vectors[0]), self._vectors[1])
            if self._vectors
            else np.zeros(shape, np.int32)
        )
        return Segments(
            inputs,
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape[:2], bool),
        )
