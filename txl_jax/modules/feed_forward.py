"""The position-wise feed-forward network of a layer."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig
from txl_jax.modules.dropout import DropoutRates, dropout, weight_dropout
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes, initializers
from txl_jax.sharding.activations import constrain


class FeedForward(nn.Module):
    """Feed-forward network D -> F -> D with ReLU, without residual and layer norm."""

    config: ModelConfig
    deterministic: bool
    rates: DropoutRates | None = None  # None: those of the config.

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Applies the network: [B, L, D] -> [B, L, D]."""
        c, rates = self.config, self.rates or DropoutRates.of(self.config.dropout)
        drop_weights = weight_dropout(rates.weight, deterministic=self.deterministic)
        inner = self._dense("inner", inputs, (c.d_model, axes.EMBED), (c.d_inner, axes.INNER), drop_weights)
        inner = constrain(inner, axes.BATCH, axes.LENGTH, axes.INNER)
        inner = dropout(c, rates.rate, deterministic=self.deterministic)(nn.relu(inner))
        outer = self._dense("outer", inner, (c.d_inner, axes.INNER), (c.d_model, axes.EMBED), drop_weights)
        return dropout(c, rates.rate, deterministic=self.deterministic)(outer)

    def _dense(
        self,
        name: str,
        inputs: jax.Array,
        rows: tuple[int, str],
        columns: tuple[int, str],
        drop_weights: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Computes x W + b.

        The parameters are `name`_kernel and `name`_bias; `rows` and `columns` are (size, logical axis).
        """
        (n_row, row_axis), (n_column, column_axis) = rows, columns
        init = initializers.normal(self.config.init_std, row_axis, column_axis)
        kernel = drop_weights(self.param(f"{name}_kernel", init, (n_row, n_column))).astype(inputs.dtype)
        bias = self.param(f"{name}_bias", initializers.zeros(column_axis), (n_column,)).astype(inputs.dtype)
        outputs = project(inputs, kernel)
        return outputs + jnp.broadcast_to(bias, outputs.shape)
