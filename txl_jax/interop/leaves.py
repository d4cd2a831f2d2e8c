"""Parameters by path, read one at a time, so that a conversion needs memory for one array instead of all."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.traverse_util
import numpy as np


class Leaf(NamedTuple):
    """One array: its shape and dtype, and the function that reads it.

    Attributes:
      read: Returns the array. Each call reads anew and keeps nothing.
      read_entry: Returns one entry along the first axis, or None if `read` is as fast.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    read_entry: Callable[[int], np.ndarray] | None = None

    def part(self, place: slice | int) -> np.ndarray:
        """Returns some rows of the array, or one entry along its first axis."""
        if isinstance(place, int) and self.read_entry:
            return self.read_entry(place)
        part: np.ndarray = self.read()[place]
        return part


# Leaves by path: "stack/layers/attention/query" for params["stack"]["layers"]["attention"]["query"].
Leaves = Mapping[str, Leaf]


def leaf_of(array: Any) -> Leaf:
    """Returns an array in memory as a leaf."""
    return Leaf(tuple(np.shape(array)), np.dtype(array.dtype), lambda: np.asarray(array))


def from_tree(params: Mapping[str, Any]) -> dict[str, Leaf]:
    """Returns nested parameters as leaves."""
    return {path: leaf_of(value) for path, value in flax.traverse_util.flatten_dict(params, sep="/").items()}


def to_tree(leaves: Leaves) -> dict[str, Any]:
    """Reads all leaves into nested parameters of numpy arrays."""
    return flax.traverse_util.unflatten_dict({path: leaf.read() for path, leaf in leaves.items()}, sep="/")


def as_type(leaves: Leaves, dtype: np.dtype) -> dict[str, Leaf]:
    """Returns the leaves in another dtype, converted when they are read."""

    def converted(leaf: Leaf) -> Leaf:
        def part(place: slice | int) -> np.ndarray:
            return leaf.part(place).astype(dtype, copy=False)

        return Leaf(leaf.shape, dtype, lambda: leaf.read().astype(dtype, copy=False), part)

    return {path: converted(leaf) for path, leaf in leaves.items()}


class Renamed(Mapping[str, np.ndarray]):
    """Tensors under other names, read from the original tensors on each access."""

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        names: Mapping[str, str],
        added: Mapping[str, np.ndarray] | None = None,
    ):
        """Keeps the arguments.

        Args:
          tensors: The tensors by their original names.
          names: The original name of each wanted tensor, by its new name.
          added: Further tensors by their new names.
        """
        self._tensors, self._names, self._added = tensors, names, added or {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor by its new name."""
        return self._added[name] if name in self._added else self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from (name for name in self._added if name not in self._names)

    def __len__(self) -> int:
        return len(self._names.keys() | self._added.keys())
