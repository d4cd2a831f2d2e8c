"""Attention over tiles of queries and keys in plain XLA: the scores [B, H, L, K] are never written.

    training.py  `tiled_attention`, forward and backward
    blocks.py    one block of the scores
    groups.py    the loop over rows and heads
    layout.py    how the scores of one head are cut
    cached.py    `tiled_cached_attention`, a KV cache in place of the memory, for inference
    ring.py      blocks of a KV cache and their position scores
    skew.py      the relative shift of one tile
    limits.py    its tiles, and where it is faster

Letters as in `txl_jax.ops.attention`, and: G rows of a group, n queries and m keys of a block, W distances of a block.
"""

from txl_jax.ops.attention.tiled.cached import tiled_cached_attention
from txl_jax.ops.attention.tiled.training import tiled_attention

__all__ = ["tiled_attention", "tiled_cached_attention"]
