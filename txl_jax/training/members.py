"""The member axis of an ensemble; a run by itself is the case without one."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Members:
    """Members of an ensemble by name.

    Without names there is no member axis: one run, whose arrays, files and records are those of a run by itself. Code
    that goes through `labels` serves both.

    Attributes:
      names: the members in the order of the axis; empty: no axis.
    """

    names: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str | None, ...]:
        """The names, or one None for a run by itself."""
        return self.names or (None,)

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, tree: Any) -> list[Any]:
        """Returns the tree of each member: leaves [n, ...] -> n trees of leaves [...]."""
        return [self.take(tree, i) for i in range(len(self))]

    def take(self, tree: Any, index: int) -> Any:
        """Returns the tree of one member."""
        return jax.tree.map(lambda leaf: leaf[index], tree) if self.names else tree

    def stack(self, trees: Sequence[Any]) -> Any:
        """Inverts `split`, for arrays on the host or on devices."""
        if not self.names:
            return trees[0]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def abstract(self, tree: Any) -> Any:
        """Adds the axis to a tree of `jax.ShapeDtypeStruct`."""

        def with_axis(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            placed = NamedSharding(leaf.sharding.mesh, PartitionSpec(None, *leaf.sharding.spec))
            return jax.ShapeDtypeStruct((len(self), *leaf.shape), leaf.dtype, sharding=placed)

        return jax.tree.map(with_axis, tree) if self.names else tree

    def to_json(self, values: Sequence[T]) -> Any:
        """Returns one value per member as an object by name, or the only value of a run by itself."""
        return dict(zip(self.names, values, strict=True)) if self.names else values[0]

    def from_json(self, stored: Any) -> list[Any]:
        """Inverts `to_json`; None (nothing was stored) gives None for each member."""
        if stored is None:
            return [None] * len(self)
        return [stored[name] for name in self.names] if self.names else [stored]

    def prefix(self, index: int) -> str:
        """Returns the beginning of a line about one member: "seed=2: ", or nothing."""
        return f"{self.names[index]}: " if self.names else ""
