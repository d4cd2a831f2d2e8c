"""Dropout on activations, with a mask per number or one for all positions of a segment.

A rate may be a traced number, so that vmapped runs with different rates are one program
(`txl_jax.training.member_axis`).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.ops import random_masks
from txl_jax.ops.attention import ProbabilityDropout

Rate = float | jax.Array


class Dropout(nn.Module):
    """Dropout with the masks of `ops.random_masks`, by a seed that each call samples."""

    # Fraction that is dropped, at least 0 and below 1.
    rate: Rate
    # Axes along which all numbers share a mask.
    broadcast_dims: Sequence[int] = ()
    # Whether dropout is off, or None if each call sets it.
    deterministic: bool | None = None

    def __call__(self, inputs: jax.Array, deterministic: bool | None = None) -> jax.Array:
        """Zeros random numbers of an array of any shape and scales up the others."""
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if not is_on(self.rate) or deterministic:
            return inputs
        mask_shape = list(inputs.shape)
        for axis in self.broadcast_dims:
            mask_shape[axis] = 1
        return random_masks.drop(
            inputs, seed=sample_seed(self), rate=self.rate, mask_shape=mask_shape
        )

    def of_probabilities(self, n_head: int) -> ProbabilityDropout | None:
        """Returns the dropout of the attention probabilities of `n_head` heads, or None if off.

        This method samples its seed. Attention applies it, because the probabilities are not in
        memory.
        """
        if not is_on(self.rate) or self.deterministic:
            return None
        return ProbabilityDropout(self.rate, sample_seed(self), n_head)


def sample_seed(module: nn.Module) -> jax.Array:
    """Samples a seed for one mask, uint32 [].

    It depends on the rng "dropout", on the module's path, and on how many the module has sampled.
    """
    return jax.random.bits(module.make_rng("dropout"), (), jnp.uint32)


def is_on(rate: Rate) -> bool:
    """Returns whether a rate is above 0. A traced rate counts as above 0."""
    return isinstance(rate, jax.Array) or rate > 0


def dropout(
    config: ModelConfig, rate: Rate, *, deterministic: bool | None = None, name: str | None = None
) -> Dropout:
    """Returns dropout for arrays [..., positions, width].

    With `model.dropout.locked` all positions share a mask (variational dropout: Gal and Ghahramani,
    2016): a zeroed number is zero throughout a segment. Rows of the batch never share a mask, and
    each update samples again.
    """
    axes = (-2,) if config.dropout.locked else ()
    return Dropout(rate, broadcast_dims=axes, deterministic=deterministic, name=name)
