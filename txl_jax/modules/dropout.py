"""Dropout on activations, with a mask per number or one for all positions of a segment.

A rate may be a traced number, so that vmapped runs with different rates are one program
(`txl_jax.training.member_axis`).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.ops.attention.dropout import Dropout as ProbabilityDropout

Rate = float | jax.Array


class Dropout(nn.Dropout):
    """Flax's `Dropout`, with the same masks, for rates that may be traced."""

    rate: Rate  # type: ignore[assignment]

    def __call__(
        self, inputs: jax.Array, deterministic: bool | None = None, rng: jax.Array | None = None
    ) -> jax.Array:
        """Zeros random numbers of an array of any shape and scales up the others."""
        deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
        if not is_on(self.rate) or deterministic:
            return inputs
        shape = list(inputs.shape)
        for axis in self.broadcast_dims:
            shape[axis] = 1
        key = self.make_rng(self.rng_collection) if rng is None else rng
        kept = jax.random.bernoulli(key, 1 - self.rate, shape)
        return jnp.where(kept, inputs / jnp.asarray(1 - self.rate, inputs.dtype), 0)

    def draw_seed(self, n_head: int) -> ProbabilityDropout | None:
        """Samples the seed for dropout on the attention probabilities of `n_head` heads.

        Attention applies this dropout.
        """
        if not is_on(self.rate) or self.deterministic:
            return None
        seed = jax.random.bits(self.make_rng(self.rng_collection), (), jnp.uint32)
        return ProbabilityDropout(self.rate, seed, n_head)


def is_on(rate: Rate) -> bool:
    """Returns whether a rate is above 0. A traced one counts as above."""
    return isinstance(rate, jax.Array) or rate > 0


def dropout(
    config: ModelConfig, rate: Rate, *, deterministic: bool | None = None, name: str | None = None
) -> Dropout:
    """Returns dropout for arrays [..., positions, width].

    With `model.dropout.locked` all positions share a mask (variational dropout: Gal and Ghahramani,
    2016): a zeroed number is zero throughout a segment. Rows of the batch never share one, and each
    update samples again.
    """
    axes = (-2,) if config.dropout.locked else ()
    return Dropout(rate, broadcast_dims=axes, deterministic=deterministic, name=name)
