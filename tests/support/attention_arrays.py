"""Random arrays of a call of attention."""

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops.attention import Visibility

NAMES = ("query", "key", "value", "position_key", "content_bias", "position_bias", "position_score")


def shapes(visibility: Visibility, n_head: int, width: int) -> dict[str, tuple[int, ...]]:
    batch, length = len(visibility.valid), visibility.segment_len
    keys, biases = (batch, n_head, visibility.n_keys, width), (n_head, width)
    found = (
        (batch, n_head, length, width),
        keys,
        keys,
        (n_head, visibility.n_positions, width),
        biases,
        biases,
    )
    return dict(zip(NAMES, (*found, (n_head, visibility.n_positions)), strict=True))


def draw(
    visibility: Visibility, n_head: int, width: int, *, names=NAMES, dtype=jnp.float32
) -> dict[str, jax.Array]:
    rng = np.random.default_rng(4)
    drawn = {
        name: rng.normal(size=shape) for name, shape in shapes(visibility, n_head, width).items()
    }
    return {name: jnp.asarray(drawn[name], dtype) for name in names}
