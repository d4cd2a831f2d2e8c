"""Multi-head attention over [memory; segment], with relative positions or without positions of its own."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from txl_jax import axes
from txl_jax.config import Encoding, ModelConfig
from txl_jax.modules import parameters
from txl_jax.ops.dot_product_attention import dot_product_attention
from txl_jax.ops.relative_attention import relative_attention


class PositionBiases(nn.Module):
    """u and v of the paper (the original's r_w_bias and r_r_bias), both [H, E]."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        c = self.config
        init = parameters.normal(c.init_std, axes.HEADS, axes.HEAD_DIM)
        shape = (c.n_head, c.d_head)
        return self.param("content", init, shape), self.param("position", init, shape)


class Attention(nn.Module):
    """The attention branch of a layer, without residual and layer norm. No projection has a bias.

    With absolute positions, which are in its inputs already, there is no `position_key`.
    """

    config: ModelConfig
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        segment: jax.Array,
        context: jax.Array,
        position_codes: jax.Array | None,
        mask: jax.Array,
        biases: tuple[jax.Array, jax.Array] | None,
    ) -> jax.Array:
        """[B, L, D] -> [B, L, D].

        Args:
          segment: [B, L, D], where queries come from.
          context: [B, K, D], memory and segment, where keys and values come from.
          position_codes: [K, D], codes of the distances K - 1, .., 0; None with absolute positions.
          mask: bool [B, L, K].
          biases: u and v, [H, E] each; None with absolute positions.
        """
        c = self.config
        dtype = segment.dtype
        inward = parameters.normal(c.init_std, axes.EMBED, axes.HEADS, axes.HEAD_DIM)

        def project(name: str, inputs: jax.Array) -> jax.Array:
            """[..., D] -> [..., H, E]."""
            kernel = self.param(name, inward, (c.d_model, c.n_head, c.d_head))
            return jnp.einsum("...d,dhe->...he", inputs, kernel.astype(dtype))

        # Heads before positions: the products over E and K then run on contiguous matrices, which on CPU
        # halves the time of the forward pass.
        query = project("query", segment).swapaxes(1, 2)
        key, value = (project(name, context).swapaxes(1, 2) for name in ("key", "value"))
        drop = nn.Dropout(c.attention_dropout, deterministic=self.deterministic)
        if c.encoding is Encoding.ABSOLUTE:
            attended_BxHxLxE = dot_product_attention(query, key, value, mask=mask, drop=drop)
        else:
            content_bias, position_bias = biases
            attended_BxHxLxE = relative_attention(
                query,
                key,
                value,
                project("position_key", position_codes).swapaxes(0, 1),
                content_bias=content_bias.astype(dtype),
                position_bias=position_bias.astype(dtype),
                mask=mask,
                drop=drop,
            )
        outward = parameters.normal(c.init_std, axes.HEADS, axes.HEAD_DIM, axes.EMBED)
        kernel = self.param("output", outward, (c.n_head, c.d_head, c.d_model))
        output = jnp.einsum("bhle,hed->bld", attended_BxHxLxE, kernel.astype(dtype))
        return nn.Dropout(c.dropout, deterministic=self.deterministic)(output)
