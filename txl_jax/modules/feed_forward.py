"""The position-wise feed-forward network of a layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.modules.dropout import DropoutRates, dropout
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain


class Dense(NamedTuple):
    """Parameters of x W + b."""

    kernel: Any  # [n, m], an array; at inference perhaps `Int8` or `Transposed`.
    bias: jax.Array  # [m]


def feed_forward(
    inputs: jax.Array, inner: Dense, outer: Dense, drop: Callable[[jax.Array], jax.Array] = lambda states: states
) -> jax.Array:
    """Computes drop(drop(ReLU(x W + b)) W' + b'): [B, L, D] -> [B, L, D]."""
    hidden = constrain(_dense(inputs, inner), axes.BATCH, axes.LENGTH, axes.INNER)
    return drop(_dense(drop(nn.relu(hidden)), outer))


class FeedForward(nn.Module):
    """Feed-forward network D -> F -> D with ReLU, without residual and layer norm."""

    config: ModelConfig
    deterministic: bool
    rates: DropoutRates | None = None  # None: those of the config.

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the network: [B, L, D] -> [B, L, D]."""
        c, rates = self.config, self.rates or DropoutRates.of(self.config.dropout)
        inner = self._parameters("inner", inputs.dtype, (c.d_model, axes.EMBED), (c.d_inner, axes.INNER))
        outer = self._parameters("outer", inputs.dtype, (c.d_inner, axes.INNER), (c.d_model, axes.EMBED))

        def drop(states: jax.Array) -> jax.Array:
            return dropout(c, rates.rate, deterministic=self.deterministic)(states)

        return feed_forward(inputs, inner, outer, drop)

    def _parameters(self, name: str, dtype: jnp.dtype, rows: tuple[int, str], columns: tuple[int, str]) -> Dense:
        """Creates `name`_kernel and `name`_bias; `rows` and `columns` are (size, logical axis)."""
        (n_row, row_axis), (n_column, column_axis) = rows, columns
        init = axes.normal(self.config.init_std, row_axis, column_axis)
        kernel = self.param(f"{name}_kernel", init, (n_row, n_column)).astype(dtype)
        bias = self.param(f"{name}_bias", axes.zeros(column_axis), (n_column,)).astype(dtype)
        return Dense(kernel, bias)


def _dense(inputs: jax.Array, parameters: Dense) -> jax.Array:
    """Computes x W + b: [..., n] -> [..., m]."""
    outputs = project(inputs, parameters.kernel)
    return outputs + jnp.broadcast_to(parameters.bias, outputs.shape)
