"""Multi-head attention over [memory; segment]: projections and dropout.

The scores are computed by `ops.attention.attention`. Terms that depend on positions are the
encoding's (`modules.positions`). Inference does the same with a KV cache in `inference.forward`.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.modules.dropout import Dropout, dropout, is_on
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.positions.encoding import Projections
from txl_jax.ops.attention import Implementation, Visibility, attention
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain

# Arguments of `ops.attention.score_terms`, by their names in the collection "attention" (`keep`).
SCORE_PARTS = ("query", "key", "position_key", "content_bias", "position_bias")


class LayerContext(flax.struct.PyTreeNode):
    """Inputs shared by all layers."""

    # Of the distances K - 1, .., 0; the encoding's `shared_codes`.
    codes: jax.Array | None
    # Which keys a query sees.
    visibility: Visibility
    # The encoding's `shared_parameters`; within a layer its `layer_parameters`.
    parameters: Any = None
    # Of attention.
    implementation: Implementation | str = flax.struct.field(pytree_node=False, default="auto")
    # No dropout.
    deterministic: bool = flax.struct.field(pytree_node=False, default=True)


class Attention(nn.Module):
    """The attention branch of a layer, without residual and layer norm.

    No projection has a bias.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, segment: jax.Array, states: Sequence[jax.Array], context: LayerContext
    ) -> jax.Array:
        """Computes the attention outputs [B, L, D] of a segment.

        Keys and values come from `states`, which contains the memory and the segment.
        """
        c, dtype, deterministic = self.config, segment.dtype, context.deterministic
        inward = axes.normal(c.init_std, axes.EMBED, axes.HEADS, axes.HEAD_DIM)

        def matrix(name: str) -> jax.Array:
            """Creates a matrix [D, H, E]."""
            return self.param(name, inward, (c.d_model, c.n_head, c.d_head)).astype(dtype)

        # Heads before positions: the products over E and K then run on contiguous matrices, which
        # on CPU halves the time of the forward pass.
        w_query, w_key, w_value = (matrix(name) for name in ("query", "key", "value"))

        def drop(states: jax.Array, name: str) -> jax.Array:
            """Applies dropout to [..., H, positions, E].

            By names, so that with or without it the other dropouts, which are numbered, draw what
            they draw.
            """
            rate = c.dropout.qkv
            return (
                dropout(c, rate, deterministic=deterministic, name=f"drop_{name}")(states)
                if is_on(rate)
                else states
            )

        query = drop(self._heads(_project(segment, w_query)), "query")
        key, value = (
            # Memory and segment apart: no gradient goes into the memory, and one product would
            # compute that of K rows.
            drop(
                self._heads(jnp.concatenate([_project(part, kernel) for part in states], axis=-2)),
                name,
            )
            for name, kernel in (("key", w_key), ("value", w_value))
        )
        on_probabilities = Dropout(c.dropout.attention, deterministic=deterministic)
        encoding = encoding_of(c)
        terms = encoding.position_terms(
            context.codes,
            context.parameters,
            Projections(
                query=lambda codes, name: drop(_project(codes, w_query), name),
                key=lambda codes, name: drop(_project(codes, w_key), name),
                own=lambda codes, name: _project(codes, matrix(name)),
            ),
            dtype,
        )
        if encoding.has_four_terms:
            parts = query, key, terms.position_key, terms.content_bias, terms.position_bias
            for name, part in zip(SCORE_PARTS, parts, strict=True):
                keep(self, "attention", name, part)
        attended_BxHxLxE = attention(
            *(query, key, value),
            **terms._asdict(),
            visibility=context.visibility,
            dropout=on_probabilities.draw_seed(c.n_head),
            implementation=context.implementation,
        )
        outward = axes.normal(c.init_std, axes.HEADS, axes.HEAD_DIM, axes.EMBED)
        kernel = self.param("output", outward, (c.n_head, c.d_head, c.d_model))
        output = jnp.einsum("bhle,hed->bld", self._heads(attended_BxHxLxE), kernel.astype(dtype))
        return dropout(c, c.dropout.rate, deterministic=deterministic)(output)

    def _heads(self, states: jax.Array) -> jax.Array:
        """Constrains the sharding of [B, H, positions, E]."""
        return constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM)


def keep(module: nn.Module, collection: str, name: str, array: jax.Array | None) -> None:
    """Keeps an array for callers that ask for it with mutable=[collection]."""
    if not module.is_initializing():
        module.sow(collection, name, array, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def _project(states: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [..., positions, D] and [D, H, E] -> [..., H, positions, E]."""
    return jnp.einsum("...d,dhe->...he", states, kernel).swapaxes(-3, -2)
