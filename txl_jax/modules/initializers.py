"""Initial values that carry the logical axis names of a parameter."""

from collections.abc import Callable

import flax.linen as nn


def normal(stddev: float, *axis_names: str) -> Callable:
    """N(0, stddev) for a parameter whose axes are called `axis_names`."""
    return nn.with_logical_partitioning(nn.initializers.normal(stddev), axis_names)


def zeros(*axis_names: str) -> Callable:
    """Zeros for a parameter whose axes are called `axis_names`."""
    return nn.with_logical_partitioning(nn.initializers.zeros_init(), axis_names)


def ones(*axis_names: str) -> Callable:
    """Ones for a parameter whose axes are called `axis_names`."""
    return nn.with_logical_partitioning(nn.initializers.ones_init(), axis_names)
