"""Tests of attention over a KV cache with position scores alone, against a loop over pairs.

With position keys it is compared with training attention, through the model, in tests/inference/test_forward.py.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.ops.attention import CachedVisibility, Visibility, cached_attention
from txl_jax.ops.attention.cached import table_length

B, H, L, R, E = 2, 3, 4, 8, 5
CLAMPS = [None, 0, 1, 3, 7, 30]  # None, below a segment, inside the ring, above all distances.


def in_ring(stored: np.ndarray, write_index: int) -> np.ndarray:
    """Puts [B, H, R, E], oldest first, where a ring with that write index has them."""
    return np.roll(stored, write_index, axis=2)


@pytest.mark.parametrize("clamp_len", CLAMPS)
@pytest.mark.parametrize("write_index", [0, 2, R - 1])
@pytest.mark.parametrize(("valid", "window"), [([R, 3], None), ([0, R], 6)])
def test_position_scores_alone_match_a_loop_over_pairs(clamp_len, write_index, valid, window, x64):
    rng = np.random.default_rng(0)
    query, key, value, stored_key, stored_value = (rng.normal(size=(B, H, n, E)) for n in (L, L, L, R, R))
    n_position = table_length(segment_len=L, capacity=R, clamp_len=clamp_len)
    score = rng.normal(size=(H, n_position))  # Of the distances P - 1, .., 0.

    distances = np.minimum(np.arange(R + L - 1, -1, -1), n_position - 1)
    expected = oracles.relative_attention(
        query,
        np.concatenate([stored_key, key], axis=2),
        np.concatenate([stored_value, value], axis=2),
        position_key=np.zeros((H, R + L, E)),
        content_bias=np.zeros((H, E)),
        position_bias=np.zeros((H, E)),
        mask=Visibility(jnp.asarray(valid), L, R, window).mask(),
        position_score=score[:, n_position - 1 - distances] * E**0.5,  # The loop divides by it.
    )
    ring = in_ring(stored_key, write_index).swapaxes(2, 3), in_ring(stored_value, write_index)
    found = cached_attention(
        jnp.asarray(query) * E**-0.5,
        jnp.asarray(key),
        jnp.asarray(value),
        tuple(jnp.asarray(part) for part in ring),
        (jnp.asarray(query), None, jnp.asarray(score)),
        CachedVisibility(jnp.asarray(valid), jnp.asarray(write_index), L, R, window),
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_positions_without_keys_and_scores_are_refused():
    rows, ring = jnp.ones((B, H, L, E)), (jnp.ones((B, H, E, R)), jnp.ones((B, H, R, E)))
    visibility = CachedVisibility(jnp.full((B,), R), jnp.asarray(0), L, R)
    with pytest.raises(ValueError, match=r"neither keys nor scores; give keys"):
        cached_attention(rows, rows, rows, ring, (rows, None, None), visibility)
