"""Arrays by name, read one at a time, so that a conversion needs memory for only one of them."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.traverse_util
import numpy as np

from txl_jax.errors import reading
from txl_jax.runtime import distributed


class Leaf(NamedTuple):
    """One array: its shape and dtype, and a function that reads a part of it.

    The function reads the part again in each call.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    # Takes an index: slices, the number of an entry of the first axis, or `...`.
    part: Callable[[Any], np.ndarray]

    def read(self) -> np.ndarray:
        """Returns the whole array."""
        return self.part(...)


# A file's tensors by name, or parameters by path: "stack/layers/attention/query".
Leaves = Mapping[str, Leaf]


def leaf_of(array: Any) -> Leaf:
    """Returns an array in memory as a leaf.

    If the array is sharded over multiple processes, each read of it is a collective.
    """

    def part(index: Any) -> np.ndarray:
        return distributed.to_host(array)[index]

    return Leaf(tuple(np.shape(array)), np.dtype(array.dtype), part)


def is_same(a: Leaf, b: Leaf) -> bool:
    """Returns whether two leaves have equal values. If they are one leaf, it is not read."""
    if a is b:
        return True
    return a.shape == b.shape and np.array_equal(a.read(), b.read())


def from_tree(arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    """Returns arrays by name, or nested parameters, as leaves."""
    flat = flax.traverse_util.flatten_dict(arrays, sep="/")
    return {path: leaf_of(value) for path, value in flat.items()}


def guarded(leaves: Leaves, *, name: str) -> dict[str, Leaf]:
    """Returns the leaves of a file, whose name begins every error when they are read."""

    def guard(leaf: Leaf) -> Leaf:
        def part(index: Any) -> np.ndarray:
            with reading(name):
                return leaf.part(index)

        return leaf._replace(part=part)

    return {path: guard(leaf) for path, leaf in leaves.items()}


def as_type(leaves: Leaves, dtype: np.dtype) -> dict[str, Leaf]:
    """Returns the leaves in another dtype, converted when they are read."""

    def converted(leaf: Leaf) -> Leaf:
        def part(index: Any) -> np.ndarray:
            return leaf.part(index).astype(dtype, copy=False)

        return leaf._replace(dtype=dtype, part=part)

    return {path: converted(leaf) for path, leaf in leaves.items()}


def digest(leaves: Leaves) -> str:
    """Returns the sha256 of names, dtypes, shapes and values, in hexadecimal.

    One array at a time is read, in the order of the names.
    """
    hasher = hashlib.sha256()
    for name in sorted(leaves):
        values = np.ascontiguousarray(leaves[name].read())
        hasher.update(f"{name} {values.dtype} {values.shape}\n".encode())
        hasher.update(values.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
