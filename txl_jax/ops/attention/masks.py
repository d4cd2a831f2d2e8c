"""The keys that a query sees: causal, filled memory slots only, within a window.

For L = 3 and M = 3 (memory | segment), 1 = visible:

    causal, full memory     one slot filled      same_length, window 3
      1 1 1 | 1 . .           . . 1 | 1 . .         . 1 1 | 1 . .
      1 1 1 | 1 1 .           . . 1 | 1 1 .         . . 1 | 1 1 .
      1 1 1 | 1 1 1           . . 1 | 1 1 1         . . . | 1 1 1
"""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Visibility:
    """Description of the keys that the queries of a segment see, from which an implementation derives its mask.

    Attributes:
      valid: int32 [B], filled memory slots of each row, right-aligned (newest last).
      segment_len: L.
      mem_len: M.
      window: keys that a query sees at most, itself included (`same_length`); None: no limit.
    """

    valid: jax.Array
    segment_len: int = flax.struct.field(pytree_node=False)
    mem_len: int = flax.struct.field(pytree_node=False)
    window: int | None = flax.struct.field(pytree_node=False, default=None)

    def mask(self) -> jax.Array:
        """Returns the visible pairs as bool [B, L, K]."""
        return attention_mask(self.valid, segment_len=self.segment_len, mem_len=self.mem_len, window=self.window)


def attention_mask(valid: jax.Array, *, segment_len: int, mem_len: int, window: int | None = None) -> jax.Array:
    """Returns the visible pairs as bool [B, L, K].

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
