"""Initializers of parameters that carry logical axis names."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn

# Makes a boxed parameter (`nn.LogicallyPartitioned`), which `self.param` unboxes.
Initializer = Callable[..., Any]


def normal(stddev: float, *axis_names: str | None) -> Initializer:
    """Returns an initializer N(0, stddev) for a parameter with these logical axes."""
    return _with_names(nn.initializers.normal(stddev), axis_names)


def zeros(*axis_names: str) -> Initializer:
    """Returns an initializer of zeros for a parameter with these logical axes."""
    return _with_names(nn.initializers.zeros_init(), axis_names)


def ones(*axis_names: str) -> Initializer:
    """Returns an initializer of ones for a parameter with these logical axes."""
    return _with_names(nn.initializers.ones_init(), axis_names)


def constant(value: float, *axis_names: str) -> Initializer:
    """Returns an initializer of one value for a parameter with these logical axes."""
    return _with_names(nn.initializers.constant(value), axis_names)


def _with_names(initializer: Callable[..., Any], axis_names: tuple[str | None, ...]) -> Initializer:
    return nn.with_logical_partitioning(initializer, axis_names)
