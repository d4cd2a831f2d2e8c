"""Dropout: on activations, with a mask for every number or one for all positions of a segment, and on weights."""

from collections.abc import Callable

import flax.linen as nn
import jax

from txl_jax.config import ModelConfig


def dropout(config: ModelConfig, rate: float, *, deterministic: bool | None = None) -> nn.Dropout:
    """Dropout over arrays [..., positions, width].

    With `locked_dropout` the positions share a mask (variational dropout: Gal and Ghahramani, 2016), so that what is
    left out stays out while a segment is read. Rows of the batch never share one, and each update draws anew.
    """
    return nn.Dropout(rate, broadcast_dims=(-2,) if config.locked_dropout else (), deterministic=deterministic)


def weight_dropout(config: ModelConfig, *, deterministic: bool) -> Callable[[jax.Array], jax.Array]:
    """Leaves out entries of a matrix for one update (DropConnect: Wan et al., 2013), the same for all positions."""
    if not config.weight_dropout:
        return lambda kernel: kernel
    return nn.Dropout(config.weight_dropout, deterministic=deterministic, name="drop_weights")
