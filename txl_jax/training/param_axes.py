"""Axes of parameters, as optimizers need them: which form a matrix, and which hold layers."""

import math
from typing import Any, NamedTuple

import jax
import optax
from optax.contrib import MuonDimensionNumbers as MatrixAxes

# [D, H, E] in each layer; "output" is [H, E, D].
_FROM_D = ("query", "key", "value", "position_key")
_LAYERS = ("stack", "layers")


class PerLayerState(NamedTuple):
    """States of a transformation."""

    layers: Any  # Of the stacked layers; every array has a leading axis N.
    others: Any  # Of all other parameters.


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the names along a path, without the boxes that a parameter may be in."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def is_stacked(names: tuple[str, ...]) -> bool:
    """Returns whether a parameter of this name has a leading axis of layers."""
    return names[:2] == _LAYERS


def matrix_axes(names: tuple[str, ...]) -> MatrixAxes | None:
    """Returns the axes of a layer's matrix that go in and out, or None for other parameters.

    The axes are counted from the last.

    Heads and their width are one side of a projection: a query is [D, H * E]. Embeddings and the
    softmax are none.
    """
    last = names[-1]
    if names[:-1] == (*_LAYERS, "attention"):
        if last in _FROM_D:
            return MatrixAxes(reduction_axis=(-3,), output_axis=(-2, -1))
        if last == "output":
            return MatrixAxes(reduction_axis=(-3, -2), output_axis=(-1,))
    is_dense = names[:-1] == (*_LAYERS, "feed_forward") and last.endswith("kernel")
    # Of an LSTM, of a QRNN.
    is_recurrent = ("cell" in names or "gates" in names) and last == "kernel"
    return MatrixAxes(reduction_axis=(-2,), output_axis=(-1,)) if is_dense or is_recurrent else None


def matrix_shape(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a parameter's shape with the axes on each side of its matrix joined.

    For example, [N, D, H, E] becomes [N, D, H * E].
    """
    axes = matrix_axes(names)
    if axes is None:
        return shape
    sides = [math.prod(shape[axis] for axis in side) for side in axes]
    return (*shape[: len(shape) - sum(map(len, axes))], *sides)


def per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a transformation to each layer's tensors by themselves.

    This is for tensors that `nn.scan` has stacked in one array.
    """

    def init(params: Any) -> PerLayerState:
        layers, others = _split(params)
        return PerLayerState(jax.vmap(inner.init)(layers) if layers else (), inner.init(others))

    def update(updates: Any, state: PerLayerState, params: Any = None) -> tuple[Any, PerLayerState]:
        (layers, others), (layer_params, other_params) = _split(updates), _split(params)
        others, of_others = inner.update(others, state.others, other_params)
        if not layers:
            return others, PerLayerState((), of_others)
        layers, of_layers = jax.vmap(inner.update)(layers, state.layers, layer_params)
        return others | {"stack": others["stack"] | layers["stack"]}, PerLayerState(
            of_layers, of_others
        )

    return optax.GradientTransformation(init, update)


def as_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a transformation to parameters of the shapes of `matrix_shape`."""

    def joined(tree: Any) -> Any:
        return jax.tree.map_with_path(
            lambda path, leaf: leaf.reshape(matrix_shape(names_of(path), leaf.shape)), tree
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = inner.update(joined(updates), state, joined(params))
        return jax.tree.map(lambda leaf, old: leaf.reshape(old.shape), new, updates), state

    return optax.GradientTransformation(lambda params: inner.init(joined(params)), update)


def _split(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the stacked layers, if any, and the other parameters, both by their whole paths."""
    outer, inner = _LAYERS
    if inner not in tree.get(outer, {}):
        return {}, tree
    rest = {name: value for name, value in tree[outer].items() if name != inner}
    return {outer: {inner: tree[outer][inner]}}, tree | {outer: rest}
