"""Absolute positions as learned vectors added to the inputs of each layer (Al-Rfou et al., 2018).

Positions are counted back from the segment's end. A layer's memory stores its inputs with the
vectors added.
"""

from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.modules.positions.encoding import (
    DecodeTerms,
    Dimension,
    Learned,
    OriginalTensor,
    PositionEncoding,
)
from txl_jax.ops.attention.distances import key_distances
from txl_jax.sharding import axes


class LearnedPositions(PositionEncoding):
    """Al-Rfou's encoding. Each layer has vectors [n, D], for the distances 0, .., n - 1."""

    original_type = 3

    def add_to_layer_inputs(self, inputs: jax.Array, codes: jax.Array | None) -> jax.Array:
        """Adds the vectors of the distances L - 1, .., 0 to a layer's inputs, [B, L, D]."""
        assert codes is not None, (
            "codes are None; expected the distances that `shared_codes` returns"
        )
        c = self.config
        # The codes are distances of memory and segment, and the last L are the segment's.
        segment_len = inputs.shape[1]
        distances = codes[codes.shape[0] - segment_len :]

        dimensions = (Dimension(c.table_size, axes.POSITIONS), Dimension(c.d_model, axes.EMBED))
        table = Learned(c, {"vector": dimensions}, name="positions")()["vector"]
        vectors = table.astype(inputs.dtype)[distances]
        return inputs + vectors[None]

    def decode_terms(
        self, layer: Any, shared: Any, *, segment_len: int, capacity: int, clamp_len: int | None
    ) -> DecodeTerms:
        """Looks up the vectors of a segment's positions."""
        distances = key_distances(segment_len, clamp_len=self.config.clamp(clamp_len))
        table = layer["positions"]["vector"].astype(jnp.dtype(self.config.dtype))
        return DecodeTerms(position_vectors=table[distances])

    def original_tensors(self) -> list[OriginalTensor]:
        """Returns the vectors of all layers, which the original cuts into heads."""
        c = self.config
        vectors = OriginalTensor(
            name="r_emb",
            shape=(c.n_layer, c.table_size, c.n_head, c.d_head),
            path="stack/layers/positions/vector",
            path_shape=(c.n_layer, c.table_size, c.d_model),
            reversed=True,
        )
        return [vectors]
