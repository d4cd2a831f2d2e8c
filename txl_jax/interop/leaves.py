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
    return Leaf(
        tuple(np.shape(array)),
        np.dtype(array.dtype),
        lambda index: distributed.to_host(array)[index],
    )


def is_same(a: Leaf, b: Leaf) -> bool:
    """Returns whether two leaves have equal values, without reading them if they are one."""
    return a is b or (a.shape == b.shape and np.array_equal(a.read(), b.read()))


def from_tree(arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    """Returns arrays by name, or nested parameters, as leaves."""
    return {
        path: leaf_of(value)
        for path, value in flax.traverse_util.flatten_dict(arrays, sep="/").items()
    }


def guarded(leaves: Leaves, *, name: str) -> dict[str, Leaf]:
    """Returns the leaves of a file, which is named by whatever goes wrong when they are read."""

    def guard(leaf: Leaf) -> Leaf:
        def part(index: Any) -> np.ndarray:
            with reading(name):
                return leaf.part(index)

        return leaf._replace(part=part)

    return {path: guard(leaf) for path, leaf in leaves.items()}


def as_type(leaves: Leaves, dtype: np.dtype) -> dict[str, Leaf]:
    """Returns the leaves in another dtype, converted when they are read."""

    def converted(leaf: Leaf) -> Leaf:
        return leaf._replace(
            dtype=dtype, part=lambda index: leaf.part(index).astype(dtype, copy=False)
        )

    return {path: converted(leaf) for path, leaf in leaves.items()}


def digest(leaves: Leaves) -> str:
    """Returns the sha256 of names, dtypes, shapes and values, in hexadecimal.

    One array at a time is read, in the order of the names.
    """
    total = hashlib.sha256()
    for name in sorted(leaves):
        values = np.ascontiguousarray(leaves[name].read())
        total.update(f"{name} {values.dtype} {values.shape}\n".encode())
        total.update(values.reshape(-1).view(np.uint8).data)
    return total.hexdigest()
