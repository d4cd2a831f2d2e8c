"""The relative shift of one tile in vector registers, and its transpose.

A strip of n queries (at most 128) and m keys needs the scores of n + m - 1 distances, largest first; query x meets key
y at column n - 1 - x + y of them. So row x moves to the left by n - 1 - x: at most 127 columns, one register of 128
lanes, which bounds what a row gathers from to a register and its right neighbour. For n = 3, m = 2, entry `xp` of query
x and column p:

    00 01 02 03        02 03
    10 11 12 13   ->   11 12
    20 21 22 23        20 21

Two ways, for float32 (Mosaic rotates no packed types: "unsupported packed type rotation"):

    "roll"    one strided rotation; TPU v5 and later. It turns later rows further to the right only, so it cannot undo
              itself: a rotation with a negative stride does not compile.
    "gather"  a gather of lanes within each register, then a choice of one of two neighbours; TPU v4 and later.
"""

import itertools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # Columns of a vector register.

Way = Literal["roll", "gather"]


def skew(by_distance: jax.Array, way: Way) -> jax.Array:
    """Moves the scores of a strip from "column = distance" to "column = key": [n, m + 128] -> [n, m].

    Args:
      by_distance: float32 [n, m + 128], column p of the distance that the last query and key p have; n is at most 128
        and for "roll" a multiple of 8, m a multiple of 128.
      way: "roll" or "gather".
    """
    n_query, width = by_distance.shape
    if way == "roll":
        # Row x turns right by W - n + 1 + x, that is left by n - 1 - x.
        return pltpu.roll(by_distance, width - n_query + 1, 1, stride=1, stride_axis=0)[:, : width - LANES]
    column = _lane(n_query) + _shift(n_query)
    lane, is_near = column & (LANES - 1), column < LANES
    turned = [_gather(block, lane) for block in _blocks(by_distance)]
    return _join([jnp.where(is_near, near, far) for near, far in itertools.pairwise(turned)])


def skew_from(by_distance: jax.Array, first: jax.Array) -> jax.Array:
    """Moves scores as `skew` does, from any column on: [n, m + 256] -> [n, m].

    Args:
      by_distance: float32 [n, m + 256], column `first` + p of the distance that the last query and key p have; n is at
        most 128, m a multiple of 128.
      first: int32 [], below 128.
    """
    n_query = by_distance.shape[0]
    column = _lane(n_query) + _shift(n_query) + first
    lane, is_near, is_far = column & (LANES - 1), column < LANES, column >= 2 * LANES
    turned = [_gather(block, lane) for block in _blocks(by_distance)]
    triples = zip(turned, turned[1:], turned[2:], strict=False)
    return _join([jnp.where(is_near, near, jnp.where(is_far, far, middle)) for near, middle, far in triples])


def unskew(scores: jax.Array) -> jax.Array:
    """Moves [n, m] to the columns of [n, m + 128] where `skew` reads them, zeros elsewhere: the transpose of `skew`."""
    n_query = scores.shape[0]
    column = _lane(n_query) - _shift(n_query)
    lane, is_near = column & (LANES - 1), column >= 0
    none = jnp.zeros((n_query, LANES), scores.dtype)
    turned = [none, *(_gather(block, lane) for block in _blocks(scores)), none]
    return _join([jnp.where(is_near, near, far) for far, near in itertools.pairwise(turned)])


def _lane(n_query: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (n_query, LANES), 1)


def _shift(n_query: int) -> jax.Array:
    """Returns by how much each row moves, [n, 128]."""
    return n_query - 1 - lax.broadcasted_iota(jnp.int32, (n_query, LANES), 0)


def _gather(block: jax.Array, lane: jax.Array) -> jax.Array:
    # Mosaic refuses a gather without the promise, and one over more than 128 columns: "Multiple source vregs along
    # gather dimension".
    return jnp.take_along_axis(block, lane, axis=1, mode="promise_in_bounds")


def _blocks(array: jax.Array) -> list[jax.Array]:
    return [array[:, at : at + LANES] for at in range(0, array.shape[1], LANES)]


def _join(blocks: list[jax.Array]) -> jax.Array:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)
