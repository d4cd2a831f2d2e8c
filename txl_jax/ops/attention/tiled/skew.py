"""The relative shift of one tile, without a gather, and its transpose.

A tile of n queries and m keys needs the scores of n + m - 1 distances, largest first; query x meets key y at column
n - 1 - x + y of them. Read as one line of numbers, rows that are one column shorter begin one column later each time,
which is the shift. For n = 3, m = 2 and a fifth column that nothing needs, entry `xp` of query x and column p:

    00 01 02 03 04                                        02 03 04 10        02 03
    10 11 12 13 14   ->  from 02 on, rows of 4 columns -> 11 12 13 14   ->   11 12
    20 21 22 23 24                                        20 21 22 23        20 21

Where distances below 0 are hidden anyway, the tile that ends with the last query's own key needs m + 1 columns only, of
which the last is not used: pairs beyond read the next row.
"""

import jax
import jax.numpy as jnp


def skew(by_distance: jax.Array, n_key: int) -> jax.Array:
    """Moves the scores of a tile from "column = distance" to "column = key": [..., n, W] -> [..., n, m].

    Args:
      by_distance: [..., n, W], column p of the distance that the last query and key p of the tile have; W is n + m - 1
        or more; down to m + 1, pairs whose column does not exist get leftovers.
      n_key: m, keys of the tile.

    Raises:
      ValueError: W is too small.
    """
    *lead, n_query, width = by_distance.shape
    _check(n_query, n_key, width)
    if n_query == 1:
        return by_distance[..., :n_key]
    line = by_distance.reshape(*lead, n_query * width)
    line = line[..., n_query - 1 : n_query - 1 + n_query * (width - 1)]
    return line.reshape(*lead, n_query, width - 1)[..., :n_key]


def unskew(scores: jax.Array, width: int) -> jax.Array:
    """Moves [..., n, m] to the columns of [..., n, W] where `skew` reads them, zeros elsewhere: its transpose.

    Pairs whose column does not exist must be 0.

    Raises:
      ValueError: W is too small.
    """
    *lead, n_query, n_key = scores.shape
    _check(n_query, n_key, width)
    none = [(0, 0)] * len(lead)
    if n_query == 1:
        return jnp.pad(scores, [*none, (0, 0), (0, width - n_key)])
    line = jnp.pad(scores, [*none, (0, 0), (0, width - 1 - n_key)]).reshape(*lead, n_query * (width - 1))
    return jnp.pad(line, [*none, (n_query - 1, 1)]).reshape(*lead, n_query, width)


def _check(n_query: int, n_key: int, width: int) -> None:
    needed = n_key if n_query == 1 else n_key + 1
    if width < needed:
        raise ValueError(f"{width} columns for {n_query} queries and {n_key} keys, which need {needed}")
