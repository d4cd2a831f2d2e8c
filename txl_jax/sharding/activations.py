"""How batches, activations and vocabularies lie on a device mesh, for the code that must know.

Operations that must know are those of the softmax: its loops over selected positions (`ops.selected`) have a number of
rounds of each device's own, and vocabularies have odd sizes. All else XLA's partitioner lays out by itself, from where
parameters and batch lie; the activations of a layer are pinned (`lay`), so that it is free to choose in little.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from txl_jax.sharding import axes


class Spread(NamedTuple):
    """A mesh of several devices, and where the arrays of a program lie on it."""

    mesh: Mesh
    spec: Callable[..., PartitionSpec]  # The mesh axes of an array by the logical names of its own (`sharding.spec`).

    def rows(self, batch_size: int) -> tuple[str, ...]:
        """The mesh axes that a batch's rows lie over; none if so many rows do not divide among their devices."""
        return self.spec(axes.BATCH)[0] if batch_size % self.row_parts == 0 else ()

    @property
    def row_parts(self) -> int:
        """Devices that share a batch's rows."""
        return math.prod(self.mesh.shape[name] for name in self.spec(axes.BATCH)[0])

    @property
    def vocab(self) -> str:
        """The mesh axis that a cluster's tokens lie over."""
        return self.spec(axes.VOCAB)[0]

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


def lay(spread: Spread | None, array: jax.Array, *names: str | None) -> jax.Array:
    """Pins where an activation lies, and with it its gradient; it changes no number.

    Args:
      spread: None: one device, and nothing is done.
      array: [B, ...].
      names: what its axes after the first are called (`txl_jax.sharding.axes`); None stays whole.
    """
    if spread is None:
        return array
    spec = PartitionSpec(spread.rows(array.shape[0]) or None, *spread.spec(*names))
    return jax.lax.with_sharding_constraint(array, NamedSharding(spread.mesh, spec))
