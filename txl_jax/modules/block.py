"""One layer, and the stack of N layers as one `nn.scan`."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import CompatConfig, ModelConfig, NormPlace, Remat
from txl_jax.modules.attention import Attention
from txl_jax.modules.dropout import DropoutRates
from txl_jax.modules.feed_forward import FeedForward
from txl_jax.modules.positions import encoding_of
from txl_jax.ops.attention import Implementation, Visibility
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain


class LayerContext(flax.struct.PyTreeNode):
    """Inputs shared by all layers."""

    codes: jax.Array | None  # Of the distances K - 1, .., 0; the encoding's `shared_codes`.
    visibility: Visibility
    parameters: Any = None  # The encoding's `shared_parameters`.
    implementation: Implementation | str = flax.struct.field(pytree_node=False, default="auto")  # Of attention.


def layer_norm(name: str, *, compat: CompatConfig, dtype: jnp.dtype) -> nn.LayerNorm:
    """Returns a layer norm over D, computed in at least float32, with an output of type `dtype`.

    The variance is taken of the centred values; flax's default, E[x^2] - E[x]^2, cancels in float32.
    """
    return nn.LayerNorm(
        epsilon=compat.layer_norm_eps,
        dtype=dtype,
        param_dtype=jnp.result_type(float),  # As every other parameter: float64 in a float64 run.
        use_fast_variance=False,
        scale_init=axes.ones(axes.NORM),
        bias_init=axes.zeros(axes.NORM),
        name=name,
    )


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection and a layer norm."""

    config: ModelConfig
    compat: CompatConfig
    deterministic: bool
    rates: DropoutRates | None = None  # None: those of the config.

    @nn.compact
    def __call__(self, inputs: jax.Array, memory: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """Applies one layer: inputs [B, L, D] and memory [B, M, D] -> outputs [B, L, D], and the inputs again.

        The second result, with positions that the encoding adds in each layer, goes into the memory. Only this
        segment's rows leave the layer: passing the whole memory through the scan would copy it once per layer.
        """
        c = self.config
        dtype = inputs.dtype
        attention = Attention(c, self.compat, self.deterministic, self.rates, context.implementation, name="attention")
        feed_forward = FeedForward(c, self.deterministic, self.rates, name="feed_forward")
        attention_norm = layer_norm("attention_norm", compat=self.compat, dtype=dtype)
        feed_forward_norm = layer_norm("feed_forward_norm", compat=self.compat, dtype=dtype)
        encoding = encoding_of(c, self.compat)
        parameters = encoding.layer_parameters(context.parameters)

        def attend(segment: jax.Array, memory: jax.Array) -> jax.Array:
            return attention(segment, (memory, segment), context.codes, context.visibility, parameters)

        inputs = encoding.add_to_layer_inputs(inputs, context.codes)
        if c.layer_norm is NormPlace.POST:
            middle = attention_norm(inputs + attend(inputs, memory))
            outputs = feed_forward_norm(middle + feed_forward(middle))
        else:  # The memory holds values before the norm and is normalised with the segment.
            normed = attention_norm(jnp.concatenate([memory, inputs], axis=1))
            attended = attend(normed[:, memory.shape[1] :], normed[:, : memory.shape[1]])
            middle = inputs + attended
            outputs = middle + feed_forward(feed_forward_norm(middle))
        return constrain(outputs, axes.BATCH, axes.LENGTH, None), inputs


class Stack(nn.Module):
    """N layers with stacked parameters: compile time does not grow with N."""

    config: ModelConfig
    compat: CompatConfig
    rates: DropoutRates | None = None  # None: those of the config.

    @nn.compact
    def __call__(
        self, inputs: jax.Array, memory: jax.Array, context: LayerContext, *, deterministic: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Applies all layers: [B, L, D] and memory [N, B, M, D] -> outputs [B, L, D] and layer inputs [N, B, L, D]."""
        context = context.replace(parameters=encoding_of(self.config, self.compat).shared_parameters())
        layers = nn.scan(
            _with_remat(Block, self.config.remat),
            variable_axes={"params": 0, "attention": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast),
            length=self.config.n_layer,
            metadata_params={nn.PARTITION_NAME: axes.LAYERS},
        )
        return layers(self.config, self.compat, deterministic, self.rates, name="layers")(inputs, memory, context)


def _with_remat(block: type[nn.Module], remat: Remat) -> type[nn.Module]:
    """Returns the layer with activation checkpointing (remat): its backward pass computes activations again."""
    if remat is Remat.NONE:
        return block
    policies = {Remat.FULL: None, Remat.DOTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    # Inside a scan the compiler cannot merge the recomputation with the forward pass, so the barrier
    # that prevents it would only cost time.
    return nn.remat(block, policy=policies[remat], prevent_cse=False)
