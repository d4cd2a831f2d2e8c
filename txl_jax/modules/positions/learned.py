"""Absolute positions as learned vectors added to the inputs of each layer (Al-Rfou et al., 2018).

They are counted back from the segment's end. A layer keeps its inputs with the vectors added in its
memory.
"""

from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.modules.positions.encoding import (
    DecodeTerms,
    Learned,
    OriginalTensor,
    PositionEncoding,
)
from txl_jax.ops.attention.distances import key_distances
from txl_jax.sharding import axes


class LearnedPositions(PositionEncoding):
    """Al-Rfou's encoding. Each layer has vectors [n, D], of the distances 0 .. n - 1."""

    original_type = 3

    def add_to_layer_inputs(self, inputs: jax.Array, codes: jax.Array | None) -> jax.Array:
        """Adds the vectors of the distances L - 1, .., 0 to the inputs of a layer, [B, L, D]."""
        assert codes is not None, (
            "codes are None; expected the distances that `shared_codes` returns"
        )
        c, own = self.config, codes[codes.shape[0] - inputs.shape[1] :]
        table = {"vector": ((c.table_size, axes.POSITIONS), (c.d_model, axes.EMBED))}
        vectors = Learned(c, table, name="positions")()["vector"]
        return inputs + vectors.astype(inputs.dtype)[own][None]

    def decode_terms(
        self, layer: Any, shared: Any, *, segment_len: int, capacity: int, clamp_len: int | None
    ) -> DecodeTerms:
        """Takes the vectors of a segment's own positions."""
        distances = key_distances(segment_len, clamp_len=self.config.clamp(clamp_len))
        table = layer["positions"]["vector"].astype(jnp.dtype(self.config.dtype))
        return DecodeTerms(position_vectors=table[distances])

    def original_tensors(self) -> list[OriginalTensor]:
        """Returns the vectors of all layers, which the original cuts into heads."""
        c = self.config
        lead = (c.n_layer, c.table_size)
        path = "stack/layers/positions/vector"
        return [
            OriginalTensor("r_emb", (*lead, c.n_head, c.d_head), path, (*lead, c.d_model), True)
        ]
