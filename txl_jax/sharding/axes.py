"""Logical names of array axes, and the one table that maps them to the axes of the device mesh.

Parameters, memory, activations and batches are labelled with these names; `normal`, `zeros` and
`ones` are initializers of parameters that carry them.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from txl_jax.sharding.mesh import DATA, FSDP, TENSOR, ambient_mesh

BATCH = "batch"  # Rows of text.
LENGTH = "length"  # Positions of a segment or of the memory.
LAYERS = "layers"  # Stacked layers of `nn.scan`.
EMBED = "embed"  # D, the residual stream.
CLUSTER_EMBED = "cluster_embed"  # Width of a cluster's embedding, before its projection.
HEADS = "heads"  # H.
HEAD_DIM = "head_dim"  # E.
INNER = "inner"  # F.
VOCAB = "vocab"  # Rows of an embedding table or of its bias.
CLUSTERS = "clusters"  # Tail clusters in the head of the adaptive softmax.
POSITIONS = "positions"  # Distances of a learned table.
NORM = "norm"  # Scale and bias of a layer norm.

_MESH_AXES: dict[str, Any] = {
    BATCH: (DATA, FSDP),
    EMBED: FSDP,
    **dict.fromkeys((HEADS, INNER, VOCAB), TENSOR),
    **dict.fromkeys((LENGTH, LAYERS, CLUSTER_EMBED, HEAD_DIM, CLUSTERS, POSITIONS, NORM)),
}


def spec(*names: str | None) -> PartitionSpec:
    """Returns the mesh axes of an array with these logical axes. None replicates an axis.

    Raises `ValueError` if a name has no row in the table (flax would silently replicate it).
    """
    for name in names:
        if name is not None and name not in _MESH_AXES:
            raise ValueError(f"a logical axis must be one of {', '.join(_MESH_AXES)}, got {name!r}")
    return PartitionSpec(*(None if name is None else _MESH_AXES[name] for name in names))


def named_sharding(mesh: Mesh, *names: str | None) -> NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(*names))


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """Returns the shardings of a tree of parameters boxed with logical axis names.

    The result is shaped like `nn.unbox(tree)`.

    The sizes of vocabularies and clusters come from the text (205 bytes in enwik8). A table whose
    tokens do not divide over `tensor` is replicated there, and over `fsdp` its tokens are sharded
    if its width does not divide. (Sharding the width over `tensor` would need an all-gather for
    every use, which reads parts of the tokens.)

    An optimizer's state has the boxes of its parameters, as optax maps over them. Bare arrays are
    replicated, and so is an array that its box does not fit, such as Adafactor's means of rows.
    """

    def place(names: PartitionSpec, array: Any) -> Any:
        # An empty box: Muon's state has one for each of Adam's parameters.
        if not jax.tree.leaves(array):
            return array
        if len(names) != array.ndim or tuple(names) == (VOCAB,):  # A bias is sliced at the cutoffs.
            return named_sharding(mesh)
        if VOCAB in names:
            return NamedSharding(mesh, _of_table(mesh, dict(zip(names, array.shape, strict=True))))
        placed = named_sharding(mesh, *names)
        try:
            placed.shard_shape(array.shape)
        except ValueError:  # Adafactor's placeholder [N, 1] of a vector [N, F].
            return named_sharding(mesh)
        return placed

    return jax.tree.map(
        place,
        nn.get_partition_spec(tree),
        nn.unbox(tree),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def _of_table(mesh: Mesh, sizes: dict[str, int]) -> PartitionSpec:
    """Returns the mesh axes of an embedding table, from its sizes by logical axis."""
    found: dict[str, list[str]] = {name: [] for name in sizes}

    def divides(name: str, axis: str) -> bool:
        return sizes[name] % math.prod(mesh.shape[other] for other in (axis, *found[name])) == 0

    if divides(VOCAB, TENSOR):
        found[VOCAB].append(TENSOR)
    for name in (CLUSTER_EMBED, VOCAB):
        if divides(name, FSDP):
            found[name].append(FSDP)
            break
    return PartitionSpec(*(tuple(axes_of) or None for axes_of in found.values()))


def batch_axes(mesh: Mesh | AbstractMesh, batch_size: int) -> str | None:
    """Returns `BATCH` if the rows of a batch divide among the devices, else None (replicated)."""
    return BATCH if batch_size % num_batch_shards(mesh) == 0 else None


def num_batch_shards(mesh: Mesh | AbstractMesh | None = None) -> int:
    """Returns how many devices share the rows of a batch, on the ambient mesh if `mesh` is None."""
    mesh = ambient_mesh() if mesh is None else mesh
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in _MESH_AXES[BATCH])


def num_vocab_shards() -> int:
    """Returns how many devices of the ambient mesh share the tokens of a cluster."""
    mesh = ambient_mesh()
    return 1 if mesh is None else mesh.shape[_MESH_AXES[VOCAB]]


def vocab_axis() -> str | None:
    """Returns the axis of the ambient mesh that shares the tokens of a cluster.

    The result is None if the axis has one device.
    """
    return _MESH_AXES[VOCAB] if num_vocab_shards() > 1 else None


# Makes a boxed parameter (`nn.LogicallyPartitioned`), which `self.param` unboxes.
Initializer = Callable[..., Any]


def normal(stddev: float, *names: str | None) -> Initializer:
    """Returns an initializer N(0, stddev) for a parameter with these logical axes."""
    return nn.with_logical_partitioning(nn.initializers.normal(stddev), names)


def zeros(*names: str | None) -> Initializer:
    """Returns an initializer of zeros for a parameter with these logical axes."""
    return nn.with_logical_partitioning(nn.initializers.zeros_init(), names)


def ones(*names: str | None) -> Initializer:
    """Returns an initializer of ones for a parameter with these logical axes."""
    return nn.with_logical_partitioning(nn.initializers.ones_init(), names)
