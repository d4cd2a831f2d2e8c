"""Segment lengths of equal device memory: table 10 of the paper."""

import dataclasses
from collections.abc import Callable, Sequence

from txl_jax.config import ExperimentConfig
from txl_jax.errors import UserError
from txl_jax.paper.ablation_rows import TABLES, Row, Table, row_config
from txl_jax.runs.build import build
from txl_jax.runtime import environment


def training_bytes(config: ExperimentConfig, vocab_size: int) -> int:
    """Returns the device memory of an update: parameters, optimizer state, memory and the compiler's temporaries.

    Raises:
      UserError: the backend does not report it.
    """
    parts = build(config, vocab_size=vocab_size)
    compilation = parts.training.compile_step()
    if compilation.temporary_bytes is None:
        raise UserError(
            "this backend does not report the memory of an update; leave equal_memory out, or use another backend"
        )
    return compilation.temporary_bytes + environment.bytes_on_device(parts.training.abstract_state)


def longest_segment(base: ExperimentConfig, row: Row, *, limit: int, vocab_size: int, step: int = 4) -> int:
    """Returns the longest L of a row, a multiple of `step`, whose update needs at most `limit` bytes (table 10).

    Memory grows with L, so that bisection finds it: a compilation for each of a handful of lengths.

    Raises:
      UserError: not even the shortest fits.
    """

    def fits(count: int) -> bool:
        changed = dataclasses.replace(row, segment_len=count * step)
        return training_bytes(row_config(base, changed, 0), vocab_size) <= limit

    low, high = 1, 2
    if not fits(low):
        raise UserError(
            f"a segment of {step} tokens needs more than {limit:,} bytes in the row {row.name}; choose other rows"
        )
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def with_equal_memory(
    base: ExperimentConfig, rows: Sequence[Row], vocab_size: int, *, log: Callable[[str], None]
) -> list[Row]:
    """Returns the rows; those with a segment length get the longest that fits into the first row's device memory."""
    first = TABLES[Table.EQUAL_MEMORY][0]
    limit = training_bytes(row_config(base, first, 0), vocab_size)
    log(f"an update of {first.name} needs {environment.megabytes(limit)}")
    found = []
    for row in rows:
        if row.segment_len is not None:
            row = dataclasses.replace(row, segment_len=longest_segment(base, row, limit=limit, vocab_size=vocab_size))
            log(f"the same memory: {row.name}")
        found.append(row)
    return found
