"""Files in the safetensors format: tensors by name, read as memory maps and written one after another.

The format is a number of 8 bytes (little endian), a JSON header of that length, and the tensors' bytes; the header has
type, shape and byte range of each tensor, and the ranges cover the rest of the file without gaps
(https://github.com/huggingface/safetensors). The package of that name has no writer that takes one tensor at a time.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from txl_jax.errors import CheckpointError
from txl_jax.interop.leaves import Leaf, Leaves
from txl_jax.runtime.storage import local_copy

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000  # Bytes; the limit of the reference implementation.
_METADATA = "__metadata__"
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class SafeTensors(Mapping[str, np.ndarray]):
    """The tensors of a file by name.

    Each access maps the tensor's bytes anew and read-only, so that the pages of one that is dropped are freed. A file
    on object storage is copied to this machine first.

    Attributes:
      path: the file.
      local: the same, or the copy.
      metadata: the texts of its header.
      shapes: the shape of each tensor.
      dtypes: the type of each tensor.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the header.

        Raises:
          CheckpointError: the file cannot be read, is truncated, or is no safetensors file.
        """
        self.path = os.fspath(path)
        try:
            self.local = local_copy(self.path, self)
            header, start, size = _read_header(self.local)
            self.metadata: dict[str, str] = _checked_metadata(header.pop(_METADATA, {}))
            entries = {name: _checked_entry(name, entry) for name, entry in header.items()}
            _check_ranges({name: (begin, end) for name, (_, _, begin, end) in entries.items()}, size - start)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}); check the path") from error
        except ValueError as error:
            raise CheckpointError(
                f"{self.path} is no safetensors file, or a damaged one ({error}); copy or download it again"
            ) from error
        self.dtypes = {name: dtype for name, (dtype, _, _, _) in entries.items()}
        self.shapes = {name: shape for name, (_, shape, _, _) in entries.items()}
        self._offsets = {name: start + begin for name, (_, _, begin, _) in entries.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor as a new read-only memory map."""
        shape, dtype = self.shapes[name], self.dtypes[name]
        if not math.prod(shape):
            return np.empty(shape, dtype)
        mapped = np.memmap(self.local, dtype, mode="r", offset=self._offsets[name], shape=shape)
        return mapped.view(np.ndarray)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def leaf(self, name: str) -> Leaf:
        """Returns a tensor as a leaf, which maps it when it is read."""
        return Leaf(self.shapes[name], self.dtypes[name], lambda: self[name])


def write(path: str | os.PathLike[str], leaves: Leaves, *, metadata: Mapping[str, str] | None = None) -> str:
    """Writes a file and syncs it to disk; one tensor at a time is in memory.

    Args:
      path: the file, which is replaced.
      leaves: the tensors by name.
      metadata: texts for the header.

    Returns:
      The sha256 of the file's bytes, in hexadecimal.

    Raises:
      OSError: it cannot be written.
      ValueError: a type that the format does not have, or a leaf that reads as another array than it is described as.
    """
    # Wide types first, so that every tensor begins at a multiple of its item's size.
    names = sorted(leaves, key=lambda name: -leaves[name].dtype.itemsize)
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name in names:
        leaf = leaves[name]
        if leaf.dtype not in _CODES:
            raise ValueError(f"tensor {name} has type {leaf.dtype}, which a safetensors file cannot hold")
        end = position + math.prod(leaf.shape) * leaf.dtype.itemsize
        header[name] = {"dtype": _CODES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for part in (len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded):
            digest.update(part)
            file.write(part)
        for name in names:
            array = _read_bytes(name, leaves[name])
            digest.update(array)
            file.write(array)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _read_bytes(name: str, leaf: Leaf) -> Any:
    """Reads a leaf as an array of its bytes, in row-major order."""
    array = leaf.read()
    if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
        raise ValueError(f"tensor {name} is {array.dtype}{array.shape}, described as {leaf.dtype}{leaf.shape}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _read_header(path: str) -> tuple[dict[str, Any], int, int]:
    """Returns the header, the position of the first tensor, and the file's size; raises `ValueError` for others."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or not 2 <= length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
            raise ValueError(f"it has {size:,} bytes and claims a header of {length:,}")
        header = json.loads(file.read(length), object_pairs_hook=_distinct)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return header, _LENGTH_BYTES + length, size


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _checked_metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its metadata are no texts by name")
    return found


def _checked_entry(name: str, entry: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Returns type, shape and byte range of a tensor; raises `ValueError` if they do not fit each other."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name} is not described by dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        raise ValueError(f"tensor {name} has type {code!r}, and the known ones are {', '.join(_DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {name} has shape {shape!r} and bytes {offsets!r}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _DTYPES[code].itemsize:
        raise ValueError(f"tensor {name} has shape {shape} of {code} in {end - begin:,} bytes")
    return _DTYPES[code], tuple(shape), begin, end


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(size) is int and size >= 0 for size in found)


def _check_ranges(ranges: Mapping[str, tuple[int, int]], size: int) -> None:
    """Raises `ValueError` unless the byte ranges cover `size` bytes without gaps."""
    position = 0
    for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin != position:
            raise ValueError(f"tensor {name} begins at byte {begin:,} and the one before ends at {position:,}")
        position = end
    if position != size:
        raise ValueError(f"its tensors take {position:,} bytes and the file has {size:,} for them")
