"""Multi-head attention over [memory; segment]: projections and dropout.

`ops.attention.attention` computes scores, softmax and the weighted sums. The encoding
(`modules.positions`) supplies the terms that depend on positions. `inference.forward` computes the
same with a KV cache.

Letters: B batch size, L segment length, M memory length, K = M + L keys, D model size, H heads,
E head size.
"""

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
from txl_jax.ops.head_projections import project_apart, project_codes, project_to_heads
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain

# Arguments of `ops.attention.score_terms`, in order. Attention sows them under these names in the
# collection "attention".
SCORE_PARTS = ("query", "key", "position_key", "content_bias", "position_bias")


class LayerContext(flax.struct.PyTreeNode):
    """Inputs shared by all layers."""

    # Encodings of the distances K - 1, .., 0 (the encoding's `shared_codes`), or None.
    codes: jax.Array | None
    # The keys that each query attends to.
    visibility: Visibility
    # The encoding's `shared_parameters`, and within a layer its `layer_parameters`.
    parameters: Any = None
    # Implementation of attention, or the name of its path.
    implementation: Implementation | str = flax.struct.field(pytree_node=False, default="auto")
    # Whether dropout is off.
    deterministic: bool = flax.struct.field(pytree_node=False, default=True)


class Attention(nn.Module):
    """The attention branch of a layer, without residual and layer norm.

    No projection has a bias.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, segment: jax.Array, states: tuple[jax.Array, jax.Array], context: LayerContext
    ) -> jax.Array:
        """Computes the attention outputs [B, L, D] of a segment.

        Args:
          segment: [B, L, D], from which queries are projected.
          states: The memory [B, M, D] and the segment, from which keys and values are projected.
          context: Inputs shared by all layers.
        """
        c = self.config
        dtype = segment.dtype
        deterministic = context.deterministic
        # An initializer, which also names the parameter's axes for its sharding.
        inward = axes.normal(c.init_std, axes.EMBED, axes.HEADS, axes.HEAD_DIM)

        def matrix(name: str) -> jax.Array:
            """Creates the parameter of a projection, [D, H, E]."""
            return self.param(name, inward, (c.d_model, c.n_head, c.d_head)).astype(dtype)

        def drop(heads: jax.Array, name: str) -> jax.Array:
            """Applies the dropout on queries, keys and values to [..., H, positions, E]."""
            if not is_on(c.dropout.qkv):
                return heads
            # Flax numbers dropouts without a name, and masks depend on the number. This dropout has
            # a name, so that turning it on does not change the masks of the others.
            module = dropout(c, c.dropout.qkv, deterministic=deterministic, name=f"drop_{name}")
            return module(heads)

        # Initial values depend on the order in which parameters are created: these three, then the
        # encoding's, then "output".
        w_query = matrix("query")
        w_key = matrix("key")
        w_value = matrix("value")

        query = _shard_heads(project_to_heads(segment, w_query))
        # Memory and segment are projected separately, so that no gradient of the memory is
        # computed.
        key = _shard_heads(project_apart(*states, w_key))
        value = _shard_heads(project_apart(*states, w_value))

        query = drop(query, "query")
        key = drop(key, "key")
        value = drop(value, "value")

        # Attention itself drops probabilities, with a seed that this module samples below. The
        # module is created even at rate 0, because flax numbers unnamed dropouts, and the output's
        # dropout below must always get the next number.
        probability_dropout = Dropout(c.dropout.attention, deterministic=deterministic)

        encoding = encoding_of(c)
        # This layer's projections, for an encoding that projects its codes.
        projections = Projections(
            query=lambda codes, name: drop(project_to_heads(codes, w_query), name),
            key=lambda codes, name: drop(project_codes(codes, w_key), name),
            new_matrix=lambda codes, name: project_codes(codes, matrix(name)),
        )
        terms = encoding.position_terms(context.codes, context.parameters, projections, dtype)

        # Relative positions have the paper's terms (a) to (d), which `ops.attention.score_terms`
        # computes from these arrays for callers that request them.
        if encoding.has_four_terms:
            parts = (query, key, terms.position_key, terms.content_bias, terms.position_bias)
            for name, part in zip(SCORE_PARTS, parts, strict=True):
                sow_if_asked(self, "attention", name, part)

        attended_BxHxLxE = attention(
            query,
            key,
            value,
            position_key=terms.position_key,
            content_bias=terms.content_bias,
            position_bias=terms.position_bias,
            position_score=terms.position_score,
            visibility=context.visibility,
            dropout=probability_dropout.of_probabilities(c.n_head),
            implementation=context.implementation,
        )
        attended_BxHxLxE = _shard_heads(attended_BxHxLxE)

        outward = axes.normal(c.init_std, axes.HEADS, axes.HEAD_DIM, axes.EMBED)
        w_output = self.param("output", outward, (c.n_head, c.d_head, c.d_model)).astype(dtype)
        output = jnp.einsum("bhle,hed->bld", attended_BxHxLxE, w_output)
        return dropout(c, c.dropout.rate, deterministic=deterministic)(output)


def sow_if_asked(module: nn.Module, collection: str, name: str, array: jax.Array | None) -> None:
    """Stores an array if the caller passes mutable=[collection].

    Flax returns it in that collection, under `name`. Otherwise nothing is stored.
    """
    # `init` makes every collection mutable, and would return the arrays with the parameters.
    if module.is_initializing():
        return
    # Stores the array itself. Flax's default is a tuple of all arrays sown under this name.
    module.sow(collection, name, array, reduce_fn=lambda _, new: new, init_fn=lambda: None)


def _shard_heads(states: jax.Array) -> jax.Array:
    """Constrains the sharding of [B, H, positions, E]."""
    return constrain(states, axes.BATCH, axes.HEADS, axes.LENGTH, axes.HEAD_DIM)
