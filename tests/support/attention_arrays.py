"""Random arrays of a call of attention."""

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops.attention import Visibility

NAMES = ("query", "key", "value", "position_key", "content_bias", "position_bias", "position_score")


def shapes(visibility: Visibility, n_head: int, width: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each operand, by its name. `width` is E, the size of a head."""
    batch = len(visibility.valid)
    return {
        "query": (batch, n_head, visibility.segment_len, width),
        "key": (batch, n_head, visibility.n_keys, width),
        "value": (batch, n_head, visibility.n_keys, width),
        "position_key": (n_head, visibility.n_positions, width),
        "content_bias": (n_head, width),
        "position_bias": (n_head, width),
        "position_score": (n_head, visibility.n_positions),
    }


def draw(
    visibility: Visibility, n_head: int, width: int, *, names=NAMES, dtype=jnp.float32
) -> dict[str, jax.Array]:
    """Returns normal numbers for the operands with these names.

    All operands are drawn, so that an operand has the same numbers whatever the names.
    """
    rng = np.random.default_rng(4)
    arrays = {}
    for name, shape in shapes(visibility, n_head, width).items():
        arrays[name] = rng.normal(size=shape)
    return {name: jnp.asarray(arrays[name], dtype) for name in names}


def draw_on_host(
    visibility: Visibility, n_head: int, width: int, *, names=NAMES, dtype="float32"
) -> dict[str, np.ndarray]:
    """The numbers of `draw`, as arrays for compiled functions.

    JAX compiles a conversion for each shape, and numpy does not.
    """
    rng = np.random.default_rng(4)
    arrays = {}
    for name, shape in shapes(visibility, n_head, width).items():
        arrays[name] = rng.normal(size=shape).astype(jnp.dtype(dtype))
    return {name: arrays[name] for name in names}
