"""One block of the scores: queries of a strip with neighbouring keys, for a group of rows of one head."""

from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.tiled.groups import Gradients, Group, wide_type
from txl_jax.ops.attention.tiled.layout import Layout, Strip
from txl_jax.ops.attention.tiled.skew import skew, unskew


class Block:
    """The keys of a block, and the scores of the strip's queries with them.

    Attributes:
      first_key: the first key, a number or traced.
      first_column: the first row of the position keys that it reads.
      content_query: [G, n, E], with u, divided by sqrt(E).
      position_query: [G, n, E], with v, divided by sqrt(E).
    """

    def __init__(self, layout: Layout, group: Group, strip: Strip, index: Any) -> None:
        self._layout, self._group, self._strip = layout, group, strip
        rows = slice(strip.first, strip.first + strip.n_query)
        last = strip.end - strip.n_key
        self._begin = strip.begin + index * strip.n_key  # Keys before it belong to the block before.
        single = strip.n_blocks == 1
        self.first_key = strip.begin if single else jnp.minimum(self._begin, last)
        self.first_column = layout.column(strip, self.first_key)
        self.content_query, self.position_query = group.content_query[:, rows], group.position_query[:, rows]

    def rows_of(self, array: jax.Array) -> jax.Array:
        """Returns the block's rows [G, m, E] of keys or values [G, K, E]."""
        return jax.lax.dynamic_slice_in_dim(array, self.first_key, self._strip.n_key, 1)

    def scores(self) -> jax.Array:
        """Returns the scores [G, n, m], wide, minus infinity where hidden."""
        group, strip = self._group, self._strip
        scores = product("gne,gme->gnm", self.content_query, self.rows_of(group.key))
        if group.position_key is not None:
            # Position keys are those of all rows: one product for the group.
            by_distance = product("ne,we->nw", _flat(self.position_query), self._columns_of(group.position_key))
            scores += skew(by_distance.reshape(*scores.shape[:2], strip.width), strip.n_key)
        if group.position_score is not None:
            by_distance = jnp.broadcast_to(self._columns_of(group.position_score), (strip.n_query, strip.width))
            scores += skew(by_distance, strip.n_key)[None]
        return jnp.where(self._visible(), scores, -jnp.inf)

    def keep(self, dropout: Dropout) -> jax.Array:
        """Returns which probabilities are kept, bool [G, n, m]."""
        assert self._group.row_head is not None  # For mypy.
        query, key = self._pairs()
        return dropout.keep(self._group.row_head[:, None, None], query[None], key[None])

    def add_key_gradients(self, gradients: Gradients, of_key: jax.Array, of_value: jax.Array) -> Gradients:
        """Adds gradients [G, E, m] of the block's keys and values."""
        return gradients._replace(
            key=_add_at(gradients.key, of_key, self.first_key), value=_add_at(gradients.value, of_value, self.first_key)
        )

    def add_position_gradients(self, gradients: Gradients, of_scores: jax.Array) -> tuple[jax.Array | None, Gradients]:
        """Returns the part [G, n, E] of the gradient of the position queries, or None, and adds to the others.

        Args:
          gradients: of the group.
          of_scores: [G, n, m], zero where hidden.
        """
        group = self._group
        if group.position_key is None and group.position_score is None:
            return None, gradients
        by_distance = unskew(of_scores, self._strip.width)
        if gradients.position_score is not None:
            of_score = jnp.sum(by_distance.astype(group.wide), axis=(0, 1)) * group.scale
            gradients = gradients._replace(
                position_score=_add_at(gradients.position_score, of_score, self.first_column)
            )
        if group.position_key is None or gradients.position_key is None:
            return None, gradients
        flat = _flat(by_distance)
        of_query = product("nw,we->ne", flat, self._columns_of(group.position_key))
        of_key = product("en,nw->ew", transposed(_flat(self.position_query)), flat)
        gradients = gradients._replace(position_key=_add_at(gradients.position_key, of_key, self.first_column))
        return of_query.reshape(self.position_query.shape), gradients

    def _columns_of(self, table: jax.Array) -> jax.Array:
        """Returns the block's rows [W, ..] of a table of distances [P', ..]."""
        return jax.lax.dynamic_slice_in_dim(table, self.first_column, self._strip.width, 0)

    def _pairs(self) -> tuple[jax.Array, jax.Array]:
        """Returns the numbers of queries [n, 1] and keys [1, m]."""
        query = self._strip.first + jnp.arange(self._strip.n_query, dtype=jnp.int32)
        key = self.first_key + jnp.arange(self._strip.n_key, dtype=jnp.int32)
        return query[:, None], key[None, :]

    def _visible(self) -> jax.Array:
        """Returns the visible pairs, bool [G, n, m]."""
        query, key = self._pairs()
        start, stop = self._group.key_range
        seen = (key >= start[:, None]) & (key < stop[:, None])
        if self._strip.n_blocks > 1:
            seen &= key >= self._begin
        distance = self._layout.mem_len + query - key
        near = jnp.ones_like(distance, bool)
        if self._layout.causal:
            near &= distance >= 0
        if self._layout.window is not None:
            near &= jnp.abs(distance) < self._layout.window
        return seen[:, None, :] & near[None]


def product(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiplies in the type of the operands and adds in the wide one."""
    return jnp.einsum(spec, left, right, preferred_element_type=wide_type(left))


def transposed(rows: jax.Array) -> jax.Array:
    """[.., n, E] -> [.., E, n], as an array of its own.

    Without the barrier XLA makes the transposition part of the product, for which its CPU backend has no fast routine:
    64 x 128 times 128 x 1024 takes 297 us with it and 116 us without (AMD EPYC, 2 cores).
    """
    return jax.lax.optimization_barrier(rows.swapaxes(-1, -2))


def _flat(rows: jax.Array) -> jax.Array:
    """[G, n, x] -> [G n, x]."""
    return rows.reshape(-1, rows.shape[-1])


def _add_at(total: jax.Array, part: jax.Array, first: Any) -> jax.Array:
    """Adds to the columns [first, ..) of the last axis."""
    here = jax.lax.dynamic_slice_in_dim(total, first, part.shape[-1], total.ndim - 1)
    return jax.lax.dynamic_update_slice_in_dim(total, here + part, first, total.ndim - 1)
