"""Learned keys of distances (Shaw et al., 2018), on keys only, as in table 6 of the paper.

The authors' release (attn_type 1) has more than the paper, for `compat.shaw_terms=original`: u with
content, and a learned number per distance.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from txl_jax.config import ShawTerms
from txl_jax.modules.positions.encoding import (
    DecodeTerms,
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
    """Shaw's encoding. Each layer has a table of the distances 0 .. n - 1."""

    generates_by_token = True
    original_type = 1
    products_per_key = 3
    original_projections: ClassVar[Mapping[str, Sequence[str]]] = {
        "qkv_net": ("query", "key", "value")
    }

    @property
    def has_position_score(self) -> bool:
        """Returns whether scores have a number per distance, as in the original."""
        return self.config.compat.shaw_terms is ShawTerms.ORIGINAL

    def position_terms(
        self, codes: jax.Array | None, parameters: Any, projections: Projections, dtype: jnp.dtype
    ) -> PositionTerms:
        """Returns the table's entries of all distances."""
        c = self.config
        lead, heads, width = (
            (c.table_size, axes.POSITIONS),
            (c.n_head, axes.HEADS),
            (c.d_head, axes.HEAD_DIM),
        )
        # Term (b): q . key.
        arrays: dict[str, Sequence[tuple[int, str]]] = {"key": (lead, heads, width)}
        # Instead of term (d), and u of term (c).
        if self.has_position_score:
            arrays |= {"score": (lead, heads), "content": (heads, width)}
        table = Learned(c, arrays, name="positions")()
        position_key = table["key"].astype(dtype)[codes].swapaxes(0, 1)
        if not self.has_position_score:
            return PositionTerms(position_key)
        return PositionTerms(
            position_key, table["content"].astype(dtype), position_score=table["score"][codes].T
        )

    def decode_terms(
        self, layer: Any, shared: Any, *, segment_len: int, capacity: int, clamp_len: int | None
    ) -> DecodeTerms:
        """Takes the entries of the P distances that segment and cache need."""
        c = self.config
        scale, dtype = c.d_head**-0.5, jnp.dtype(c.dtype)
        n_position = table_length(
            segment_len=segment_len, capacity=capacity, clamp_len=c.clamp(clamp_len)
        )
        distances = key_distances(n_position)
        table = {name: leaf.astype(dtype) for name, leaf in layer["attention"]["positions"].items()}
        key = table["key"][distances].transpose(1, 2, 0)
        if "score" not in table:  # As in the paper; else as the original has it.
            return DecodeTerms(None, PositionKeys(bias=None, key=key, score=None))
        score = table["score"][distances].T * scale
        return DecodeTerms(table["content"] * scale, PositionKeys(bias=None, key=key, score=score))

    def original_tensors(self) -> list[OriginalTensor]:
        """Returns the tables of keys and scores, and u, all per layer."""
        c = self.config
        lead, heads = (c.n_layer, c.table_size), (c.n_head, c.d_head)
        return [
            OriginalTensor(name, shape, f"stack/layers/attention/positions/{ours}", shape, turned)
            for name, shape, turned, ours in (
                ("r_emb", (*lead, *heads), True, "key"),
                ("r_bias", (*lead, c.n_head), True, "score"),
                ("r_w_bias", (c.n_layer, *heads), False, "content"),
            )
        ]
