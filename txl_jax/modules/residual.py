"""Residual connections: the sum of a branch and its input, or the gate of GTrXL (Parisotto et al., 2019, section 3.2).

The gate is a GRU cell whose state is the input x and whose reading is the branch's output y:

    r = sigmoid(W_r y + U_r x)
    z = sigmoid(W_z y + U_z x - b)
    h = tanh(W_h y + U_h (r * x))
    output = (1 - z) * x + z * h

With b = 2 at first, z is 0.12: a new layer passes on its input, so that a policy can act on single observations before
attention has learned anything. As in the paper a ReLU ends the branch, and the layer norm is at its beginning
(`layer_norm=pre`).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import ModelConfig, Residual
from txl_jax.ops.matmul import project
from txl_jax.sharding import axes, initializers

_INITIAL_BIAS = 2.0  # b, the paper's value for DMLab-30.


class ResidualConnection(nn.Module):
    """A residual connection around one part of a layer."""

    config: ModelConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, branch: jax.Array) -> jax.Array:
        """Joins a part's input x with its output y, both [B, L, D]; a sum has no parameters."""
        c = self.config
        if c.residual is Residual.SUM:
            return inputs + branch
        dtype, width = inputs.dtype, c.d_model
        square = initializers.normal(c.init_std, axes.EMBED, axes.GATE)
        gates = initializers.normal(c.init_std, axes.EMBED, None, axes.GATE)
        of_branch = self.param("branch_kernel", gates, (width, 3, width)).astype(dtype)
        of_inputs = self.param("input_kernel", gates, (width, 2, width)).astype(dtype)
        of_reset = self.param("reset_kernel", square, (width, width)).astype(dtype)
        bias = self.param("bias", initializers.constant(_INITIAL_BIAS, axes.GATE), (width,)).astype(dtype)
        read = project(nn.relu(branch), of_branch)
        kept = project(inputs, of_inputs)
        reset = nn.sigmoid(read[..., 0, :] + kept[..., 0, :])
        update = nn.sigmoid(read[..., 1, :] + kept[..., 1, :] - jnp.broadcast_to(bias, inputs.shape))
        candidate = nn.tanh(read[..., 2, :] + project(reset * inputs, of_reset))
        return (1 - update) * inputs + update * candidate
