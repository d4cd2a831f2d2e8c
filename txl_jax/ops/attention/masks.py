"""Which keys a query may see.

For L = 3 and M = 3 (memory | segment), 1 = visible:

    causal, full memory     one slot filled      same_length, window 3
      1 1 1 | 1 . .           . . 1 | 1 . .         . 1 1 | 1 . .
      1 1 1 | 1 1 .           . . 1 | 1 1 .         . . 1 | 1 1 .
      1 1 1 | 1 1 1           . . 1 | 1 1 1         . . . | 1 1 1
"""

import jax
import jax.numpy as jnp


def attention_mask(valid: jax.Array, *, segment_len: int, mem_len: int, window: int | None = None) -> jax.Array:
    """The visible pairs as bool [B, L, K].

    Args:
      valid: int32 [B], filled memory slots of each row, right-aligned (newest last).
      segment_len: L.
      mem_len: M.
      window: keys that a query sees at most, itself included (`same_length`); None: no limit.
    """
    query_L = jnp.arange(segment_len, dtype=jnp.int32)
    key_K = jnp.arange(mem_len + segment_len, dtype=jnp.int32)
    distance_LxK = mem_len + query_L[:, None] - key_K[None, :]
    visible_LxK = distance_LxK >= 0
    if window is not None:
        visible_LxK &= distance_LxK < window
    filled_BxK = key_K[None, :] >= mem_len - valid[:, None]
    return visible_LxK[None, :, :] & filled_BxK[:, None, :]
