"""What the encodings of positions learn: biases of the paper's own, tables of those that it is compared with.

Tables hold one entry per distance 0, 1, .., n - 1 (`model.num_positions`). Whoever asks for a greater distance gets the
last one, which the caller sees to (`ModelConfig.clamp`).
"""

from typing import NamedTuple

import flax.linen as nn
import jax

from txl_jax.config import CompatConfig, ModelConfig, ShawTerms
from txl_jax.modules import initializers
from txl_jax.sharding import axes


class PositionBiases(nn.Module):
    """u and v of the paper (the original's r_w_bias and r_r_bias), both [H, E]."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        c = self.config
        init = initializers.normal(c.init_std, axes.HEADS, axes.HEAD_DIM)
        shape = (c.n_head, c.d_head)
        return self.param("content", init, shape), self.param("position", init, shape)


class ShawPositions(NamedTuple):
    """What a query meets at each distance."""

    key: jax.Array  # [n, H, E], term (b): q . key.
    score: jax.Array | None  # [n, H], in place of term (d); None: there is none.
    content_bias: jax.Array | None  # [H, E], u of term (c); None: there is none.


class ShawTable(nn.Module):
    """Learned keys of distances (Shaw et al., 2018), on keys only, as table 6 of the paper has them.

    The authors' release (attn_type 1) has more than the paper says, for `compat.shaw_terms=original`.
    """

    config: ModelConfig
    compat: CompatConfig

    @nn.compact
    def __call__(self) -> ShawPositions:
        c = self.config
        lead, heads = (c.num_positions, axes.POSITIONS), (c.n_head, axes.HEADS)
        width = (c.d_head, axes.HEAD_DIM)

        def learned(name: str, *sizes: tuple[int, str]) -> jax.Array:
            shape, names = zip(*sizes, strict=True)
            return self.param(name, initializers.normal(c.init_std, *names), shape)

        key = learned("key", lead, heads, width)
        if self.compat.shaw_terms is ShawTerms.PAPER:
            return ShawPositions(key, None, None)
        return ShawPositions(key, learned("score", lead, heads), learned("content", heads, width))


class AddedTable(nn.Module):
    """Learned vectors that a layer adds to its inputs (Al-Rfou et al., 2018): [n, D]."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> jax.Array:
        c = self.config
        init = initializers.normal(c.init_std, axes.POSITIONS, axes.EMBED)
        return self.param("vector", init, (c.num_positions, c.d_model))
