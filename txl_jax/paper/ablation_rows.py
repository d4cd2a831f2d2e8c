"""The rows of tables 6, 7 and 10 of the paper, with its numbers, and the settings of a row."""

import dataclasses
import enum
from typing import Any, NamedTuple

from txl_jax.config import Encoding, ExperimentConfig, LossPart
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError


class Table(enum.StrEnum):
    """A table of the paper."""

    WIKITEXT103 = "6"
    LM1B = "7"
    EQUAL_MEMORY = "10"


class Published(NamedTuple):
    """The paper's numbers of a row; None: not given."""

    init: float | None = None
    best: float | None = None
    length: int | None = None


_UNPUBLISHED = Published()


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
      recurrence: whether there is a memory.
      encoding: of positions.
      loss: the positions of a segment that are scored in training.
      published: the paper's numbers.
      segment_len: L of training, where it is not the base's (table 10).
    """

    recurrence: bool
    encoding: Encoding
    loss: LossPart
    published: Published = _UNPUBLISHED
    segment_len: int | None = None

    @property
    def name(self) -> str:
        """The name of the row's folder."""
        length = "" if self.segment_len is None else f"-{self.segment_len}"
        return f"{'recurrence' if self.recurrence else 'none'}-{self.encoding}-{self.loss}{length}"


_REL, _SHAW, _VASWANI, _AL_RFOU = Encoding.RELATIVE, Encoding.SHAW, Encoding.VASWANI, Encoding.AL_RFOU
_FULL, _HALF = LossPart.FULL, LossPart.HALF
TABLES = {
    # WikiText-103, 128M parameters: validation perplexities.
    Table.WIKITEXT103: (
        Row(True, _REL, _FULL, Published(27.02, 26.77, 500)),
        Row(True, _SHAW, _FULL, Published(27.94, None, None)),
        Row(True, _REL, _HALF, Published(28.69, 28.33, 460)),
        Row(False, _REL, _FULL, Published(29.59, 29.02, 260)),
        Row(False, _REL, _HALF, Published(30.10, None, None)),
        Row(False, _SHAW, _FULL, Published(29.75, None, None)),
        Row(False, _SHAW, _HALF, Published(30.50, None, None)),
        Row(False, _VASWANI, _HALF, Published(30.97, None, None)),
        Row(False, _AL_RFOU, _HALF, Published(31.16, None, None)),
    ),
    # One Billion Word: test perplexities.
    Table.LM1B: (
        Row(True, _REL, _FULL, Published(None, 25.2, None)),
        Row(True, _SHAW, _FULL, Published(None, 25.7, None)),
        Row(False, _REL, _FULL, Published(None, 27.1, None)),
    ),
    # WikiText-103: the same device memory for each.
    Table.EQUAL_MEMORY: (
        Row(True, _REL, _FULL, Published(27.02, 26.77, 500)),
        Row(True, _REL, _HALF, Published(28.69, 28.33, 460)),
        Row(False, _REL, _FULL, Published(28.43, 27.98, 400), segment_len=176),
        Row(False, _REL, _HALF, Published(28.83, 28.83, 120), segment_len=172),
    ),
}


def row_named(table: Table, name: str) -> Row:
    """Returns the row of a table, or any other of the grid, of which the paper has no numbers.

    >>> row_named(Table.WIKITEXT103, "none-vaswani-full").published
    Published(init=None, best=None, length=None)

    Raises:
      UserError: the name of no row.
    """
    for row in TABLES[table]:
        if row.name == name:
            return row
    parts = name.split("-")
    try:
        recurrence = {"recurrence": True, "none": False}[parts[0]]
        encoding, loss = Encoding(parts[1]), LossPart(parts[2])
        segment_len = int(parts[3]) if len(parts) == 4 else None
        if len(parts) > 4 or (segment_len is not None and segment_len < 1):
            raise ValueError
    except (KeyError, ValueError, IndexError):
        raise UserError(
            f"no row is called {name}; table {table} has {', '.join(row.name for row in TABLES[table])}, and the "
            f"names of others have these parts too: recurrence or none, {' or '.join(Encoding)}, "
            f"{' or '.join(LossPart)}, and a segment length where it is not the flagfile's"
        ) from None
    return Row(recurrence, encoding, loss, segment_len=segment_len)


def row_config(base: ExperimentConfig, row: Row, seed: int) -> ExperimentConfig:
    """Returns the base with the settings of a row.

    Without recurrence there is no memory, in training and in the evaluations during it. Learned tables hold as many
    distances as training has.
    """
    segment_len = row.segment_len or base.train.segment_len
    mem_len = base.train.mem_len if row.recurrence else 0
    changes: dict[str, Any] = {
        "seed": seed,
        "model.encoding": row.encoding,
        "model.num_positions": segment_len + mem_len if row.encoding.is_learned else None,
        "model.untie_r": base.model.untie_r and row.encoding is Encoding.RELATIVE,
        "model.tie_positions": base.model.tie_positions and row.encoding is Encoding.RELATIVE,
        "train.loss": row.loss,
        "train.segment_len": segment_len,
        "train.mem_len": mem_len,
    }
    if not row.recurrence:
        changes |= {"train.same_length": False, "eval.mem_len": 0, "eval.same_length": False}
        changes |= {"eval.segment_len": segment_len}
    return config_tree.replace(base, changes)
