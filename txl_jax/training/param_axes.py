"""Axes of parameters, as optimizers need them: which form a matrix, and which hold layers."""

import math
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers as MatrixAxes

_LAYERS = ("stack", "layers")
# Projections of attention that are [D, H, E] in each layer. The output's projection is [H, E, D].
_PROJECTIONS_FROM_D = ("query", "key", "value", "position_key")


class PerLayerState(NamedTuple):
    """States of a transformation that is applied to each layer by itself."""

    layers: Any  # State for the stacked layers. Every array has a leading axis N.
    others: Any  # State for all other parameters.


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names along a path, without the boxes that a parameter may be in."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def is_stacked(names: tuple[str, ...]) -> bool:
    """Returns whether a parameter of this name has a leading axis of layers."""
    return names[:2] == _LAYERS


def matrix_axes(names: tuple[str, ...]) -> MatrixAxes | None:
    """Returns the axes of a layer's matrix that go in and out, or None for other parameters.

    The axes are counted from the last.

    Heads and their size are one side of a projection: a query is [D, H * E]. Embeddings and the
    softmax do not count as matrices.
    """
    module = names[:-1]
    name = names[-1]
    if module == (*_LAYERS, "attention"):
        if name in _PROJECTIONS_FROM_D:
            return MatrixAxes(reduction_axis=(-3,), output_axis=(-2, -1))
        if name == "output":
            return MatrixAxes(reduction_axis=(-3, -2), output_axis=(-1,))

    is_feed_forward = module == (*_LAYERS, "feed_forward") and name.endswith("kernel")
    # An LSTM's matrices are in cells, a QRNN's in gates.
    is_recurrent = ("cell" in names or "gates" in names) and name == "kernel"
    if is_feed_forward or is_recurrent:
        return MatrixAxes(reduction_axis=(-2,), output_axis=(-1,))
    return None


def matrix_shape(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a parameter's shape with the axes on each side of its matrix joined.

    For example, [N, D, H, E] becomes [N, D, H * E].
    """
    axes = matrix_axes(names)
    if axes is None:
        return shape
    n_row = math.prod(shape[axis] for axis in axes.reduction_axis)
    n_column = math.prod(shape[axis] for axis in axes.output_axis)
    n_matrix_axes = len(axes.reduction_axis) + len(axes.output_axis)
    return (*shape[: len(shape) - n_matrix_axes], n_row, n_column)


def per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a transformation to each layer's tensors by themselves.

    This is for tensors that `nn.scan` has stacked in one array.
    """

    def init(params: Any) -> PerLayerState:
        layers, others = _split(params)
        # An RNN has no stacked layers.
        layers_state = jax.vmap(inner.init)(layers) if layers else ()
        return PerLayerState(layers_state, inner.init(others))

    def update(updates: Any, state: PerLayerState, params: Any = None) -> tuple[Any, PerLayerState]:
        layers, others = _split(updates)
        layer_params, other_params = _split(params)

        others, others_state = inner.update(others, state.others, other_params)
        if not layers:
            return others, PerLayerState((), others_state)

        layers, layers_state = jax.vmap(inner.update)(layers, state.layers, layer_params)
        whole = others | {"stack": others["stack"] | layers["stack"]}
        return whole, PerLayerState(layers_state, others_state)

    return optax.GradientTransformation(init, update)


def as_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a transformation to parameters of the shapes of `matrix_shape`."""

    def as_matrix(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return leaf.reshape(matrix_shape(names_of(path), leaf.shape))

    def init(params: Any) -> Any:
        return inner.init(jax.tree.map_with_path(as_matrix, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        matrices = jax.tree.map_with_path(as_matrix, updates)
        param_matrices = jax.tree.map_with_path(as_matrix, params)
        matrices, state = inner.update(matrices, state, param_matrices)
        steps = jax.tree.map(lambda matrix, leaf: matrix.reshape(leaf.shape), matrices, updates)
        return steps, state

    return optax.GradientTransformation(init, update)


def _split(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the stacked layers, if any, and the other parameters, both by their whole paths."""
    outer, inner = _LAYERS
    if inner not in tree.get(outer, {}):
        return {}, tree
    layers = {outer: {inner: tree[outer][inner]}}
    rest = {name: value for name, value in tree[outer].items() if name != inner}
    return layers, tree | {outer: rest}
