"""Cuts a token stream into rows and segments, as a pure function of (seed, epoch, step).

A text of T tokens has T - 1 targets, the tokens 1 .. T - 1. The input of a target is the token
before it. Row b of the B rows reads the n targets from 1 + b * n on, L of them per step. With T =
12, B = 2 and L = 3, evaluation (n = 6) reads these targets, step by step:

    row 0:   1 2 3 | 4  5  6
    row 1:   7 8 9 | 10 11 .      the last position is padding, of weight 0

and training (n = 3, since only 3 of a row's 5 fill whole segments) the targets 1 2 3 and 4 5 6,
again in each epoch. Other orders of an epoch (`txl_jax.data.epoch_order`) move the skipped targets.
In these variants, targets in brackets have weight 0:

    evaluation, 2 warm-up tokens      row 0:    1  2  3 | 4 5  6 | .  . .
                                      row 1:   (5  6) 7 | 8 9 10 | 11 . .
    training, stride 2                row 0:   1 2 3 | (3) 4 5
                                      row 1:   6 7 8 | (8) 9 10
    training, `Roll.ROWS` by 3 and 1  row 0:   4 5 1       of 4 5 1 2 3
                                      row 1:   7 8 9       of 7 8 9 10 11 6

All processes sample the same random numbers, and each reads its `own` rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from txl_jax.config import Roll
from txl_jax.config.config_tree import require
from txl_jax.data.epoch_order import EpochOrder, ShuffledSentences, random_roll, sequential
from txl_jax.errors import UserError
from txl_jax.recurrence import Segments

# Indices of the rows of a process, ascending, or None for all.
Rows = Sequence[int] | np.ndarray | None


class RowRanges(NamedTuple):
    """The pairs (input, target) that each row reads in one pass.

    Pair q has target q + 1. Each field is int64 [B].
    """

    first: np.ndarray  # The first pair.
    scored: np.ndarray  # The first pair that counts.
    end: np.ndarray  # The pair after the last one.


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentReader:
    """Segments of a text by step, built by `training_segments` or `evaluation_segments`."""

    # Integer ids [T]. They may be memory-mapped, because only the requested positions are read.
    tokens: np.ndarray
    # B, rows over all processes.
    batch_size: int
    # L, positions of a row in a segment.
    segment_len: int
    # New positions of each segment after a row's first. Earlier positions have already been read.
    stride: int
    # The pairs of all B rows, also of the rows of other processes.
    rows: RowRanges
    # The rows that are returned.
    own: Rows
    # Maps an epoch's pairs to positions in the text.
    order: EpochOrder = sequential
    # Whether another epoch follows a pass. Otherwise only padding follows.
    repeats: bool = False

    @property
    def n_segments(self) -> int:
        """Returns the number of steps of one pass over the text."""
        after_first = int((self.rows.end - self.rows.first).max()) - self.segment_len
        return 1 + max(-(-after_first // self.stride), 0)

    @property
    def tokens_per_epoch(self) -> int:
        """Returns the number of targets of weight 1 in one pass, over all rows of all processes."""
        return int((self.rows.end - self.rows.scored).sum())

    @property
    def skipped_tokens(self) -> int:
        """Returns the number of targets that one pass skips, over all processes."""
        return len(self.tokens) - 1 - self.tokens_per_epoch

    def segments(self, first_step: int, count: int) -> Segments:
        """Returns the segments of `count` steps from `first_step` on.

        The segments have this process's rows: [S, own rows, L].

        Training steps continue through epochs of `n_segments` steps, and rows are reset at the
        beginning of an epoch. In evaluation, steps from `n_segments` on are padding, so that all
        blocks have the same shape.

        Raises:
          ValueError: If a step is negative or a count below 1.
        """
        if first_step < 0 or count < 1:
            raise ValueError(
                f"count must be at least 1 and first_step at least 0, got {count} and {first_step}"
            )
        epoch_S, index_S = np.divmod(np.arange(first_step, first_step + count), self.n_segments)
        # Steps may run over the end of an epoch.
        parts = []
        for epoch in np.unique(epoch_S).tolist():
            parts.append(self._within_epoch(epoch, index_S[epoch_S == epoch]))
        # Inputs are joined with inputs, targets with targets and so on, along S.
        return Segments(*map(np.concatenate, zip(*parts, strict=True)))

    def scored(self, first_step: int, count: int) -> np.ndarray:
        """Returns the index of the token that each position of evaluation steps scores.

        The indices are int64 [S, B, L].

        Positions of weight 0 have index 0, the one token that is never scored.

        >>> segments = evaluation_segments(np.arange(20, 32), batch_size=2, segment_len=3)
        >>> segments.scored(1, 1).tolist()
        [[[4, 5, 6], [10, 11, 0]]]
        """
        pair_SxBxL = self._pairs(np.arange(first_step, first_step + count), self.rows.first)
        counts = (pair_SxBxL >= self.rows.scored[:, None]) & (pair_SxBxL < self.rows.end[:, None])
        return np.where(counts, pair_SxBxL + 1, 0)

    def _pairs(self, index_S: np.ndarray, first_B: np.ndarray) -> np.ndarray:
        """Returns the index of the pair at each position, [S, B, L].

        Indices continue past a row's end.
        """
        first_SxB = first_B + index_S[:, None] * self.stride
        return first_SxB[..., None] + np.arange(self.segment_len)

    def _within_epoch(self, epoch: int, index_S: np.ndarray) -> Segments:
        """Returns the segments with these indices in one epoch."""
        own_rows = slice(None) if self.own is None else np.asarray(self.own)
        first_B = self.rows.first[own_rows]
        scored_B = self.rows.scored[own_rows]
        end_B = self.rows.end[own_rows]
        # An evaluation reads the text once. Everything after it is padding.
        is_read = self.repeats or epoch == 0
        pair_SxBxL = self._pairs(index_S, first_B)
        real_SxBxL = (pair_SxBxL < end_B[:, None]) & is_read

        # With a stride below L, a segment begins with pairs that the segment before has scored.
        again_SxL = (index_S[:, None] > 0) & (
            np.arange(self.segment_len) < self.segment_len - self.stride
        )
        counts_SxBxL = real_SxBxL & (pair_SxBxL >= scored_B[:, None]) & ~again_SxL[:, None]

        # Positions in the text of the inputs and targets of each segment's L pairs.
        input_SxBxL, target_SxBxL = self.order(epoch, pair_SxBxL[..., 0], self.segment_len)
        return Segments(
            inputs=take(self.tokens, input_SxBxL, real_SxBxL),
            targets=take(self.tokens, target_SxBxL, real_SxBxL),
            weights=counts_SxBxL.astype(np.float32),
            # All rows begin an epoch together. Padding is read from an empty memory.
            reset=np.repeat(((index_S == 0) | (not is_read))[:, None], len(first_B), axis=1),
        )


def take(tokens: np.ndarray, position: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Returns the tokens at positions in the text as int32, and 0 for padding.

    Padding may be past the text's end.
    """
    return np.where(real, np.take(tokens, position, mode="clip"), 0).astype(np.int32)


def training_segments(
    tokens: np.ndarray,
    *,
    batch_size: int,
    segment_len: int,
    stride: int | None = None,
    seed: int = 0,
    roll: Roll = Roll.NONE,
    sentence_starts: np.ndarray | None = None,
    own: Rows = None,
) -> SegmentReader:
    """Builds the training segments. All are whole, so remaining targets are skipped.

    >>> reader = training_segments(np.arange(12), batch_size=2, segment_len=3)
    >>> reader.n_segments, reader.tokens_per_epoch, reader.skipped_tokens
    (1, 6, 5)

    Args:
      tokens: Integer ids [T], may be memory-mapped.
      batch_size: B, over all processes.
      stride: Positions by which a row advances from segment to segment, or None for L. In all
        segments of an epoch except the first, only the last `stride` positions are scored.
      roll: Rotates the stream, or each row, by a random number in each epoch. NONE skips the same
        targets in each.
      sentence_starts: Signed integers [n + 1], may be memory-mapped: sentence i is
        tokens[starts[i] : starts[i + 1]]. The sentences are shuffled in each epoch. None keeps the
        order of the text.
      own: Indices of the rows that this process reads, ascending, or None for all.

    Raises:
      UserError: If the text is too short for one segment, or the stride is above L.
      ValueError: If own rows are outside the batch, or sentence starts do not match the text or
        come with a roll.
    """
    _check(tokens, batch_size, segment_len, own)
    n_pairs = len(tokens) - 1
    if stride is None:
        stride = segment_len
    require(
        1 <= stride <= segment_len, f"stride must be between 1 and {segment_len=}, got {stride=}"
    )
    row_len = n_pairs // batch_size
    # After its first segment a row has whole strides only.
    row_len -= (row_len - segment_len) % stride
    require(
        row_len >= segment_len,
        f"the training text must have more tokens than batch_size x segment_len = {batch_size} x "
        f"{segment_len}, got {len(tokens)}. Lower --train.batch_size or --train.segment_len, or "
        "pass a longer text.",
    )
    if sentence_starts is not None and roll is not Roll.NONE:
        raise ValueError(f"with sentence_starts, roll must be none, got {roll}")

    first_B = np.arange(batch_size) * row_len
    order: EpochOrder = sequential
    if sentence_starts is not None:
        order = ShuffledSentences(sentence_starts, n_tokens=len(tokens), seed=seed)
    elif roll is Roll.STREAM:
        order = random_roll(np.array([0, n_pairs]), seed)
    elif roll is Roll.ROWS:
        # Each row rotates its own range, of which it reads as much as without a roll.
        edges = np.arange(batch_size + 1) * n_pairs // batch_size
        first_B = edges[:-1]
        order = random_roll(edges, seed)
    return SegmentReader(
        tokens=tokens,
        batch_size=batch_size,
        segment_len=segment_len,
        stride=stride,
        rows=RowRanges(first=first_B, scored=first_B, end=first_B + row_len),
        own=own,
        order=order,
        repeats=True,
    )


def evaluation_segments(
    tokens: np.ndarray,
    *,
    batch_size: int,
    segment_len: int,
    warmup_tokens: int = 0,
    own: Rows = None,
) -> SegmentReader:
    """Builds the evaluation segments of a text.

    Every token except the first is a target of weight 1 exactly once. Rows are padded.

    >>> reader = evaluation_segments(np.arange(12), batch_size=2, segment_len=3)
    >>> reader.segments(1, 1).targets.tolist()
    [[[4, 5, 6], [10, 11, 0]]]

    The other arguments are described in `training_segments`.

    Args:
      warmup_tokens: Targets before its own that a row reads with weight 0, to fill its memory. The
        first rows have fewer, and a row without targets reads none.

    Raises:
      UserError: If the text has fewer than 2 tokens, or warmup_tokens is negative.
      ValueError: If own rows are outside the batch.
    """
    _check(tokens, batch_size, segment_len, own)
    require(warmup_tokens >= 0, f"warmup_tokens must be at least 0, got {warmup_tokens}")
    n_pairs = len(tokens) - 1
    # The last rows of a short text may have fewer targets, or none.
    row_len = -(-n_pairs // batch_size)
    scored_B = np.minimum(np.arange(batch_size) * row_len, n_pairs)
    end_B = np.minimum(scored_B + row_len, n_pairs)
    first_B = np.where(scored_B < end_B, np.maximum(scored_B - warmup_tokens, 0), end_B)
    return SegmentReader(
        tokens=tokens,
        batch_size=batch_size,
        segment_len=segment_len,
        stride=segment_len,
        rows=RowRanges(first=first_B, scored=scored_B, end=end_B),
        own=own,
    )


def _check(tokens: np.ndarray, batch_size: int, segment_len: int, own: Rows) -> None:
    """Raises `UserError` for tokens that are not a text, and ValueError for other arguments."""
    if tokens.ndim != 1 or len(tokens) < 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"tokens must be at least 2 integer ids [T], got {tokens.dtype} of shape {tokens.shape}"
        )
    if batch_size < 1 or segment_len < 1:
        raise ValueError(
            f"batch_size and segment_len must be at least 1, got {batch_size=} and {segment_len=}"
        )
    rows = range(batch_size) if own is None else [int(row) for row in own]
    if list(rows) != sorted(set(rows) & set(range(batch_size))):
        raise ValueError(
            f"own rows must ascend within 0 to {batch_size - 1}, got {rows} ({batch_size=})"
        )
