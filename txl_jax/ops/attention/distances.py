"""Distances between queries and keys, their sinusoidal encodings, and the relative shift.

A query at row i of the segment and a key at column j of [memory; segment] are M + i - j apart (Dai
et al., 2019, section 3.3). Encodings exist once per distance, not once per pair: the scores of all
distances are computed first and then shifted into place, which is linear in K (appendix B).
"""

import jax
import jax.numpy as jnp
import numpy as np


def key_distances(n_keys: int, *, clamp_len: int | None = None) -> jax.Array:
    """Returns the distances K - 1, .., 1, 0 of `n_keys` keys, int32 [K].

    Distances above `clamp_len` become `clamp_len`.
    """
    distances = jnp.arange(n_keys - 1, -1, -1, dtype=jnp.int32)
    if clamp_len is not None:
        distances = jnp.minimum(distances, clamp_len)
    return distances


def sinusoids(distances: jax.Array, d_model: int, dtype: jnp.dtype) -> jax.Array:
    """Computes the sinusoidal encoding R of each distance.

    Frequency i of D / 2 is 10000^(-2i / D). Angles are computed in at least float32: a bfloat16
    angle of a few thousand radians would be off by whole turns.

    Args:
      distances: [K]. Negative for keys after the query.
      d_model: D, the size of an encoding. Must be even.
      dtype: Dtype of the result.

    Returns:
      Encodings [K, D]. The first D / 2 features are sines, the rest cosines.

    Raises:
      ValueError: If `d_model` is odd.
    """
    if d_model % 2:
        raise ValueError(
            f"d_model must be even (sinusoids are pairs of sine and cosine), got {d_model}"
        )
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = jnp.asarray(10000.0 ** -(np.arange(0, d_model, 2) / d_model), wide)
    angles_KxF = distances.astype(wide)[:, None] * frequencies[None, :]
    return jnp.concatenate([jnp.sin(angles_KxF), jnp.cos(angles_KxF)], axis=-1).astype(dtype)


def table_length(*, segment_len: int, capacity: int, clamp_len: int | None) -> int:
    """Returns P, the number of position keys that a segment and a KV cache need.

    The position keys are for the distances P - 1, .., 0. The largest distance is between the
    segment's last query and the oldest of `capacity` slots, or it is `clamp_len`.
    """
    longest = capacity + segment_len - 1
    if clamp_len is not None:
        longest = min(clamp_len, longest)
    return longest + 1


def relative_shift(scores: jax.Array) -> jax.Array:
    """Moves scores from "column = distance" to "column = key": [..., L, K] -> [..., L, K].

    Column p of the input belongs to distance K - 1 - p. Query i meets key j at column
    (L - 1 - i) + j, so row i must move left by L - 1 - i. To move all rows at once, pad one column,
    read the same buffer with rows of another length, and drop the first row. For L = K = 3, with
    entry `ip` of query i and distance 2 - p:

        00 01 02        . 00 01 02        . 00 01        02  . 10
        10 11 12   ->   . 10 11 12   ->  02  . 10   ->   11 12  .
        20 21 22        . 20 21 22       11 12  .        20 21 22
                                         20 21 22
         scores           padded          re-read         result

    Row 0 keeps 02 (distance 0), row 1 keeps 11, 12 (distances 1, 0). Entries right of the diagonal
    j = M + i belong to keys after the query. They are scores of other pairs, and the causal mask
    must hide them.
    """
    *lead, n_query, n_key = scores.shape
    padded = jnp.pad(scores, [(0, 0)] * (len(lead) + 1) + [(1, 0)])
    reread = padded.reshape(*lead, n_key + 1, n_query)
    return reread[..., 1:, :].reshape(scores.shape)


def skew(by_distance: jax.Array, n_key: int) -> jax.Array:
    """Moves scores from "column = distance" to "column = key": [..., n, W] -> [..., n, m].

    Query x meets key y at column n - 1 - x + y. The entries are read as one line of numbers and cut
    into rows that are one column shorter. So each row begins one column earlier in its query's
    entries than the row before, which is the shift. For n = 3, m = 2 and a fifth column that
    nothing needs, with entry `xp` of query x and column p:

        00 01 02 03 04                                        02 03 04 10        02 03
        10 11 12 13 14   ->  from 02 on, rows of 4 columns -> 11 12 13 14   ->   11 12
        20 21 22 23 24                                        20 21 22 23        20 21

    W must be n + m - 1 or more. If distances below 0 are hidden anyway, a tile that ends with the
    last query's own key needs only m + 1 columns, of which the last is not used: pairs whose column
    does not exist read the next row.
    """
    *lead, n_query, width = by_distance.shape
    if n_query == 1:
        return by_distance[..., :n_key]
    line = by_distance.reshape(*lead, n_query * width)
    first = n_query - 1
    shorter_rows = line[..., first : first + n_query * (width - 1)]
    return shorter_rows.reshape(*lead, n_query, width - 1)[..., :n_key]


def unskew(scores: jax.Array, width: int) -> jax.Array:
    """Moves [..., n, m] to the columns of [..., n, W] where `skew` reads them.

    All other entries are zeros. This is the transpose of `skew`. Pairs whose column does not exist
    must be 0.
    """
    *lead, n_query, n_key = scores.shape
    no_pad = [(0, 0)] * len(lead)
    if n_query == 1:
        return jnp.pad(scores, [*no_pad, (0, 0), (0, width - n_key)])

    # The steps of `skew` the other way round: rows of W - 1 columns as one line, which begins at
    # entry n - 1 of the rows of W columns.
    shorter_rows = jnp.pad(scores, [*no_pad, (0, 0), (0, width - 1 - n_key)])
    line = shorter_rows.reshape(*lead, n_query * (width - 1))
    line = jnp.pad(line, [*no_pad, (n_query - 1, 1)])
    return line.reshape(*lead, n_query, width)
