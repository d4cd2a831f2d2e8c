"""Parameters by path that are read one at a time, so that a conversion needs the memory of one array, not of all."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import flax.traverse_util
import numpy as np


class Leaf(NamedTuple):
    """One array: its shape and type, and the function that reads it.

    Attributes:
      read: returns the array; each call reads anew and keeps nothing.
      read_entry: returns one entry along the first axis, for a leaf that is made of parts; None: `read` is as fast.
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


# By path, "stack/layers/attention/query" for params["stack"]["layers"]["attention"]["query"].
Leaves = Mapping[str, Leaf]


def leaf_of(array: Any) -> Leaf:
    """Returns the leaf of an array that is in memory already."""
    return Leaf(tuple(np.shape(array)), np.dtype(array.dtype), lambda: np.asarray(array))


def from_tree(params: Mapping[str, Any]) -> dict[str, Leaf]:
    """Returns the leaves of nested parameters; the arrays stay in memory."""
    return {path: leaf_of(value) for path, value in flax.traverse_util.flatten_dict(params, sep="/").items()}


def to_tree(leaves: Leaves) -> dict[str, Any]:
    """Reads all leaves into nested parameters of numpy arrays."""
    return flax.traverse_util.unflatten_dict({path: leaf.read() for path, leaf in leaves.items()}, sep="/")


def as_type(leaves: Leaves, dtype: np.dtype) -> dict[str, Leaf]:
    """Returns the leaves in another type; each is converted when it is read."""

    def converted(leaf: Leaf) -> Leaf:
        return Leaf(
            leaf.shape,
            dtype,
            lambda: leaf.read().astype(dtype, copy=False),
            lambda entry: leaf.part(entry).astype(dtype, copy=False),
        )

    return {path: converted(leaf) for path, leaf in leaves.items()}


def num_bytes(leaves: Leaves) -> int:
    """Returns the size of all arrays together."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize for leaf in leaves.values())


class Renamed(Mapping[str, np.ndarray]):
    """Tensors under other names: each access asks the tensors that it was made of, so that lazy ones stay so."""

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        names: Mapping[str, str],
        added: Mapping[str, np.ndarray] | None = None,
    ):
        """Keeps the arguments.

        Args:
          tensors: the tensors by their own names.
          names: the own name of each tensor that is wanted, by its new name.
          added: further tensors, by their new names.
        """
        self._tensors = tensors
        self._names = names
        self._added = added or {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor by its new name."""
        return self._added[name] if name in self._added else self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from (name for name in self._added if name not in self._names)

    def __len__(self) -> int:
        return len(self._names.keys() | self._added.keys())
