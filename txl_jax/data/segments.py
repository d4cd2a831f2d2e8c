"""Tokens to segments: which token stands where at which step, as a pure function of the step.

A text of T tokens has T - 1 targets, the tokens 1 .. T - 1; the input of a target is the token before
it. Row b of the B rows reads the n targets from 1 + b * n on, L of them a step. With T = 12, B = 2 and
L = 3, evaluation (n = 6) deals out these targets, step by step:

    row 0:   1 2 3 | 4  5  6
    row 1:   7 8 9 | 10 11 .      the last place is padding, of weight 0

and training (n = 3, since only 3 of a row's 5 make whole segments) the targets 1 2 3 and 4 5 6, again
in each epoch. Nothing is stored between calls, so a position in the data is a number.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


class Segments(NamedTuple):
    """S consecutive segments of B rows and L places."""

    inputs: np.ndarray  # int32 [S, B, L]; 0 where the weight is 0.
    targets: np.ndarray  # int32 [S, B, L]; 0 where the weight is 0.
    weights: np.ndarray  # float32 [S, B, L]: 1 for a place that counts, 0 for padding.
    reset: np.ndarray  # bool [S, B]: the row starts anew here, so its memory is emptied first.


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentReader:
    """Deals out a text; made by `training_segments` or `evaluation_segments`."""

    tokens: np.ndarray  # Integer ids [T]; may be memory-mapped, only the places asked for are read.
    batch_size: int  # B
    segment_len: int  # L
    row_len: int  # n, targets of a row in one pass over the text.
    repeats: bool  # After a pass the next begins; otherwise only padding follows.

    @property
    def n_segments(self) -> int:
        """Steps of one pass over the text."""
        return -(-self.row_len // self.segment_len)

    @property
    def tokens_per_epoch(self) -> int:
        """Targets of weight 1 in one pass, over all rows."""
        return min(self.batch_size * self.row_len, len(self.tokens) - 1)

    @property
    def skipped_tokens(self) -> int:
        """Targets of the text that no pass reaches."""
        return len(self.tokens) - 1 - self.tokens_per_epoch

    def segments(self, first_step: int, count: int) -> Segments:
        """The segments of steps `first_step` to `first_step + count - 1`.

        Training steps run on through epochs of `n_segments` steps, and all rows are reset where one begins.
        In evaluation, steps from `n_segments` on are padding, so blocks of S segments have one shape.

        Raises:
          ValueError: a negative step or a count below 1.
        """
        if first_step < 0 or count < 1:
            raise ValueError(f"{count} segments from step {first_step}; ask for at least 1, from step 0 or later")
        step_S = np.arange(first_step, first_step + count)
        index_S = step_S % self.n_segments
        live_S = (step_S < self.n_segments) | self.repeats
        column_SxL = index_S[:, None] * self.segment_len + np.arange(self.segment_len)
        row_start_B = 1 + np.arange(self.batch_size) * self.row_len
        target_SxBxL = row_start_B[:, None] + column_SxL[:, None, :]
        counts_SxL = (column_SxL < self.row_len) & live_S[:, None]
        counts_SxBxL = counts_SxL[:, None, :] & (target_SxBxL < len(self.tokens))
        return Segments(
            inputs=self._take(target_SxBxL - 1, counts_SxBxL),
            targets=self._take(target_SxBxL, counts_SxBxL),
            weights=counts_SxBxL.astype(np.float32),
            reset=np.repeat(((index_S == 0) | ~live_S)[:, None], self.batch_size, axis=1),
        )

    def _take(self, place: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The tokens at `place` as int32, and 0 where `counts` is false."""
        return np.where(counts, np.take(self.tokens, place, mode="clip"), 0).astype(np.int32)


def training_segments(tokens: np.ndarray, *, batch_size: int, segment_len: int) -> SegmentReader:
    """Whole segments only: the targets that fill none are skipped, in every epoch the same.

    >>> reader = training_segments(np.arange(12), batch_size=2, segment_len=3)
    >>> reader.n_segments, reader.tokens_per_epoch, reader.skipped_tokens
    (1, 6, 5)

    Raises:
      ValueError: a text too short for one segment.
    """
    _check(tokens, batch_size, segment_len)
    n_segments = (len(tokens) - 1) // batch_size // segment_len
    if n_segments == 0:
        needed = batch_size * segment_len
        raise ValueError(
            f"the training text has {len(tokens)} tokens and one segment of all rows takes batch_size x segment_len = "
            f"{batch_size} x {segment_len} = {needed} and one more; lower --train.batch_size or --train.segment_len, "
            "or give a longer text"
        )
    return SegmentReader(tokens, batch_size, segment_len, row_len=n_segments * segment_len, repeats=True)


def evaluation_segments(tokens: np.ndarray, *, batch_size: int, segment_len: int) -> SegmentReader:
    """Every token but the first is a target exactly once; rows are padded at their ends.

    >>> reader = evaluation_segments(np.arange(12), batch_size=2, segment_len=3)
    >>> reader.segments(1, 1).targets.tolist()
    [[[4, 5, 6], [10, 11, 0]]]

    Raises:
      ValueError: a text of fewer than 2 tokens.
    """
    _check(tokens, batch_size, segment_len)
    return SegmentReader(tokens, batch_size, segment_len, row_len=-(-(len(tokens) - 1) // batch_size), repeats=False)


def _check(tokens: np.ndarray, batch_size: int, segment_len: int) -> None:
    if tokens.ndim != 1 or len(tokens) < 2:
        raise ValueError(f"the tokens have shape {tokens.shape}; give one axis of at least 2 tokens")
    if batch_size < 1 or segment_len < 1:
        raise ValueError(f"batch_size is {batch_size} and segment_len is {segment_len}; both must be at least 1")
