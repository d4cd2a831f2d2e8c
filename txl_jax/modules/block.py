"""One layer, and the stack of N layers as one `nn.scan`."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax.config import CompatConfig, Encoding, ModelConfig, NormPlace, Remat
from txl_jax.modules import initializers
from txl_jax.modules.attention import Attention
from txl_jax.modules.dropout import DropoutRates
from txl_jax.modules.feed_forward import FeedForward
from txl_jax.modules.position_encodings import AddedTable, PositionBiases
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain


class LayerContext(NamedTuple):
    """What every layer reads alike."""

    # Of the distances K - 1, .., 0: codes [K, D], or where tables are learned the distances themselves, int [K], clamped;
    # None with sinusoids at the input.
    positions: jax.Array | None
    mask: jax.Array  # bool [B, L, K]
    biases: tuple[jax.Array, jax.Array] | None  # u and v, [H, E] each; None: each layer has its own, or none


def layer_norm(name: str, *, compat: CompatConfig, dtype: jnp.dtype) -> nn.LayerNorm:
    """A layer norm over D, computed in at least float32, with an output of type `dtype`.

    The variance is taken of the centred values; flax's default, E[x^2] - E[x]^2, cancels in float32.
    """
    return nn.LayerNorm(
        epsilon=compat.layer_norm_eps,
        dtype=dtype,
        param_dtype=jnp.result_type(float),  # As every other parameter: float64 in a float64 run.
        use_fast_variance=False,
        scale_init=initializers.ones(axes.NORM),
        bias_init=initializers.zeros(axes.NORM),
        name=name,
    )


class Block(nn.Module):
    """Attention and feed-forward, each with a residual path and a layer norm."""

    config: ModelConfig
    compat: CompatConfig
    deterministic: bool
    rates: DropoutRates | None = None  # None: those of the config.

    @nn.compact
    def __call__(self, inputs: jax.Array, memory: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array]:
        """One layer: inputs [B, L, D] and memory [B, M, D] -> outputs [B, L, D], and the inputs again.

        The second result is what the memory will keep, with Al-Rfou's positions added. Only this segment's rows leave
        the layer: handing the whole memory through the scan would copy it once per layer.
        """
        c = self.config
        dtype = inputs.dtype
        attention = Attention(c, self.compat, self.deterministic, self.rates, name="attention")
        feed_forward = FeedForward(c, self.deterministic, self.rates, name="feed_forward")
        attention_norm = layer_norm("attention_norm", compat=self.compat, dtype=dtype)
        feed_forward_norm = layer_norm("feed_forward_norm", compat=self.compat, dtype=dtype)
        biases = PositionBiases(c, name="biases")() if c.untie_r else context.biases

        def attend(segment: jax.Array, memory: jax.Array) -> jax.Array:
            return attention(segment, (memory, segment), context.positions, context.mask, biases)

        if c.encoding is Encoding.AL_RFOU:
            places = context.positions[memory.shape[1] :]
            inputs += AddedTable(c, name="positions")().astype(dtype)[places][None]
        if c.layer_norm is NormPlace.POST:
            middle = attention_norm(inputs + attend(inputs, memory))
            outputs = feed_forward_norm(middle + feed_forward(middle))
        else:  # The memory holds values before the norm and is normalised with the segment.
            normed = attention_norm(jnp.concatenate([memory, inputs], axis=1))
            middle = inputs + attend(normed[:, memory.shape[1] :], normed[:, : memory.shape[1]])
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
        """[B, L, D] and memory [N, B, M, D] -> outputs [B, L, D] and layer inputs [N, B, L, D]."""
        c = self.config
        if c.encoding is Encoding.RELATIVE and not (c.untie_r or c.tie_positions):
            context = context._replace(biases=PositionBiases(self.config, name="biases")())
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
    if remat is Remat.NONE:
        return block
    policies = {Remat.FULL: None, Remat.DOTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    # Inside a scan the compiler cannot merge the recomputation with the forward pass, so the barrier
    # that prevents it would only cost time.
    return nn.remat(block, policy=policies[remat], prevent_cse=False)
