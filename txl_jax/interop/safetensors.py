"""Files in the safetensors format: checked by the package of that name, mapped into memory, written tensor by tensor.

The package's own writer needs all tensors in memory, and writes wrong numbers for arrays that are not contiguous.
"""

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from txl_jax.errors import CheckpointError
from txl_jax.interop.leaves import Leaf, Leaves
from txl_jax.runtime.storage import local_copy

_METADATA = "__metadata__"
_DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class SafeTensors(Mapping[str, Leaf]):
    """The tensors of a file by name, read-only. Each read maps one anew, so that pages of a dropped array are freed.

    `local` is the file's path, or the path of its copy on this machine if the file is on object storage.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the header, or raises `CheckpointError` if the file is damaged or has a dtype that numpy lacks."""
        self.path = os.fspath(path)
        try:
            self.local = local_copy(self.path, self)
            with safe_open(self.local, "np"):  # Checks all but names that occur twice.
                pass
            with open(self.local, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                self._header = json.loads(file.read(length), object_pairs_hook=_distinct)
                self._start = file.tell()
            self._header.pop(_METADATA, None)
            if unknown := {entry["dtype"] for entry in self._header.values()} - _DTYPES.keys():
                raise ValueError(f"it has dtype {', '.join(sorted(unknown))}, must be one of {', '.join(_DTYPES)}")
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read as a safetensors file ({error}). Check the path, or copy the file again."
            ) from error

    def __getitem__(self, name: str) -> Leaf:
        entry = self._header[name]
        shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
        offset = self._start + entry["data_offsets"][0]

        def part(index: Any) -> np.ndarray:
            if not math.prod(shape):  # Nothing can be mapped.
                return np.empty(shape, dtype)[index]
            return np.memmap(self.local, dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)[index]

        return Leaf(shape, dtype, part)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)


def write(path: str | os.PathLike[str], leaves: Leaves, *, metadata: Mapping[str, str] | None = None) -> str:
    """Writes and syncs a file, with one tensor at a time in memory; returns the sha256 of its bytes in hexadecimal.

    Raises:
      ValueError: If the format has no such dtype, or a leaf reads as another array than it describes.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    # Wide dtypes come first, so that every tensor begins at a multiple of its item size.
    names, end = sorted(leaves, key=lambda name: -leaves[name].dtype.itemsize), 0
    for name in names:
        leaf = leaves[name]
        if leaf.dtype not in _CODES:
            raise ValueError(f"tensor {name} has dtype {leaf.dtype}, which safetensors files cannot store")
        begin, end = end, end + math.prod(leaf.shape) * leaf.dtype.itemsize
        header[name] = {"dtype": _CODES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for data in itertools.chain([struct.pack("<Q", len(text)), text], _contents(names, leaves)):
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _contents(names: list[str], leaves: Leaves) -> Iterator[Any]:
    """Reads tensor after tensor as arrays of bytes, in row-major order."""
    for name in names:
        array, leaf = leaves[name].read(), leaves[name]
        if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
            raise ValueError(f"tensor {name} is {array.dtype}{array.shape}, described as {leaf.dtype}{leaf.shape}")
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("its header has a name twice")
    return found
