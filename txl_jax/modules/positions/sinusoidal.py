"""Absolute positions as sinusoids added to the embedding (Vaswani et al., 2017).

Positions are counted back from the segment's end: row i gets R(L - 1 - i), with distances above
`clamp_len` clamped to it (the original's attn_type 2). Only the segment's rows get an encoding. The
memory is reused unchanged (section 3.3), whereas the original adds another encoding to it in every
segment.
"""

import jax
import jax.numpy as jnp

from txl_jax.modules.positions.encoding import PositionEncoding
from txl_jax.ops.attention.distances import key_distances, sinusoids


class SinusoidalPositions(PositionEncoding):
    """The encoding of the Transformer."""

    original_type = 2

    def add_to_embedding(self, embedded: jax.Array, *, clamp_len: int | None) -> jax.Array:
        """Adds R(L - 1), .., R(0) to the input of the first layer, [B, L, D]."""
        c = self.config
        segment_len = embedded.shape[1]
        distances = key_distances(segment_len, clamp_len=clamp_len)
        codes = sinusoids(distances, c.d_model, jnp.dtype(c.dtype))
        return embedded + codes[None]
