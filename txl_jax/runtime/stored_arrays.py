"""Opens the arrays of a checkpoint that was just written, to find missing parts.

Otherwise a missing part would show only at a restore.

Orbax stores arrays in TensorStore's OCDBT format, a key-value store with these keys for each array:

    params.q/.zarray     JSON: shape, dtype and the shape of a chunk
    params.q/0.1         the chunk in the first row and second column of the grid of chunks

Each process writes a separate store. At the end process 0 merges them, which only copies keys. If
it does not find a store, the checkpoint is finished without that process's arrays, and without an
error.
"""

import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from txl_jax.errors import first_line
from txl_jax.runtime.storage import AnyPath, is_remote

# For the index of the store, which would be read again for each key otherwise. Orbax uses the same
# size.
_CACHE_BYTES = 100_000_000
_SECONDS_BETWEEN_TRIES = 1.0


class StoredArray(NamedTuple):
    """An array of a checkpoint."""

    shape: tuple[int, ...]
    # Index of the first element that this process holds.
    start: tuple[int, ...]


def describe(tree: Any) -> dict[str, StoredArray]:
    """Returns the arrays of a tree by the names that Orbax stores them under. Reads no values."""
    arrays = {}
    for name, leaf in ocp.tree.to_flat_dict(tree, sep=".").items():
        shape = tuple(np.shape(leaf))
        start = (0,) * len(shape)
        if isinstance(leaf, jax.Array):
            # Every process opens a chunk that it has written itself, or that holds the same values.
            shards = leaf.sharding.addressable_devices_indices_map(shape)
            first_shard = next(iter(shards.values())) or ()
            start = tuple(dimension.start or 0 for dimension in first_shard)
        arrays[name] = StoredArray(shape, start)
    return arrays


def find_missing(
    folder: AnyPath, arrays: Mapping[str, StoredArray], *, seconds: float = 0.0
) -> str | None:
    """Opens each array, and reads the first byte of one of its chunks.

    Args:
      folder: The directory of a checkpoint's arrays.
      arrays: The arrays that must be there, as `describe` returns them.
      seconds: Network file systems may show new files late. Until then a missing array is looked
        for again.

    Returns:
      None, or a clause that names an array and its problem.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            missing = _find_missing(os.fspath(folder), arrays)
        except Exception as error:  # noqa: BLE001 (damage shows as nearly any type)
            missing = f"its arrays cannot be opened ({first_line(error)})"
        if missing is None or time.monotonic() >= until:
            return missing
        time.sleep(_SECONDS_BETWEEN_TRIES)


def _find_missing(folder: str, arrays: Mapping[str, StoredArray]) -> str | None:
    # What was read in this call is current enough to be used again.
    began = time.time()
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    store = tensorstore.KvStore.open(
        {"driver": "ocdbt", "base": _base(folder)}, context=context
    ).result()

    # All requests are under way before the first answer is waited for.
    headers = {name: store.read(f"{name}/.zarray", staleness_bound=began) for name in arrays}
    chunks = {}
    for name, array in arrays.items():
        header = headers[name].result()
        if header.state != "value":
            return f"the array {name} is missing"
        zarray = json.loads(header.value)
        if tuple(zarray["shape"]) != array.shape:
            return f"the array {name} has shape {zarray['shape']} instead of {list(array.shape)}"
        key = _chunk_key(array.start, zarray["chunks"])
        chunks[name] = _read_first_byte(store, f"{name}/{key}", began)
    for name, chunk in chunks.items():
        if not chunk.result().value:
            return f"values of the array {name} are missing"
    return None


def _base(folder: str) -> Any:
    """Returns TensorStore's description of a directory or bucket.

    As a URL, a percent sign would need an escape.
    """
    if not is_remote(folder):
        return {"driver": "file", "path": f"{folder}/"}
    scheme, _, rest = folder.partition("://")
    bucket, _, path = rest.partition("/")
    driver = "gcs" if scheme == "gs" else scheme
    return {"driver": driver, "bucket": bucket, "path": f"{path}/"}


def _chunk_key(start: tuple[int, ...], chunk_shape: list[int]) -> str:
    """Returns the last part of a chunk's key, which an array without dimensions has too.

    >>> _chunk_key((4, 6), [2, 6]), _chunk_key((), [])
    ('2.1', '0')
    """
    # An array's place in the grid of chunks, one number per dimension.
    places = [str(index // size) for index, size in zip(start, chunk_shape, strict=True)]
    return ".".join(places) or "0"


def _read_first_byte(store: Any, key: str, began: float) -> Any:
    """Starts to read the first byte of a value.

    TensorStore before 0.1.80 or so can only read all of it.
    """
    try:
        return store.read(key, byte_range=slice(0, 1), staleness_bound=began)
    except TypeError:
        return store.read(key, staleness_bound=began)
