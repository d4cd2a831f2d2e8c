"""Multi-head attention over [memory; segment]: projections and dropout.

The scores are those of `ops.attention.attention`; terms that depend on positions are the encoding's
(`modules.positions`). Inference does the same with a KV cache in `inference.forward`.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import CompatConfig, ModelConfig
from txl_jax.modules.dropout import Dropout, DropoutRates, dropout, is_on
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.positions.encoding import Projections
from txl_jax.ops.attention import Implementation, Visibility, attention
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain

# Arguments of `ops.attention.score_terms`, by their names in the collection "attention".
SCORE_PARTS = ("query", "key", "position_key", "content_bias", "position_bias")


class Attention(nn.Module):
    """The attention branch of a layer, without residual and layer norm. No projection has a bias."""

    config: ModelConfig
    compat: CompatConfig
    deterministic: bool
    rates: DropoutRates | None = None  # None: those of the config.
    implementation: Implementation | str = "auto"  # Of `ops.attention.attention`.

    @nn.compact
    def __call__(
        self,
        segment: jax.Array,
        context: Sequence[jax.Array],
        codes: jax.Array | None,
        visibility: Visibility,
        parameters: Any,
    ) -> jax.Array:
        """Computes the branch's outputs, [B, L, D] -> [B, L, D].

        Args:
          segment: [B, L, D], where queries come from.
          context: [B, M, D] and [B, L, D], memory and segment, where keys and values come from.
          codes: the encoding's `shared_codes`.
          visibility: which keys a query sees.
          parameters: the encoding's `layer_parameters`.
        """
        c, rates, dtype = self.config, self.rates or DropoutRates.of(self.config.dropout), segment.dtype
        inward = axes.normal(c.init_std, axes.EMBED, axes.HEADS, axes.HEAD_DIM)

        def matrix(name: str) -> jax.Array:
            """Creates a matrix [D, H, E]."""
            return self.param(name, inward, (c.d_model, c.n_head, c.d_head)).astype(dtype)

        # Heads before positions: the products over E and K then run on contiguous matrices, which on CPU
        # halves the time of the forward pass.
        w_query, w_key, w_value = (matrix(name) for name in ("query", "key", "value"))
        query = self._drop(self._heads(_project(segment, w_query)), "query")
        key, value = (
            # Memory and segment apart: no gradient goes into the memory, and one product would compute that of K rows.
            self._drop(self._heads(jnp.concatenate([_project(states, kernel) for states in context], axis=-2)), name)
            for name, kernel in (("key", w_key), ("value", w_value))
        )
        on_probabilities = Dropout(rates.attention, deterministic=self.deterministic)
        encoding = encoding_of(c, self.compat)
        terms = encoding.position_terms(
            codes,
            parameters,
            Projections(
                query=lambda codes, name: self._drop(_project(codes, w_query), name),
                key=lambda codes, name: self._drop(_project(codes, w_key), name),
                own=lambda codes, name: _project(codes, matrix(name)),
            ),
            dtype,
        )
        if encoding.has_four_terms:
            self._sow(query, key, terms.position_key, terms.content_bias, terms.position_bias)
        attended_BxHxLxE = attention(
            *(query, key, value),
            **terms._asdict(),
            visibility=visibility,
            dropout=on_probabilities.draw_seed(c.n_head),
            implementation=self.implementation,
        )
        outward = axes.normal(c.init_std, axes.HEADS, axes.HEAD_DIM, axes.EMBED)
        kernel = self.param("output", outward, (c.n_head, c.d_head, c.d_model))
        output = jnp.einsum("bhle,hed->bld", self._heads(attended_BxHxLxE), kernel.astype(dtype))
        return dropout(c, rates.rate, deterministic=self.deterministic)(output)

    def _drop(self, states: jax.Array, name: str) -> jax.Array:
        """Applies dropout to [..., H, positions, E].

        By names, so that with or without it the other dropouts, which are numbered, draw what they draw.
        """
        c, rate = self.config, (self.rates or DropoutRates.of(self.config.dropout)).qkv
        if not is_on(rate):
            return states
        return dropout(c, rate, deterministic=self.deterministic, name=f"drop_{name}")(states)

    def _heads(self, states: jax.Array) -> jax.Array:
        """Constrains the sharding of [B, H, positions, E]."""
        return constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM)

    def _sow(self, *arrays: jax.Array | None) -> None:
        """Stores the terms of the scores if the caller asks with mutable=["attention"]."""
        if not self.is_initializing():
            for name, array in zip(SCORE_PARTS, arrays, strict=True):
                self.sow("attention", name, array, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def _project(states: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [..., positions, D] and [D, H, E] -> [..., H, positions, E]."""
    return jnp.einsum("...d,dhe->...he", states, kernel).swapaxes(-3, -2)
