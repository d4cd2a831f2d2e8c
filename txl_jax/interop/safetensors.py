"""Files in the safetensors format, mapped into memory and written tensor by tensor.

The safetensors package checks a file's header. Its own writer needs all tensors in memory, and
writes wrong numbers for arrays that are not contiguous.
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

# A file begins with the header's length in bytes. The header is JSON, and the tensors follow it.
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8  # The tensors begin at a multiple of this many bytes.
_METADATA = "__metadata__"
# Dtypes by the codes that the format has for them, as numpy and ml_dtypes call them.
_NUMPY_NAMES: dict[str, Any] = {
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": ml_dtypes.bfloat16,
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
_DTYPES = {code: np.dtype(dtype) for code, dtype in _NUMPY_NAMES.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class Contents(NamedTuple):
    """A file's tensors and metadata."""

    # Tensors by name, read-only. Each read maps the file again, so that a dropped array frees its
    # pages.
    tensors: dict[str, Leaf]
    # The metadata that was passed to `write`. A stranger's file may have any text here.
    metadata: dict[str, str]


def read(path: str | os.PathLike[str], *, sha256: str | None = None) -> dict[str, Leaf]:
    """Returns a file's tensors by name. Arguments and errors are those of `read_contents`."""
    return read_contents(path, sha256=sha256).tensors


def read_contents(path: str | os.PathLike[str], *, sha256: str | None = None) -> Contents:
    """Returns a file's tensors by name, and its metadata.

    Args:
      path: A file, which may be remote.
      sha256: Expected sha256 of the file in hexadecimal, or None for any.

    Raises:
      CheckpointError: If the file is corrupted, has a dtype unknown to numpy, or has another
        `sha256`.
    """

    def part(entry: Mapping[str, Any], index: Any) -> np.ndarray:
        shape = tuple(entry["shape"])
        dtype = _DTYPES[entry["dtype"]]
        # An empty part of a file cannot be mapped.
        if not math.prod(shape):
            return np.empty(shape, dtype)[index]
        offset = tensors_begin + entry["data_offsets"][0]
        return np.memmap(local, dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)[index]

    damaged = (
        f"{path} is corrupted or not a safetensors file (%s). Check the path, or copy it again."
    )
    with rephrased(damaged, OSError, SafetensorError, ValueError, to=CheckpointError):
        # A copy of a remote file is there as long as a leaf has `part`.
        local = storage.local_copy(path, part)
        # Bytes that changed on a disk or in a copy would be other numbers.
        if sha256 is not None and storage.sha256(local) != sha256:
            raise ValueError("its sha256 does not match")
        # The package checks that the header is JSON of a bounded length, that shapes and dtypes
        # match the offsets, and that the tensors fill the file without overlap. So no tensor is
        # larger than the file or reaches beyond its end. It does not check the names.
        with safe_open(local, "np"):
            pass
        with open(local, "rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
            tensors_begin = file.tell()
        metadata = dict(header.pop(_METADATA, None) or {})

        # Newer dtypes, such as those of 8 bits, would have no shape of numpy.
        unknown = {entry["dtype"] for entry in header.values()} - _DTYPES.keys()
        if unknown:
            raise ValueError(
                f"its dtypes must be one of {', '.join(_DTYPES)}, got {', '.join(sorted(unknown))}"
            )

    tensors: dict[str, Leaf] = {}
    for name, entry in header.items():
        dtype = _DTYPES[entry["dtype"]]
        tensors[name] = Leaf(tuple(entry["shape"]), dtype, functools.partial(part, entry))
    return Contents(tensors, metadata)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object's entries.

    Raises:
      ValueError: If a name occurs twice.
    """
    entries = dict(pairs)
    # The package and this reader would disagree on which of two tensors has the name.
    if len(entries) != len(pairs):
        raise ValueError("its header has a duplicate name")
    return entries


def write(
    path: str | os.PathLike[str], leaves: Leaves, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes and syncs a file, with one tensor at a time in memory.

    Raises:
      ValueError: If the format does not support a dtype, or a leaf does not match its description.
    """
    header: dict[str, Any] = {}
    if metadata:
        header[_METADATA] = dict(metadata)

    # Wide dtypes come first, so that every tensor begins at a multiple of its item size.
    names = sorted(leaves, key=lambda name: -leaves[name].dtype.itemsize)
    begin = 0
    for name in names:
        leaf = leaves[name]
        # Complex numbers, for instance, have no code.
        if leaf.dtype not in _CODES:
            raise ValueError(
                f"tensor {name} has dtype {leaf.dtype}, which safetensors files cannot store"
            )
        end = begin + math.prod(leaf.shape) * leaf.dtype.itemsize
        header[name] = {
            "dtype": _CODES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [begin, end],
        }
        begin = end

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in names:
            leaf = leaves[name]
            array = leaf.read()
            # An array of another size would shift all tensors after it.
            if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(
                    f"tensor {name} is {array.dtype}{array.shape}, described as "
                    f"{leaf.dtype}{leaf.shape}"
                )
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
