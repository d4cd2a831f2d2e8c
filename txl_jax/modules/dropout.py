"""Dropout: on activations, with a mask for every number or one for all positions of a segment, and on weights.

A rate may be a traced number, so that runs with different ones are one program (`txl_jax.training.ensemble`).
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig


class Dropout(nn.Dropout):
    """Flax's, with the same masks, whose rate may be traced."""

    def __call__(self, inputs: jax.Array, deterministic: bool | None = None) -> jax.Array:
        """Leaves out numbers of an array of any shape, and scales the others up."""
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if not is_on(self.rate) or deterministic:
            return inputs
        shape = list(inputs.shape)
        for axis in self.broadcast_dims:
            shape[axis] = 1
        kept = jax.random.bernoulli(self.make_rng(self.rng_collection), 1 - self.rate, shape)
        return jnp.where(kept, inputs / jnp.asarray(1 - self.rate, inputs.dtype), 0)


def is_on(rate: float | jax.Array) -> bool:
    """Whether a rate leaves anything out; a traced one may."""
    return isinstance(rate, jax.Array) or rate > 0


def dropout(config: ModelConfig, rate: float, *, deterministic: bool | None = None, name: str | None = None) -> Dropout:
    """Dropout over arrays [..., positions, width].

    With `locked_dropout` the positions share a mask (variational dropout: Gal and Ghahramani, 2016), so that what is
    left out stays out while a segment is read. Rows of the batch never share one, and each update draws anew.
    """
    axes = (-2,) if config.dropout.locked else ()
    return Dropout(rate, broadcast_dims=axes, deterministic=deterministic, name=name)


def weight_dropout(config: ModelConfig, *, deterministic: bool) -> Callable[[jax.Array], jax.Array]:
    """Leaves out entries of a matrix for one update (DropConnect: Wan et al., 2013), the same for all positions."""
    if not is_on(config.dropout.weight):
        return lambda kernel: kernel
    return Dropout(config.dropout.weight, deterministic=deterministic, name="drop_weights")
