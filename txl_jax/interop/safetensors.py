"""Files in the safetensors format, mapped into memory and written tensor by tensor.

The package of that name checks them.

The package's own writer needs all tensors in memory, and writes wrong numbers for arrays that are
not contiguous.
"""

import functools
import json
import math
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from txl_jax.errors import CheckpointError, rephrased
from txl_jax.interop.leaves import Leaf, Leaves
from txl_jax.runtime import storage

_METADATA = "__metadata__"
_DTYPES = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Contents(NamedTuple):
    """What a file contains."""

    # By name, read-only. Each read maps the file again, so that pages of a dropped array are freed.
    tensors: dict[str, Leaf]
    # What `write` was given as metadata. A stranger's file may have any text here.
    metadata: dict[str, str]


def read(path: str | os.PathLike[str], *, sha256: str | None = None) -> dict[str, Leaf]:
    """Returns the tensors of `read_contents`."""
    return read_contents(path, sha256=sha256).tensors


def read_contents(path: str | os.PathLike[str], *, sha256: str | None = None) -> Contents:
    """Returns a file's tensors by name, and its metadata.

    Raises `CheckpointError` if the file is corrupted, has a dtype unknown to numpy, or another
    `sha256`.
    """

    def part(entry: Mapping[str, Any], index: Any) -> np.ndarray:
        shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
        if not math.prod(shape):  # Nothing can be mapped.
            return np.empty(shape, dtype)[index]
        offset = start + entry["data_offsets"][0]
        return np.memmap(local, dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)[index]

    damaged = (
        f"{path} is corrupted or not a safetensors file (%s). Check the path, or copy it again."
    )
    with rephrased(damaged, OSError, SafetensorError, ValueError, to=CheckpointError):
        # A copy of a remote file is there as long as a leaf has `part`.
        local = storage.local_copy(path, part)
        if sha256 is not None and storage.sha256(local) != sha256:
            raise ValueError("its sha256 does not match")
        with safe_open(local, "np"):  # Checks all but names that occur twice.
            pass
        with open(local, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
            start = file.tell()
        metadata = dict(header.pop(_METADATA, None) or {})
        if unknown := {entry["dtype"] for entry in header.values()} - _DTYPES.keys():
            raise ValueError(
                f"its dtypes must be one of {', '.join(_DTYPES)}, got {', '.join(sorted(unknown))}"
            )
    tensors = {
        name: Leaf(tuple(entry["shape"]), _DTYPES[entry["dtype"]], functools.partial(part, entry))
        for name, entry in header.items()
    }
    return Contents(tensors, metadata)


def write(
    path: str | os.PathLike[str], leaves: Leaves, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes and syncs a file, with one tensor at a time in memory.

    Raises `ValueError` if the format does not support a dtype, or a leaf does not match its
    description.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    # Wide dtypes come first, so that every tensor begins at a multiple of its item size.
    names, end = sorted(leaves, key=lambda name: -leaves[name].dtype.itemsize), 0
    for name in names:
        leaf = leaves[name]
        if leaf.dtype not in _CODES:
            raise ValueError(
                f"tensor {name} has dtype {leaf.dtype}, which safetensors files cannot store"
            )
        begin, end = end, end + math.prod(leaf.shape) * leaf.dtype.itemsize
        header[name] = {
            "dtype": _CODES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            array, leaf = leaves[name].read(), leaves[name]
            if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"tensor {name} is {array.dtype}{array.shape}, described as "
                    f"{leaf.dtype}{leaf.shape}"
                )
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("its header has a duplicate name")
    return found
