"""One layer with its feed-forward network, and the stack of N layers as one `nn.scan`.

Letters: B batch size, L segment length, M memory length, N layers, D model size, F inner size of
the feed-forward network.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig, NormPlace
from txl_jax.modules.attention import Attention, LayerContext
from txl_jax.modules.dropout import dropout
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.remat import checkpointed, for_platform
from txl_jax.ops.attention.problem import default_device
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain


def layer_norm(name: str, config: ModelConfig) -> nn.LayerNorm:
    """Returns a layer norm over D, computed in at least float32, with outputs in the compute dtype.

    The variance is computed from the centred values, because flax's default, E[x^2] - E[x]^2,
    cancels in float32.
    """
    return nn.LayerNorm(
        epsilon=config.compat.layer_norm_eps,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.result_type(float),  # Like all parameters: float64 in a float64 run.
        use_fast_variance=False,
        scale_init=axes.ones(axes.NORM),
        bias_init=axes.zeros(axes.NORM),
        name=name,
    )


class Dense(NamedTuple):
    """Parameters of x W + b."""

    kernel: Any  # W [n, m], an array, or at inference an `Int8` or `Transposed`.
    bias: jax.Array  # b [m].


def feed_forward(
    inputs: jax.Array,
    inner: Dense,
    outer: Dense,
    drop: Callable[[jax.Array], jax.Array] = lambda states: states,
) -> jax.Array:
    """Computes drop(drop(ReLU(x W + b)) W' + b'): [B, L, D] -> [B, L, D].

    `inner` contains W [D, F] and b, `outer` W' [F, D] and b'. Inference calls it without `drop`.
    """
    hidden = _apply_dense(inputs, inner)
    # The constraint only places the array on the devices, and does not change values.
    hidden = constrain(hidden, axes.BATCH, axes.LENGTH, axes.INNER)
    hidden = drop(nn.relu(hidden))
    return drop(_apply_dense(hidden, outer))


def _apply_dense(inputs: jax.Array, parameters: Dense) -> jax.Array:
    """Computes x W + b: [..., n] -> [..., m]."""
    outputs = project(inputs, parameters.kernel)
    return outputs + jnp.broadcast_to(parameters.bias, outputs.shape)


class FeedForward(nn.Module):
    """Feed-forward network D -> F -> D with ReLU, without residual and layer norm."""

    config: ModelConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, *, deterministic: bool) -> jax.Array:
        """Applies the network: [B, L, D] -> [B, L, D]."""
        c = self.config
        dtype = inputs.dtype
        inner = self._create_dense(
            "inner", (c.d_model, c.d_inner), (axes.EMBED, axes.INNER), dtype=dtype
        )
        outer = self._create_dense(
            "outer", (c.d_inner, c.d_model), (axes.INNER, axes.EMBED), dtype=dtype
        )

        def drop(states: jax.Array) -> jax.Array:
            """Applies a dropout that this call creates, so that it has its own masks."""
            return dropout(c, c.dropout.rate, deterministic=deterministic)(states)

        return feed_forward(inputs, inner, outer, drop)

    def _create_dense(
        self, name: str, shape: tuple[int, int], logical_axes: tuple[str, str], *, dtype: jnp.dtype
    ) -> Dense:
        """Creates the parameters `name`_kernel and `name`_bias, and casts them to `dtype`.

        `shape` and `logical_axes` belong to the kernel. The bias has the second entry of each.
        """
        kernel_init = axes.normal(self.config.init_std, *logical_axes)
        kernel = self.param(f"{name}_kernel", kernel_init, shape)
        bias_init = axes.zeros(logical_axes[1])
        bias = self.param(f"{name}_bias", bias_init, (shape[1],))
        return Dense(kernel.astype(dtype), bias.astype(dtype))


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection and a layer norm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, inputs: jax.Array, memory: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Applies one layer to a segment.

        Args:
          inputs: [B, L, D].
          memory: [B, M, D], the layer's inputs at the M positions before the segment.
          context: Inputs shared by all layers.

        Returns:
          The outputs [B, L, D], and the rows [B, L, D] that the memory stores for this segment: the
          inputs, with positions if the encoding adds them in each layer. The layer does not return
          the whole memory, because the scan over layers would copy it once per layer.
        """
        c = self.config
        encoding = encoding_of(c)
        # The encoding's parameters, such as u and v: the layer's own, or shared by all layers.
        context = context.replace(parameters=encoding.layer_parameters(context.parameters))
        attention = Attention(c, name="attention")
        attention_norm = layer_norm("attention_norm", c)
        feed = functools.partial(
            FeedForward(c, name="feed_forward"), deterministic=context.deterministic
        )
        feed_norm = layer_norm("feed_forward_norm", c)

        # Only learned vectors are added to layers. Other encodings return the inputs unchanged.
        inputs = encoding.add_to_layer_inputs(inputs, context.codes)
        if c.layer_norm is NormPlace.POST:
            middle = attention_norm(inputs + attention(inputs, (memory, inputs), context))
            outputs = feed_norm(middle + feed(middle))
        else:
            # The memory contains values before the norm, and is normalised with the segment.
            normed = attention_norm(jnp.concatenate([memory, inputs], axis=1))
            mem_len = memory.shape[1]
            normed_memory = normed[:, :mem_len]
            normed_segment = normed[:, mem_len:]
            attended = attention(normed_segment, (normed_memory, normed_segment), context)
            middle = inputs + attended
            outputs = middle + feed(feed_norm(middle))
        return constrain(outputs, axes.BATCH, axes.LENGTH, None), inputs


class Stack(nn.Module):
    """N layers with stacked parameters: compile time does not grow with N."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, inputs: jax.Array, memory: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Applies all layers to a segment.

        Args:
          inputs: [B, L, D], inputs of the first layer.
          memory: [N, B, M, D].
          context: Inputs shared by all layers.

        Returns:
          The last layer's outputs [B, L, D], and the inputs of all layers, [N, B, L, D], which the
          memory stores for this segment.
        """
        c = self.config
        # An encoding is not a module. It creates its parameters in the module that calls it: those
        # that all layers share here, outside of the scan, and those of one layer in `Block`.
        context = context.replace(parameters=encoding_of(c).shared_parameters())
        layers = nn.scan(
            # A run has replaced `Remat.AUTO` with its choice. A model without a run still has it.
            checkpointed(Block, for_platform(c.remat, default_device().platform)),
            # Parameters, and arrays sown by attention, are stacked along a first axis of layers.
            variable_axes={"params": 0, "attention": 0},
            # Each layer has its own initial values and dropout masks.
            split_rngs={"params": True, "dropout": True},
            # The scan carries the inputs from layer to layer. Of the other arguments, a layer gets
            # its slice of the memory and the whole context. Rows for the memory are stacked.
            in_axes=(0, nn.broadcast),
            length=c.n_layer,
            metadata_params={nn.PARTITION_NAME: axes.LAYERS},
        )
        return layers(c, name="layers")(inputs, memory, context)
