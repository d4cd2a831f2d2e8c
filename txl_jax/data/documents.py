"""Batches documents: many texts of different lengths in the rows of a batch.

Each document is read from an empty memory.

A row reads one document after the other, L positions per step, and each document starts at the
beginning of a step. With L = 3 and B = 2, documents a (5 positions), b (2) and c (4) are read in
these steps:

    row 0:   a a a | a a . | . . .
    row 1:   b b . | c c c | c . .

The reset bits in the first steps of a, b and c empty the row's memory. Padding (the dots) is read
too, but the memory that contains it is emptied before the row is used again, so each document gets
the same results as by itself.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from txl_jax.errors import UserError
from txl_jax.recurrence import Segments

# Maximum number of documents per row that have begun but are not delivered. Results of documents
# after a long one are kept until it ends.
_LOOKAHEAD = 16


class Pairs(NamedTuple):
    """Inputs and targets of a document, T positions."""

    inputs: np.ndarray  # Integer ids [T], or vectors [T, D].
    targets: np.ndarray  # Integer ids [T], the token after each input.


class Placement(NamedTuple):
    """Place of a part of a document in a call's segments: positions [segment, row, :length]."""

    number: int  # Number of the document, in the order of the source.
    segment: int  # Index of the segment in the call.
    row: int  # Index of the row in the batch.
    length: int  # Number of positions.
    ends: bool  # Whether it is the document's last part.


class Call(NamedTuple):
    """The segments of one call."""

    segments: Segments  # S segments. Those from `n_segments` on are padding.
    n_segments: int  # Segments with positions of documents.
    parts: list[Placement]  # The parts of documents, segment by segment.


class _Piece(NamedTuple):
    """A part of a document that fits into a segment, before it has a place."""

    number: int  # Number of the document, in the order of the source.
    begins: bool  # Whether it is the document's first part.
    ends: bool  # Whether it is the document's last part.
    pairs: Pairs  # At most L positions.


class DocumentRows:
    """Segments of an iterator's documents.

    The next document is taken from the iterator when a row becomes free.
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
        """Creates the rows, without reading a document.

        Args:
          source: The documents. If it raises `UserError`, the documents before it are read first.
          batch_size: B, rows.
          segment_len: L, positions of a row in a segment.
          segments_per_call: S, segments of a call.
          vectors: Size D and dtype of inputs that are vectors, or None if they are ids.
        """
        self._source = source
        self._vectors = vectors
        # The pieces that each row reads.
        self._rows = [self._pieces(segment_len) for _ in range(batch_size)]
        # [S, B, L]
        self._shape = segments_per_call, batch_size, segment_len
        # Number of documents from the source so far.
        self._n_begun = 0
        # Number of documents whose results are no longer kept, set by the caller.
        self.delivered = 0
        # Whether no more documents come.
        self.ended = False
        # The error that ended the source, if any.
        self.error: UserError | None = None

    def next_call(self) -> Call | None:
        """Returns the segments to read next, or None.

        None means that no document may begin before others are delivered.
        """
        call = Call(self._padding(), n_segments=self._shape[0], parts=[])
        for segment in range(call.n_segments):
            is_padding = True
            for row in range(len(self._rows)):
                if self._fill(call, segment, row):
                    is_padding = False
            if is_padding:
                # Documents without positions are parts of the call, but do not take up a segment.
                return call._replace(n_segments=segment) if call.parts else None
        return call

    def _fill(self, call: Call, segment: int, row: int) -> bool:
        """Writes the next piece of a row into its segment, and returns whether there is one."""
        while (piece := next(self._rows[row])) is not None:
            length = len(piece.pairs.inputs)
            call.parts.append(Placement(piece.number, segment, row, length, piece.ends))
            # A document without positions takes no place, so the row reads the next one.
            if length:
                call.segments.inputs[segment, row, :length] = piece.pairs.inputs
                call.segments.targets[segment, row, :length] = piece.pairs.targets
                call.segments.weights[segment, row, :length] = 1
                call.segments.reset[segment, row] = piece.begins
                return True
        return False

    def _pieces(self, size: int) -> Iterator[_Piece | None]:
        """Yields the pieces of the documents that one row reads, or None to wait.

        Args:
          size: Positions of a piece. The last piece of a document may have fewer.
        """
        while True:
            document = self._next_document()
            if document is None:
                yield None
                continue
            number = self._n_begun - 1
            length = len(document.inputs)
            # A document without positions is one piece.
            for first in range(0, max(length, 1), size):
                pairs = Pairs(*(array[first : first + size] for array in document))
                yield _Piece(number, begins=first == 0, ends=first + size >= length, pairs=pairs)

    def _next_document(self) -> Pairs | None:
        """Returns the next document, or None if no document may begin now."""
        if self.ended or self._n_begun >= self.delivered + _LOOKAHEAD * len(self._rows):
            return None
        try:
            document = next(self._source, None)
        except UserError as error:
            # The documents before it are read first.
            document = None
            self.error = error
        if document is None:
            self.ended = True
        else:
            self._n_begun += 1
        return document

    def _padding(self) -> Segments:
        """Returns segments of padding in new arrays.

        The arrays of an earlier call may still be in transfer.
        """
        shape = self._shape
        if self._vectors is None:
            inputs = np.zeros(shape, np.int32)
        else:
            size, dtype = self._vectors
            inputs = np.zeros((*shape, size), dtype)
        return Segments(
            inputs,
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape[:2], bool),
        )
