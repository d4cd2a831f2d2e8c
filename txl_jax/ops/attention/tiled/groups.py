"""The loop over groups of rows of one head: what its body reads of the arrays, and where gradients are added."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from txl_jax.ops.attention.device import default_device
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.tiled.layout import Layout

# Most scores of a group on a CPU: they should stay in a cache of 1 or 2 MB a core between one pass and the next, and
# a pass over too few is not shared among cores (L = M = 512, B 2, AMD EPYC, 2 cores: 2^17 142 ms, 2^18 109, 2^20 109).
_CPU_SCORES = 2**18

Carry = TypeVar("Carry")


class Arrays(NamedTuple):
    """The arrays of a call of attention.

    Attributes:
      query: [B, H, L, E].
      key: [B, H, K, E].
      value: [B, H, K, E].
      position_key: [H, P, E], or None.
      content_bias: [H, E], or None.
      position_bias: [H, E], or None.
      position_score: [H, P], or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    position_key: jax.Array | None
    content_bias: jax.Array | None
    position_bias: jax.Array | None
    position_score: jax.Array | None


class Masking(NamedTuple):
    """Conditions that hide a pair besides its distance.

    Attributes:
      key_range: the first visible key and the end, int32 [B] each.
      dropout: dropout on the probabilities, or None.
      row_head: numbers of rows and heads in its masks, int32 [B, H], or None.
    """

    key_range: tuple[jax.Array, jax.Array]
    dropout: Dropout | None
    row_head: jax.Array | None


class Group(NamedTuple):
    """G rows of one head.

    Attributes:
      content_query: [G, L, E], with u, divided by sqrt(E).
      position_query: [G, L, E], with v, divided by sqrt(E).
      key: [G, K, E].
      value: [G, K, E].
      position_key: [P', E], with zeros behind the P, or None.
      position_score: [P'], divided by sqrt(E), wide, or None.
      key_range: int32 [G] each.
      row_head: int32 [G], or None.
    """

    content_query: jax.Array
    position_query: jax.Array
    key: jax.Array
    value: jax.Array
    position_key: jax.Array | None
    position_score: jax.Array | None
    key_range: tuple[jax.Array, jax.Array]
    row_head: jax.Array | None

    @property
    def scale(self) -> float:
        """Returns 1 / sqrt(E)."""
        return float(self.key.shape[-1] ** -0.5)

    @property
    def wide(self) -> jnp.dtype:
        """Returns the type of scores and sums."""
        return wide_type(self.content_query)


class Gradients(NamedTuple):
    """Gradients with respect to keys, values and parameters, of a group or, with leading axes, of all; wide.

    The products that give them are fast as [E, m] (see `training.py`), so they are kept like that.

    Attributes:
      key: [G, E, K], or [B, H, E, K] in the type of the keys.
      value: [G, E, K], or [B, H, E, K] in the type of the values.
      position_key: [E, P'], or [H, E, P'], or None.
      content_bias: [E], or [H, E], or None.
      position_bias: [E], or [H, E], or None.
      position_score: [P'], or [H, P'], or None.
    """

    key: jax.Array
    value: jax.Array
    position_key: jax.Array | None
    content_bias: jax.Array | None
    position_bias: jax.Array | None
    position_score: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a group: rows [first_row, first_row + n_rows) of a head."""

    n_rows: int
    first_row: jax.Array
    head: jax.Array

    def rows(self, array: jax.Array) -> jax.Array:
        """[B, H, ..] -> [G, ..]."""
        part = jax.lax.dynamic_slice(array, self._start(array), (self.n_rows, 1, *array.shape[2:]))
        return part.reshape(self.n_rows, *array.shape[2:])

    def of_head(self, array: jax.Array) -> jax.Array:
        """[H, ..] -> [..]."""
        return jax.lax.dynamic_index_in_dim(array, self.head, 0, keepdims=False)

    def write(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Returns [B, H, ..] with [G, ..] in place."""
        return jax.lax.dynamic_update_slice(array, part[:, None].astype(array.dtype), self._start(array))

    def add(self, array: jax.Array, part: jax.Array) -> jax.Array:
        """Returns [H, ..] with [..] added."""
        return jax.lax.dynamic_update_index_in_dim(array, self.of_head(array) + part, self.head, 0)

    def take(self, arrays: Arrays, masking: Masking) -> Group:
        """Returns a group of arrays whose positions were padded."""
        key_range = tuple(jax.lax.dynamic_slice_in_dim(x, self.first_row, self.n_rows) for x in masking.key_range)
        query, scale = self.rows(arrays.query), float(arrays.query.shape[-1] ** -0.5)
        position_score = None
        if arrays.position_score is not None:
            position_score = self.of_head(arrays.position_score).astype(wide_type(query)) * scale
        return Group(
            content_query=self._biased(query, arrays.content_bias) * scale,
            position_query=self._biased(query, arrays.position_bias) * scale,
            key=self.rows(arrays.key),
            value=self.rows(arrays.value),
            position_key=None if arrays.position_key is None else self.of_head(arrays.position_key),
            position_score=position_score,
            key_range=(key_range[0], key_range[1]),
            row_head=None if masking.row_head is None else self.rows(masking.row_head),
        )

    def put(self, everything: Gradients, group: Gradients) -> Gradients:
        """Returns the gradients of all with those of a group in place, or added where heads share them."""
        of_rows = self.write(everything.key, group.key), self.write(everything.value, group.value)
        return Gradients(*of_rows, *jax.tree.map(self.add, everything[2:], group[2:]))

    def _start(self, array: jax.Array) -> list[Any]:
        return [self.first_row, self.head, *[0] * (array.ndim - 2)]

    def _biased(self, query: jax.Array, bias: jax.Array | None) -> jax.Array:
        return query if bias is None else query + self.of_head(bias)[None, None, :]


def loop(arrays: Arrays, layout: Layout, body: Callable[[Place, Carry], Carry], carry: Carry) -> Carry:
    """Runs `body` over all groups, the rows of one head one after the other."""
    batch, n_head = arrays.query.shape[:2]
    n_rows = rows_per_group(batch, layout)
    per_head = batch // n_rows

    def step(index: Any, carry: Carry) -> Carry:
        return body(Place(n_rows, (index % per_head) * n_rows, index // per_head), carry)

    return jax.lax.fori_loop(0, n_head * per_head, step, carry)


def rows_per_group(batch: int, layout: Layout) -> int:
    """Returns G, a divisor of B."""
    if default_device().platform != "cpu":
        return batch
    largest = max(strip.n_query * strip.n_key for strip in layout.strips())
    return max(n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * largest <= _CPU_SCORES))


def pad_positions(arrays: Arrays, layout: Layout) -> Arrays:
    """Returns the arrays with zeros behind the position keys and scores, where blocks read beyond the last distance."""

    def pad(table: jax.Array | None) -> jax.Array | None:
        if table is None:
            return None
        behind = layout.n_columns(table.shape[1]) - table.shape[1]
        return jnp.pad(table, [(0, 0), (0, behind), *[(0, 0)] * (table.ndim - 2)])

    return arrays._replace(position_key=pad(arrays.position_key), position_score=pad(arrays.position_score))


def zero_gradients(arrays: Arrays) -> Gradients:
    """Returns the gradients of all, before any group, of arrays whose positions were padded."""
    wide = wide_type(arrays.query)

    def zeros(array: jax.Array | None, dtype: Any = None) -> jax.Array | None:
        if array is None:
            return None
        shape = array.shape if array.ndim == 2 else (*array.shape[:-2], array.shape[-1], array.shape[-2])
        return jnp.zeros(shape, dtype or wide)

    key, value = (zeros(array, array.dtype) for array in (arrays.key, arrays.value))
    assert key is not None and value is not None  # For mypy.
    shared = (arrays.position_key, arrays.content_bias, arrays.position_bias, arrays.position_score)
    return Gradients(key, value, *(zeros(array) for array in shared))


def zeros_of_group(gradients: Gradients, n_rows: int) -> Gradients:
    """Returns the gradients of a group, before any block."""
    wide = jnp.promote_types(gradients.key.dtype, jnp.float32)
    of_rows = [jnp.zeros((n_rows, *array.shape[2:]), wide) for array in (gradients.key, gradients.value)]
    shared = jax.tree.map(lambda array: jnp.zeros(array.shape[1:], array.dtype), gradients[2:])
    return Gradients(*of_rows, *shared)


def in_layout_of(arrays: Arrays, query: jax.Array, gradients: Gradients) -> Arrays:
    """Returns gradients in the shapes and types of the arrays that were given."""

    def turned(gradient: jax.Array | None, like: jax.Array | None) -> jax.Array | None:
        if gradient is None or like is None:
            return None
        gradient = gradient if like.ndim == 2 else gradient.swapaxes(-1, -2)
        return gradient[:, : like.shape[1]].astype(like.dtype) if like.ndim < 4 else gradient

    return Arrays(query, *(turned(gradient, like) for gradient, like in zip(gradients, arrays[1:], strict=True)))  # type: ignore[arg-type]


def wide_type(array: jax.Array) -> jnp.dtype:
    """Returns the type of scores and sums: at least float32."""
    return jnp.promote_types(array.dtype, jnp.float32)
