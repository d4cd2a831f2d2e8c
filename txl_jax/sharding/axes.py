"""Logical names of array axes, and the table that maps them to the axes of the device mesh.

Parameters, memory, activations and batches are labelled with these names. `normal`, `zeros` and
`ones` are initializers of parameters that carry them on a mesh.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from txl_jax.sharding.mesh import DATA, FSDP, TENSOR, ambient_mesh

BATCH = "batch"  # Rows of text.
LENGTH = "length"  # Positions of a segment or of the memory.
LAYERS = "layers"  # Stacked layers of `nn.scan`.
EMBED = "embed"  # D, the residual stream.
CLUSTER_EMBED = "cluster_embed"  # Width of a cluster's embedding, before its projection.
HEADS = "heads"  # H, the attention heads.
HEAD_DIM = "head_dim"  # E, the size of a head.
# E where the devices of `fsdp` share the work on it: position keys in training
# (`ops.head_projections`).
HEAD_PART = "head_part"
INNER = "inner"  # F, the inner size of the feed-forward network.
VOCAB = "vocab"  # Rows of an embedding table or of its bias.
CLUSTERS = "clusters"  # Tail clusters in the head of the adaptive softmax.
POSITIONS = "positions"  # Distances of a learned table.
NORM = "norm"  # Scale and bias of a layer norm.

# The mesh axes over which each logical axis is sharded, or None if it is replicated.
_MESH_AXES: dict[str, Any] = {
    BATCH: (DATA, FSDP),
    EMBED: FSDP,
    HEADS: TENSOR,
    INNER: TENSOR,
    VOCAB: TENSOR,
    LENGTH: None,
    LAYERS: None,
    CLUSTER_EMBED: None,
    HEAD_DIM: None,
    HEAD_PART: FSDP,
    CLUSTERS: None,
    POSITIONS: None,
    NORM: None,
}


def spec(*names: str | None) -> PartitionSpec:
    """Returns the mesh axes of an array with these logical axes. None replicates an axis.

    Raises:
      ValueError: If a name has no row in the table (flax would silently replicate it).
    """
    mesh_axes: list[Any] = []
    for name in names:
        if name is None:
            mesh_axes.append(None)
        elif name in _MESH_AXES:
            mesh_axes.append(_MESH_AXES[name])
        else:
            raise ValueError(f"a logical axis must be one of {', '.join(_MESH_AXES)}, got {name!r}")
    return PartitionSpec(*mesh_axes)


def named_sharding(mesh: Mesh, *names: str | None) -> NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    return NamedSharding(mesh, spec(*names))


def param_shardings(mesh: Mesh, tree: Any) -> Any:
    """Returns the sharding of each parameter, or of each array of an optimizer's state.

    Most parameters are sharded over the mesh axes of their logical axes (`spec`). The exceptions:

    - Embedding tables, axes (`VOCAB`, `CLUSTER_EMBED`). Their numbers of tokens come from the text
      (205 bytes in enwik8) and need not divide among the devices. The tokens are sharded over
      `tensor` if they divide, and otherwise replicated over it. Over `fsdp` the width is sharded
      if it divides, or else the tokens if they divide. The width is never sharded over `tensor`:
      the softmax uses a part of the tokens at a time, and each use would need an all-gather.
    - The softmax's bias, axis (`VOCAB`,), is replicated.
    - Arrays without a box are replicated. On one device, no parameter has a box.
    - Arrays whose shape does not fit their box are replicated. Adafactor's state has such arrays:
      optax copies a parameter's box to the means over its rows, which have one axis less.

    Args:
      mesh: The mesh.
      tree: Arrays, most of them in a box with their logical axes (`nn.LogicallyPartitioned`), as
        `init` creates them on a mesh. The shapes of the arrays are enough.

    Returns:
      A tree of `NamedSharding`, with the structure of `nn.unbox(tree)`.
    """
    return jax.tree.map(
        functools.partial(_param_sharding, mesh),
        nn.get_partition_spec(tree),
        nn.unbox(tree),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def _param_sharding(mesh: Mesh, names: PartitionSpec, array: Any) -> Any:
    """Returns the sharding of one array of `param_shardings`, boxed with these logical names."""
    # An empty box: Muon's state has one for each of Adam's parameters.
    if not jax.tree.leaves(array):
        return array

    replicated = named_sharding(mesh)
    # A bare array, or one that its box does not fit.
    if len(names) != array.ndim:
        return replicated
    # The softmax's bias is cut into clusters, whose sizes rarely divide. It is small.
    if tuple(names) == (VOCAB,):
        return replicated
    if VOCAB in names:
        sizes = dict(zip(names, array.shape, strict=True))
        return NamedSharding(mesh, _table_spec(mesh, sizes))

    sharded = named_sharding(mesh, *names)
    try:
        sharded.shard_shape(array.shape)
    except ValueError:
        # Adafactor's placeholder [N, 1] of a vector [N, F]. Parameters always divide in a run:
        # `runs.build` checks their sizes before.
        return replicated
    return sharded


def _table_spec(mesh: Mesh | AbstractMesh, sizes: dict[str, int]) -> PartitionSpec:
    """Returns the mesh axes of an embedding table [tokens, width] (`param_shardings`).

    `sizes` has the table's two sizes by logical axis, in the order of its axes: `VOCAB`, the
    number of tokens, and `CLUSTER_EMBED`, the width of their vectors before the projection to D.
    """
    mesh_axes: dict[str, list[str]] = {name: [] for name in sizes}

    def divides(name: str, mesh_axis: str) -> bool:
        """Returns whether the axis can also be sharded over `mesh_axis`."""
        num_shards = math.prod(mesh.shape[axis] for axis in [mesh_axis, *mesh_axes[name]])
        return sizes[name] % num_shards == 0

    if divides(VOCAB, TENSOR):
        mesh_axes[VOCAB].append(TENSOR)

    # Over `fsdp` the width is sharded, or else the tokens.
    for name in (CLUSTER_EMBED, VOCAB):
        if divides(name, FSDP):
            mesh_axes[name].append(FSDP)
            break
    return PartitionSpec(*(tuple(axes_of_name) or None for axes_of_name in mesh_axes.values()))


class TablePlaces(NamedTuple):
    """The mesh axes over which an embedding table is sharded while tokens are looked up in it.

    Only axes with more than one device are named.
    """

    rows: tuple[str, ...]  # Mesh axes that share the tokens.
    columns: tuple[str, ...]  # Mesh axes that share the width.

    def spec(self) -> PartitionSpec:
        """Returns these axes as the `PartitionSpec` of a table [rows, width]."""
        return PartitionSpec(self.rows or None, self.columns or None)


def table_places(mesh: Mesh | AbstractMesh, rows: int, width: int) -> TablePlaces:
    """Returns how an embedding table [rows, width] is sharded while tokens are looked up in it.

    It is for the tables of the input embedding. A table is sharded as it is stored
    (`param_shardings`), with one exception: its rows are always sharded over `tensor`, and padded
    if they do not divide. The softmax's tables are sharded over `tensor` in the same way, and so
    are the gradients of both.
    """
    stored_rows, stored_columns = _table_spec(mesh, {VOCAB: rows, CLUSTER_EMBED: width})
    row_axes = (TENSOR,) if mesh.shape[TENSOR] > 1 else ()
    if mesh.shape[FSDP] == 1:
        return TablePlaces(row_axes, ())
    if stored_columns is not None:
        return TablePlaces(row_axes, (FSDP,))
    if stored_rows == (TENSOR, FSDP):
        return TablePlaces((*row_axes, FSDP), ())
    # Each device of `fsdp` has the whole width, of all rows or of its `tensor` part of the rows. A
    # table that is stored with its rows over `fsdp` only is gathered over `fsdp` for the lookup.
    return TablePlaces(row_axes, ())


def batch_axis(mesh: Mesh | AbstractMesh, batch_size: int) -> str | None:
    """Returns the logical axis of a batch's rows.

    It is `BATCH` if the rows divide among the devices, or None (replicated) if they do not.
    """
    return BATCH if batch_size % num_batch_shards(mesh) == 0 else None


def num_batch_shards(mesh: Mesh | AbstractMesh | None = None) -> int:
    """Returns how many devices share the rows of a batch, on the ambient mesh if `mesh` is None."""
    if mesh is None:
        mesh = ambient_mesh()
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in _MESH_AXES[BATCH])


def num_weight_shards() -> int:
    """Returns how many devices of the ambient mesh share the rows D of a layer's matrices."""
    mesh = ambient_mesh()
    if mesh is None:
        return 1
    return mesh.shape[_MESH_AXES[EMBED]]


def head_part_axis(d_head: int) -> str | None:
    """Returns the axis of the ambient mesh that shares E where `HEAD_PART` is its logical axis.

    The result is None if the axis has one device, or if E does not divide among its devices.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return None
    mesh_axis = _MESH_AXES[HEAD_PART]
    num_shards = mesh.shape[mesh_axis]
    if num_shards == 1 or d_head % num_shards:
        return None
    return mesh_axis


def num_vocab_shards() -> int:
    """Returns how many devices of the ambient mesh share the tokens of a cluster."""
    mesh = ambient_mesh()
    if mesh is None:
        return 1
    return mesh.shape[_MESH_AXES[VOCAB]]


def vocab_axis() -> str | None:
    """Returns the axis of the ambient mesh that shares the tokens of a cluster.

    The result is None if the axis has one device.
    """
    return _MESH_AXES[VOCAB] if num_vocab_shards() > 1 else None


# Makes a parameter: a plain array, or on a mesh a box around it (`nn.LogicallyPartitioned`) that
# `self.param` takes off.
Initializer = Callable[..., Any]


def normal(stddev: float, *names: str | None) -> Initializer:
    """Returns an initializer N(0, stddev) for a parameter with these logical axes."""
    return _with_names(nn.initializers.normal(stddev), names)


def zeros(*names: str | None) -> Initializer:
    """Returns an initializer of zeros for a parameter with these logical axes."""
    return _with_names(nn.initializers.zeros_init(), names)


def ones(*names: str | None) -> Initializer:
    """Returns an initializer of ones for a parameter with these logical axes."""
    return _with_names(nn.initializers.ones_init(), names)


def _with_names(initializer: Initializer, names: tuple[str | None, ...]) -> Initializer:
    """Returns `initializer`, changed to label its arrays with logical axes on a mesh.

    On an ambient mesh of multiple devices, each array that the result creates is in a box with
    `names`, for `param_shardings`. Otherwise nothing is sharded, and the result returns plain
    arrays. There, every caller of `init` would have to unbox them, and NNX would raise: it shards
    a boxed parameter when it is created, over mesh axes called `names`, which no mesh has.
    """

    def initialize(*arguments: Any) -> Any:
        array = initializer(*arguments)
        if ambient_mesh() is None:
            return array
        return nn.LogicallyPartitioned(array, names)

    return initialize
