"""Learned position keys (Shaw et al., 2018), on keys only, as in table 6 of the paper.

The authors' release (attn_type 1) adds two terms to the paper, with `compat.shaw_terms=original`: u
with content, and a learned number per distance.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from txl_jax.config import ShawTerms
from txl_jax.modules.positions.encoding import (
    DecodeTerms,
    Dimension,
    Learned,
    OriginalTensor,
    PositionEncoding,
    PositionKeys,
    PositionTerms,
    Projections,
)
from txl_jax.ops.attention.distances import key_distances, table_length
from txl_jax.sharding import axes


class ShawPositions(PositionEncoding):
    """Shaw's encoding. Each layer has a table for the distances 0, .., n - 1."""

    generates_by_token = True
    original_type = 1
    products_per_key = 3
    original_projections: ClassVar[Mapping[str, Sequence[str]]] = {
        "qkv_net": ("query", "key", "value")
    }

    @property
    def has_position_score(self) -> bool:
        """Whether scores have a number per distance, as in the original."""
        return self.config.compat.shaw_terms is ShawTerms.ORIGINAL

    def position_terms(
        self, codes: jax.Array | None, parameters: Any, projections: Projections, dtype: jnp.dtype
    ) -> PositionTerms:
        """Returns the table's entries of all distances. The codes are distances, int [K]."""
        c = self.config
        distances = Dimension(c.table_size, axes.POSITIONS)
        heads = Dimension(c.n_head, axes.HEADS)
        head_dim = Dimension(c.d_head, axes.HEAD_DIM)

        arrays: dict[str, tuple[Dimension, ...]] = {"key": (distances, heads, head_dim)}
        if self.has_position_score:
            arrays["score"] = (distances, heads)
            arrays["content"] = (heads, head_dim)
        table = Learned(c, arrays, name="positions")()

        # Term (b) is the product of the query with this key: [K, H, E] -> [H, K, E].
        position_key = table["key"].astype(dtype)[codes].swapaxes(0, 1)
        if not self.has_position_score:
            return PositionTerms(position_key)
        return PositionTerms(
            position_key,
            # u of term (c).
            content_bias=table["content"].astype(dtype),
            # A number per distance instead of term (d), in the dtype of the parameters.
            position_score=table["score"][codes].T,
        )

    def decode_terms(
        self, layer: Any, shared: Any, *, segment_len: int, capacity: int, clamp_len: int | None
    ) -> DecodeTerms:
        """Looks up the entries of the P distances that segment and cache need."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        n_position = table_length(
            segment_len=segment_len, capacity=capacity, clamp_len=c.clamp(clamp_len)
        )
        distances = key_distances(n_position)

        table = layer["attention"]["positions"]
        key = table["key"].astype(dtype)[distances].transpose(1, 2, 0)
        if not self.has_position_score:
            return DecodeTerms(position_keys=PositionKeys(bias=None, key=key, score=None))

        # The terms of the original are divided by sqrt(E) after they are cast. The number per
        # distance keeps the dtype of the parameters, as in training.
        scale = c.d_head**-0.5
        score = table["score"][distances].T * scale
        return DecodeTerms(
            content_bias=table["content"].astype(dtype) * scale,
            position_keys=PositionKeys(bias=None, key=key, score=score),
        )

    def original_tensors(self) -> list[OriginalTensor]:
        """Returns the tables of keys and scores, and u, all per layer."""
        c = self.config
        parent = "stack/layers/attention/positions"
        keys_shape = (c.n_layer, c.table_size, c.n_head, c.d_head)
        scores_shape = (c.n_layer, c.table_size, c.n_head)
        u_shape = (c.n_layer, c.n_head, c.d_head)
        return [
            OriginalTensor("r_emb", keys_shape, f"{parent}/key", keys_shape, reversed=True),
            OriginalTensor("r_bias", scores_shape, f"{parent}/score", scores_shape, reversed=True),
            OriginalTensor("r_w_bias", u_shape, f"{parent}/content", u_shape, reversed=False),
        ]
