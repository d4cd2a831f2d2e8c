"""Shardings of batches and memories over a mesh, and their transfer to the devices."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from txl_jax import sharding
from txl_jax.config import EvalConfig, TrainConfig
from txl_jax.errors import UserError
from txl_jax.memory import Memory
from txl_jax.segments import Segments
from txl_jax.sharding import axes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings of batches and memories over a mesh, and the transfer to the devices."""

    mesh: Mesh

    def own_rows(self, batch_size: int) -> np.ndarray:
        """Returns the row numbers of a batch that this process's devices hold, ascending: those that it must read.

        They need not be contiguous: where a mesh is laid over a torus, the chips of a host form a tile of it.

        Raises:
          UserError: they hold none, as the mesh does not include them.
        """
        placed = sharding.named_sharding(self.mesh, sharding.batch_axes(self.mesh, batch_size))
        own = placed.addressable_devices_indices_map((batch_size,))
        if not own:
            raise UserError(
                f"no device of process {jax.process_index()} is in the mesh {dict(self.mesh.shape)}; start fewer "
                "processes, or use all devices with --mesh.data=none"
            )
        return np.unique(np.concatenate([np.arange(batch_size)[index] for index in own.values()]))

    def place(self, segments: Segments, *, batch_size: int | None = None) -> Segments:
        """Transfers segments to the devices, with the rows sharded like those of the memory.

        Args:
          segments: the rows that this process reads (see `own_rows`).
          batch_size: B, over all processes; None: this process has read all rows.
        """
        own = np.arange(segments.inputs.shape[1]) if batch_size is None else self.own_rows(batch_size)
        batch_size = batch_size or len(own)

        def put(placed: NamedSharding, array: np.ndarray) -> jax.Array:
            def of_device(index: Any) -> Any:
                rows = np.arange(batch_size)[index[1]]
                return array[:, np.searchsorted(own, rows)]

            return jax.make_array_from_callback((array.shape[0], batch_size, *array.shape[2:]), placed, of_device)

        return jax.tree.map(put, self.segment_shardings(batch_size), segments)

    def memory_shardings(self, batch_size: int) -> Memory:
        """Returns the shardings of a training memory."""
        rows = sharding.batch_axes(self.mesh, batch_size)
        return Memory(hidden=self.named(axes.LAYERS, rows, axes.LENGTH, None), valid=self.named(rows))

    def segment_shardings(self, batch_size: int) -> Segments:
        """Returns the shardings of S segments."""
        rows = sharding.batch_axes(self.mesh, batch_size)
        tokens = self.named(None, rows, axes.LENGTH)
        return Segments(inputs=tokens, targets=tokens, weights=tokens, reset=self.named(None, rows))

    def named(self, *logical_axes: Any) -> Any:
        """Returns the sharding of an array by its logical axes, in place of the array in trees of shardings."""
        return sharding.named_sharding(self.mesh, *logical_axes)

    def abstract_segments(self, lengths: TrainConfig | EvalConfig) -> Segments:
        """Returns shapes, types and shardings of the segments that one call of the train or eval step takes."""
        shape = (lengths.segments_per_call, lengths.batch_size, lengths.segment_len)
        shardings: Any = self.segment_shardings(lengths.batch_size)

        def abstract(name: str, shape: tuple[int, ...], dtype: str) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=getattr(shardings, name))

        return Segments(
            inputs=abstract("inputs", shape, "int32"),
            targets=abstract("targets", shape, "int32"),
            weights=abstract("weights", shape, "float32"),
            reset=abstract("reset", shape[:2], "bool"),
        )
