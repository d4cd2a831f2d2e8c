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


class SafeTensors(Mapping[str, Leaf]):
    """The tensors of a file by name, read-only. Each read maps one anew, so that pages of a dropped array are freed.

    Attributes:
      path: The file.
      local: The same file, or its copy on this machine if it is on object storage.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the header.

        Raises:
          CheckpointError: If the file cannot be read, is damaged, or has a dtype that numpy does not.
        """
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
            for name, entry in self._header.items():
                if entry["dtype"] not in _DTYPES:
                    raise ValueError(f"tensor {name} has dtype {entry['dtype']}, must be one of {', '.join(_DTYPES)}")
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror or error}). Check the path.") from error
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} is damaged or not a safetensors file ({error}). Copy or download it again."
            ) from error

    def __getitem__(self, name: str) -> Leaf:
        """Returns a tensor."""
        entry = self._header[name]
        shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]

        def read() -> np.ndarray:
            if not math.prod(shape):
                return np.empty(shape, dtype)
            offset = self._start + entry["data_offsets"][0]
            return np.memmap(self.local, dtype, mode="r", offset=offset, shape=shape).view(np.ndarray)

        return Leaf(shape, dtype, read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __len__(self) -> int:
        return len(self._header)


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


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found
