"""Multi-head attention over [memory; segment], with relative positions or without positions of its own."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import CompatConfig, Encoding, ModelConfig
from txl_jax.modules import initializers
from txl_jax.modules.dropout import Dropout, DropoutRates, dropout, is_on, weight_dropout
from txl_jax.modules.position_encodings import ShawTable
from txl_jax.ops.attention.dot_product import dot_product_attention
from txl_jax.ops.attention.relative import relative_attention
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain

# What `score_terms` takes, by the names that the collection "attention" has it under.
SCORE_PARTS = ("query", "key", "position_key", "content_bias", "position_bias")


class Attention(nn.Module):
    """The attention branch of a layer, without residual and layer norm. No projection has a bias.

    With absolute positions, which are in its inputs already, it knows nothing of them.
    """

    config: ModelConfig
    compat: CompatConfig
    deterministic: bool
    rates: DropoutRates | None = None  # None: those of the config.

    @nn.compact
    def __call__(
        self,
        segment: jax.Array,
        context: Sequence[jax.Array],
        positions: jax.Array | None,
        mask: jax.Array,
        biases: tuple[jax.Array, jax.Array] | None,
    ) -> jax.Array:
        """[B, L, D] -> [B, L, D].

        Args:
          segment: [B, L, D], where queries come from.
          context: [B, M, D] and [B, L, D], memory and segment, where keys and values come from.
          positions: [K, D], codes of the distances K - 1, .., 0, or int [K], those distances, clamped, where keys of
            them are learned; None with absolute positions.
          mask: bool [B, L, K].
          biases: u and v, [H, E] each; None: the encoding has none, or none of their own.
        """
        c, rates = self.config, self.rates or DropoutRates.of(self.config.dropout)
        dtype = segment.dtype
        drop_weights = weight_dropout(rates.weight, deterministic=self.deterministic)
        inward = initializers.normal(c.init_std, axes.EMBED, axes.HEADS, axes.HEAD_DIM)

        def matrix(name: str) -> jax.Array:
            """[D, H, E]."""
            return drop_weights(self.param(name, inward, (c.d_model, c.n_head, c.d_head))).astype(dtype)

        # Heads before positions: the products over E and K then run on contiguous matrices, which on CPU
        # halves the time of the forward pass.
        w_query, w_key, w_value = (matrix(name) for name in ("query", "key", "value"))
        query = self._drop(self._heads(_project(segment, w_query)), "query")
        key, value = (
            # One by one, since nothing goes back into the memory: of one product the gradient of all K rows is computed.
            self._drop(self._heads(jnp.concatenate([_project(states, kernel) for states in context], axis=-2)), name)
            for name, kernel in (("key", w_key), ("value", w_value))
        )
        drop = Dropout(rates.attention, deterministic=self.deterministic)
        if not c.encoding.is_relative:
            attended_BxHxLxE = dot_product_attention(query, key, value, mask=mask, drop=drop)
        else:
            if c.encoding is Encoding.RELATIVE:
                score = None
                if c.tie_positions:
                    position_key = self._drop(_project(positions, w_key), "position_key")
                    own = self._drop(_project(positions[-1:], w_query), "position_query")
                    content_bias = position_bias = own[:, 0]
                else:
                    position_key = _project(positions, matrix("position_key"))
                    content_bias, position_bias = (bias.astype(dtype) for bias in biases)
                self._keep(query, key, position_key, content_bias, position_bias)
            else:
                table = ShawTable(c, self.compat, name="positions")()
                position_key, position_bias = table.key.astype(dtype)[positions].swapaxes(0, 1), None
                score = None if table.score is None else table.score[positions].T
                content_bias = None if table.content_bias is None else table.content_bias.astype(dtype)
            attended_BxHxLxE = relative_attention(
                query,
                key,
                value,
                position_key,
                content_bias=content_bias,
                position_bias=position_bias,
                position_score=score,
                mask=mask,
                drop=drop,
            )
        outward = initializers.normal(c.init_std, axes.HEADS, axes.HEAD_DIM, axes.EMBED)
        kernel = drop_weights(self.param("output", outward, (c.n_head, c.d_head, c.d_model)))
        output = jnp.einsum("bhle,hed->bld", self._heads(attended_BxHxLxE), kernel.astype(dtype))
        return dropout(c, rates.rate, deterministic=self.deterministic)(output)

    def _drop(self, states: jax.Array, name: str) -> jax.Array:
        """Dropout on [..., H, positions, E].

        By names, so that with or without it the other dropouts, which are numbered, draw what they draw.
        """
        c, rate = self.config, (self.rates or DropoutRates.of(self.config.dropout)).qkv
        if not is_on(rate):
            return states
        return dropout(c, rate, deterministic=self.deterministic, name=f"drop_{name}")(states)

    def _heads(self, states: jax.Array) -> jax.Array:
        """[B, H, positions, E], pinned to where its rows and heads lie."""
        return constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM)

    def _keep(self, *arrays: jax.Array) -> None:
        """Leaves what scores are made of for who asks with mutable=["attention"]; else nothing is kept."""
        if not self.is_initializing():
            for name, array in zip(SCORE_PARTS, arrays, strict=True):
                self.sow("attention", name, array, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def _project(states: jax.Array, kernel: jax.Array) -> jax.Array:
    """[..., positions, D] and [D, H, E] -> [..., H, positions, E]."""
    return jnp.einsum("...d,dhe->...he", states, kernel).swapaxes(-3, -2)
