"""Arrays by name, read one at a time, so that a conversion needs memory for one array instead of all."""

from collections.abc import Callable, Mapping
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


# A file's tensors by name, or parameters by path: "stack/layers/attention/query".
Leaves = Mapping[str, Leaf]


def leaf_of(array: Any) -> Leaf:
    """Returns an array in memory as a leaf."""
    return Leaf(tuple(np.shape(array)), np.dtype(array.dtype), lambda: np.asarray(array))


def is_same(a: Leaf, b: Leaf) -> bool:
    """Returns whether two leaves have equal values, without reading them if they are one."""
    return a is b or (a.shape == b.shape and np.array_equal(a.read(), b.read()))


def from_tree(arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    """Returns arrays by name, or nested parameters, as leaves."""
    return {path: leaf_of(value) for path, value in flax.traverse_util.flatten_dict(arrays, sep="/").items()}


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
