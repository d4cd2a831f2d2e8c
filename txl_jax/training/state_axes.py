"""Logical axis names of an optimizer's state, from which its sharding follows (`txl_jax.sharding.param_shardings`)."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import optax

from txl_jax.sharding import axes
from txl_jax.training.param_axes import matrix_axes, matrix_shape, names_of


class _Named(NamedTuple):
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]


def with_axis_names(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Makes the state of boxed parameters boxed too; that of bare ones is bare, and updates are the same.

    An array that belongs to a parameter has the axes that they share: a moment all of them, Adafactor's rows and
    columns of a matrix all but one of its sides. Counts and placeholders have none, which replicates them.
    """

    def init(params: Any) -> Any:
        state, named = inner.init(nn.unbox(params)), _named_axes(params)

        def boxed(path: tuple[Any, ...], leaf: Any) -> Any:
            names = names_of(path)  # Ends with the parameter's.
            owner = next((names[i:] for i in range(len(names)) if names[i:] in named), None)
            found = None if owner is None else _state_axes(owner, named[owner], leaf.shape, _field(path))
            return leaf if found is None else nn.LogicallyPartitioned(leaf, found)

        return jax.tree.map_with_path(boxed, state)

    return optax.GradientTransformation(init, inner.update)


def _named_axes(params: Any) -> dict[tuple[str, ...], _Named]:
    """Returns shape and axes of each boxed parameter, by its names."""
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    return {
        names_of(path): _Named(leaf.value.shape, leaf.names)
        for path, leaf in leaves
        if isinstance(leaf, nn.LogicallyPartitioned)
    }


def _field(path: tuple[Any, ...]) -> str:
    """Returns the innermost field of the state that a path goes through: `mu`, `v_row`."""
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return fields[-1] if fields else ""


def _state_axes(
    names: tuple[str, ...], param: _Named, shape: tuple[int, ...], field: str
) -> tuple[str | None, ...] | None:
    """Returns the axes of an array of a parameter's state; None: it has none of the parameter's."""
    if shape == param.shape:
        return param.axes
    sides = tuple(axis for axis in param.axes if matrix_axes(names) is None or axis != axes.HEAD_DIM)
    sizes = matrix_shape(names, param.shape)
    if shape == sizes:
        return sides
    if len(sizes) < 2:
        return None
    # optax keeps the mean over the longer side in v_row, over the shorter one in v_col; where it keeps neither, both
    # are placeholders of another shape.
    shorter = -1 if sizes[-1] < sizes[-2] else -2
    kept = {"v_row": shorter, "v_col": -3 - shorter}.get(field)
    if kept is None or shape != (*sizes[:-2], sizes[kept]):
        return None
    return (*sides[:-2], sides[kept])
