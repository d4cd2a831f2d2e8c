"""One layer with its feed-forward network, and the stack of N layers as one `nn.scan`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig, NormPlace, Remat
from txl_jax.modules.attention import Attention, LayerContext
from txl_jax.modules.dropout import dropout
from txl_jax.modules.positions import encoding_of
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain


def layer_norm(name: str, config: ModelConfig) -> nn.LayerNorm:
    """Returns a layer norm over D, computed in at least float32, with outputs in the compute type.

    The variance is taken of the centred values, because flax's default, E[x^2] - E[x]^2, cancels in
    float32.
    """
    return nn.LayerNorm(
        epsilon=config.compat.layer_norm_eps,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.result_type(float),  # As every other parameter: float64 in a float64 run.
        use_fast_variance=False,
        scale_init=axes.ones(axes.NORM),
        bias_init=axes.zeros(axes.NORM),
        name=name,
    )


class Dense(NamedTuple):
    """Parameters of x W + b."""

    kernel: Any  # [n, m], an array; at inference perhaps `Int8` or `Transposed`.
    bias: jax.Array  # [m]


def feed_forward(
    inputs: jax.Array,
    inner: Dense,
    outer: Dense,
    drop: Callable[[jax.Array], jax.Array] = lambda states: states,
) -> jax.Array:
    """Computes drop(drop(ReLU(x W + b)) W' + b'): [B, L, D] -> [B, L, D]."""
    # Sharding: changes no number.
    hidden = constrain(_dense(inputs, inner), axes.BATCH, axes.LENGTH, axes.INNER)
    return drop(_dense(drop(nn.relu(hidden)), outer))


class FeedForward(nn.Module):
    """Feed-forward network D -> F -> D with ReLU, without residual and layer norm."""

    config: ModelConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, *, deterministic: bool) -> jax.Array:
        """Applies the network: [B, L, D] -> [B, L, D]."""
        c = self.config
        inner = self._parameters(
            "inner", inputs.dtype, (c.d_model, axes.EMBED), (c.d_inner, axes.INNER)
        )
        outer = self._parameters(
            "outer", inputs.dtype, (c.d_inner, axes.INNER), (c.d_model, axes.EMBED)
        )
        # Two modules, each with a random stream of its own.
        return feed_forward(
            inputs,
            inner,
            outer,
            lambda states: dropout(c, c.dropout.rate, deterministic=deterministic)(states),
        )

    def _parameters(
        self, name: str, dtype: jnp.dtype, rows: tuple[int, str], columns: tuple[int, str]
    ) -> Dense:
        """Creates `name`_kernel and `name`_bias. `rows` and `columns` are (size, logical axis)."""
        (n_row, row_axis), (n_column, column_axis) = rows, columns
        init = axes.normal(self.config.init_std, row_axis, column_axis)
        kernel = self.param(f"{name}_kernel", init, (n_row, n_column)).astype(dtype)
        bias = self.param(f"{name}_bias", axes.zeros(column_axis), (n_column,)).astype(dtype)
        return Dense(kernel, bias)


def _dense(inputs: jax.Array, parameters: Dense) -> jax.Array:
    """Computes x W + b: [..., n] -> [..., m]."""
    outputs = project(inputs, parameters.kernel)
    return outputs + jnp.broadcast_to(parameters.bias, outputs.shape)


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection and a layer norm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, inputs: jax.Array, memory: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Applies one layer: inputs [B, L, D] and memory [B, M, D] -> outputs [B, L, D].

        Returns the inputs again as a second result.

        The second result, with positions that the encoding adds in each layer, goes into the
        memory. Only this segment's rows leave the layer: passing the whole memory through the scan
        would copy it once per layer.
        """
        c = self.config
        attention, feed_forward = (
            Attention(c, name="attention"),
            FeedForward(c, name="feed_forward"),
        )
        attention_norm, feed_forward_norm = (
            layer_norm("attention_norm", c),
            layer_norm("feed_forward_norm", c),
        )
        encoding = encoding_of(c)
        context = context.replace(parameters=encoding.layer_parameters(context.parameters))
        feed = functools.partial(feed_forward, deterministic=context.deterministic)
        inputs = encoding.add_to_layer_inputs(inputs, context.codes)
        if c.layer_norm is NormPlace.POST:
            middle = attention_norm(inputs + attention(inputs, (memory, inputs), context))
            outputs = feed_forward_norm(middle + feed(middle))
        else:  # The memory holds values before the norm and is normalised with the segment.
            normed = attention_norm(jnp.concatenate([memory, inputs], axis=1))
            memory, segment = normed[:, : memory.shape[1]], normed[:, memory.shape[1] :]
            middle = inputs + attention(segment, (memory, segment), context)
            outputs = middle + feed(feed_forward_norm(middle))
        return constrain(outputs, axes.BATCH, axes.LENGTH, None), inputs


class Stack(nn.Module):
    """N layers with stacked parameters: compile time does not grow with N."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, inputs: jax.Array, memory: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        """Applies all layers: [B, L, D] and memory [N, B, M, D] -> outputs [B, L, D].

        Returns the layer inputs [N, B, L, D] as a second result.
        """
        context = context.replace(parameters=encoding_of(self.config).shared_parameters())
        layers = nn.scan(
            _with_remat(Block, self.config.remat),
            variable_axes={"params": 0, "attention": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast),
            length=self.config.n_layer,
            metadata_params={nn.PARTITION_NAME: axes.LAYERS},
        )
        return layers(self.config, name="layers")(inputs, memory, context)


def _with_remat(block: type[nn.Module], remat: Remat) -> type[nn.Module]:
    """Returns the layer with activation checkpointing (remat).

    Its backward pass recomputes activations.
    """
    if remat is Remat.NONE:
        return block
    policies = {
        Remat.FULL: None,
        Remat.DOTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    # Inside a scan the compiler cannot merge the recomputation with the forward pass, so the
    # barrier that prevents it would only cost time.
    return nn.remat(block, policy=policies[remat], prevent_cse=False)
