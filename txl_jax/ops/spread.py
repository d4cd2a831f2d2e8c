"""How rows of a batch and tokens of a vocabulary lie on a device mesh, for the operations that must know.

Most do not: XLA's partitioner follows the shardings of their inputs. The softmax does, since its loops over selected
positions (`ops.selected`) have a number of rounds of each device's own, and since vocabularies have odd sizes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh


class Spread(NamedTuple):
    """Names of mesh axes; an array that is spread over none of them lies whole on every device."""

    mesh: Mesh
    rows: tuple[str, ...]  # Axes that a batch's rows lie over.
    vocab: str  # The axis that a cluster's tokens lie over.

    def of_rows(self, batch_size: int) -> Self:
        """As it is, or without the rows' axes if that many rows do not divide among them."""
        return self if batch_size % self.row_parts == 0 else self._replace(rows=())

    @property
    def row_parts(self) -> int:
        """Devices that share a batch's rows."""
        return math.prod(self.mesh.shape[name] for name in self.rows)

    @property
    def vocab_parts(self) -> int:
        """Devices that share a cluster's tokens."""
        return self.mesh.shape[self.vocab]

    @property
    def divided(self) -> str | None:
        """The axis that tokens lie over, if it has more than one device."""
        return self.vocab if self.vocab_parts > 1 else None

    def map(self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` on each device's own parts; gradients of what is whole add up over devices at the border.

        Without check_vma, under which arrays would have to be marked as different on different devices one by one.
        """
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
