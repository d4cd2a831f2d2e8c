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
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    **{f"I{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(bool),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class SafeTensors(Mapping[str, np.ndarray]):
    """The tensors of a file by name. Each access maps a tensor anew, so that pages of a dropped one are freed.

    Attributes:
      path: The file.
      local: The same file, or its copy on this machine if it is on object storage.
      shapes: The shape of each tensor.
      dtypes: The dtype of each tensor.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the header.

        Raises:
          CheckpointError: If the file cannot be read, is damaged, or has a dtype that numpy does not.
        """
        self.path = os.fspath(path)
        try:
            self.local = local_copy(self.path, self)
            with safe_open(self.local, "np"):  # Checks header and size.
                header, start = _read_header(self.local)
            header.pop(_METADATA, None)
            self.shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
            self.dtypes = {name: _dtype(name, entry["dtype"]) for name, entry in header.items()}
            self._offsets = {name: start + entry["data_offsets"][0] for name, entry in header.items()}
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror or error}). Check the path.") from error
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} is damaged or not a safetensors file ({error}). Copy or download it again."
            ) from error

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor as a read-only map of the file."""
        shape, dtype = self.shapes[name], self.dtypes[name]
        if not math.prod(shape):
            return np.empty(shape, dtype)
        return np.memmap(self.local, dtype, mode="r", offset=self._offsets[name], shape=shape).view(np.ndarray)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def leaf(self, name: str) -> Leaf:
        """Returns a tensor as a leaf."""
        return Leaf(self.shapes[name], self.dtypes[name], lambda: self[name])


def write(path: str | os.PathLike[str], leaves: Leaves, *, metadata: Mapping[str, str] | None = None) -> str:
    """Writes a file and syncs it to disk, with one tensor at a time in memory.

    Args:
      path: The file, which is replaced.
      leaves: The tensors by name.
      metadata: Texts for the header.

    Returns:
      The sha256 of the file's bytes, in hexadecimal.

    Raises:
      OSError: If the file cannot be written.
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
    tensors = (_read_bytes(name, leaves[name]) for name in names)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for part in itertools.chain([struct.pack("<Q", len(text)), text], tensors):
            digest.update(part)
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _read_bytes(name: str, leaf: Leaf) -> Any:
    """Reads a leaf as an array of its bytes, in row-major order."""
    array = leaf.read()
    if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
        raise ValueError(f"tensor {name} is {array.dtype}{array.shape}, described as {leaf.dtype}{leaf.shape}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _read_header(path: str) -> tuple[dict[str, Any], int]:
    """Returns the header and the position after it. The package has checked all but names that occur twice."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length), object_pairs_hook=_distinct), file.tell()


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found


def _dtype(name: str, code: str) -> np.dtype:
    if code not in _DTYPES:
        raise ValueError(f"tensor {name} has dtype {code}, must be one of {', '.join(_DTYPES)}")
    return _DTYPES[code]
