"""The memory that a Transformer-XL carries from segment to segment.

Layer l attends to its inputs at the M positions before the segment (Dai et al., 2019, section 3.2).
Shapes are fixed, and `valid` is the number of filled slots of each row. The only `stop_gradient` of
the recurrence is in `update`.

`import txl_jax` gives `init`, `update` and `reset` as `init_memory`, `update_memory` and
`reset_memory`. Layers of your own can use them without the model:

    >>> memory = init(n_layer=2, batch_size=3, mem_len=8, d_model=16)
    >>> memory.hidden.shape, memory.valid.tolist()
    ((2, 3, 8, 16), [0, 0, 0])
    >>> memory = update(memory, jnp.ones((2, 3, 5, 16)))
    >>> memory.valid.tolist()
    [5, 5, 5]
    >>> reset(memory, jnp.asarray([False, True, False])).valid.tolist()
    [5, 0, 5]

Inference keeps the keys and values of those inputs instead: `inference.cache.KVCache`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from txl_jax.config import MemoryStart
from txl_jax.errors import UserError


class Memory(flax.struct.PyTreeNode):
    """States of the last M positions. Rows are independent: a microbatch uses its own rows."""

    hidden: jax.Array  # [N, B, M, D], inputs of the layers, oldest position first.
    valid: jax.Array  # int32 [B], number of filled slots of each row, which are the last ones.
    # How the memory starts, and what `reset` sets rows back to. It is not an array: memories that
    # start differently have different tree structures.
    start: MemoryStart = flax.struct.field(pytree_node=False, default=MemoryStart.MASKED)

    @property
    def mem_len(self) -> int:
        """M, the number of positions in the memory."""
        return self.hidden.shape[2]

    def check(self, tokens: jax.Array, *, n_layer: int, d_model: int) -> None:
        """Checks that the memory matches a segment and a model of N layers of size D.

        The segment is tokens [B, L], or embeddings [B, L, D].

        Raises:
          UserError: If the memory has another number of layers or rows or another size, or the
            segment does not have one of these shapes.
        """
        n_memory_layer, n_memory_row = self.hidden.shape[:2]
        memory_size = self.hidden.shape[-1]
        if jnp.issubdtype(tokens.dtype, jnp.floating):
            if tokens.ndim != 3 or tokens.shape[2] != d_model:
                raise UserError(
                    f"embeddings must be floats [B, L, {d_model}], got shape {tokens.shape}"
                )
        elif tokens.ndim != 2:
            raise UserError(f"tokens must be a segment, int [B, L], got shape {tokens.shape}")

        batch_size = tokens.shape[0]
        if (n_memory_layer, n_memory_row) != (n_layer, batch_size):
            raise UserError(
                f"the memory must have {n_layer} layers of {batch_size} rows, like the model "
                f"and the segment, got {n_memory_layer} layers of {n_memory_row} rows. "
                f"Create it with init_memory(batch_size={batch_size}, ...)"
            )
        if memory_size != d_model:
            raise UserError(
                f"the memory must have states of size {d_model}, like the model, got "
                f"{memory_size}. Create it with this model's init_memory"
            )


def init(
    *,
    n_layer: int,
    batch_size: int,
    mem_len: int,
    d_model: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
    start: MemoryStart | str = MemoryStart.MASKED,
) -> Memory:
    """Returns the memory before the first segment: zeros [N, B, M, D].

    `TransformerXL.init_memory` calls this with the sizes of the model. For layers of your own, pass
    the sizes here.

    Args:
      n_layer: N, the number of layers that attend to their own earlier inputs.
      batch_size: B, the number of rows.
      mem_len: M, the number of positions that each row remembers.
      d_model: D, the size of a layer's input.
      dtype: Dtype of the stored inputs. `update` casts to it.
      start: Whether the empty slots are masked (`valid` is 0), or are zeros that are attended to
        (`valid` is M), as in the original implementations. `reset` sets rows back to the same.

    Raises:
      UserError: If `start` is not "masked" or "zeros".
    """
    if start not in list(MemoryStart):
        raise UserError(f"start must be {' or '.join(MemoryStart)}, got {start!r}")
    start = MemoryStart(start)
    return Memory(
        hidden=jnp.zeros((n_layer, batch_size, mem_len, d_model), dtype),
        valid=jnp.full((batch_size,), start_valid(mem_len, start), jnp.int32),
        start=start,
    )


@jax.named_scope("memory")
def update(memory: Memory, layer_inputs: jax.Array, lengths: jax.Array | None = None) -> Memory:
    """Appends a segment's layer inputs [N, B, L, D], and drops the oldest positions.

    The gradient stops here: none flows from the returned memory into `layer_inputs`.

    Args:
      memory: The memory before the segment, [N, B, M, D].
      layer_inputs: [N, B, L, D], what layer n computed its queries, keys and values from at each
        position of the segment. The next segment computes its keys and values from
        [memory; segment]. L may be smaller or larger than M, and may change.
      lengths: int [B], the number of tokens in each row, or None for L in each. A row appends only
        that many positions, because the rest of its segment is padding. A length above L means L,
        and a negative length means 0.

    Returns:
      The memory after the segment. `valid` [B] has grown by L, or by `lengths`, up to M.

    Raises:
      UserError: If the layer inputs are not an array [N, B, L, D] with the memory's N, B and D, or
        lengths are not integers [B].
    """
    _check_layer_inputs(memory, layer_inputs)
    batch_size, segment_len = layer_inputs.shape[1:3]
    lengths = token_counts(lengths, batch_size=batch_size, segment_len=segment_len)
    if lengths is not None:
        return _update_padded(memory, jax.lax.stop_gradient(layer_inputs), lengths)
    mem_len = memory.mem_len

    # The last M positions. If the segment is longer, all of them are new. Kept states had their
    # gradients stopped when they were new.
    kept = memory.hidden[:, :, min(segment_len, mem_len) :]
    new = jax.lax.stop_gradient(layer_inputs[:, :, max(segment_len - mem_len, 0) :])
    return memory.replace(
        hidden=jnp.concatenate([kept, new.astype(kept.dtype)], axis=2),
        valid=jnp.minimum(memory.valid + segment_len, mem_len),
    )


def _check_layer_inputs(memory: Memory, layer_inputs: jax.Array) -> None:
    """Checks that layer inputs fit the memory.

    Raises:
      UserError: If they are not an array [N, B, L, D] with the memory's N, B and D.
    """
    n_layer, batch_size, _, d_model = memory.hidden.shape
    shape = getattr(layer_inputs, "shape", None)
    if shape is None:
        raise UserError(
            f"layer_inputs must be an array [{n_layer}, {batch_size}, L, {d_model}], got "
            f"{type(layer_inputs).__name__}. Stack the layers' inputs [B, L, D] with jnp.stack"
        )
    if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (n_layer, batch_size, d_model):
        raise UserError(
            f"layer_inputs must have the shape [{n_layer}, {batch_size}, L, {d_model}] (layers, "
            f"rows, positions, size), like the memory, got {list(shape)}"
        )


def _update_padded(memory: Memory, layer_inputs: jax.Array, lengths: jax.Array) -> Memory:
    """Appends the first `lengths` [B] positions of each row's layer inputs [N, B, L, D]."""
    mem_len = memory.mem_len
    new = layer_inputs.astype(memory.hidden.dtype)
    states = jnp.concatenate([memory.hidden, new], axis=2)

    # A row [N, M + L, D] with n tokens has M + n states before its padding. The last M of them
    # begin at n.
    def last_slots(row: jax.Array, n_token: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(row, n_token, mem_len, axis=1)

    return memory.replace(
        hidden=jax.vmap(last_slots, in_axes=(1, 0), out_axes=1)(states, lengths),
        valid=jnp.minimum(memory.valid + lengths, mem_len),
    )


def token_counts(
    lengths: jax.Array | None, *, batch_size: int, segment_len: int
) -> jax.Array | None:
    """Returns the number of tokens before the padding of each row of a segment [B, L], int32 [B].

    Returns None if `lengths` is None, for a segment without padding. A length above L means L, and
    a negative length means 0.

    Raises:
      UserError: If lengths are not integers [B].
    """
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.shape != (batch_size,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise UserError(
            f"lengths must be integers [{batch_size}], the number of tokens in each row, got "
            f"{lengths.dtype} of shape {lengths.shape}"
        )
    return jnp.clip(lengths, 0, segment_len).astype(jnp.int32)


class Documents(NamedTuple):
    """Positions in a segment where documents begin, from the tokens that end them.

    With the end token e, `a e b c e d` has the starts 0 0 2 2 2 5: an end token belongs to the
    document that it ends.
    """

    # int32 [B, L], position where each position's document begins, or 0 if it begins with the
    # segment or in the memory.
    start: jax.Array
    # int32 [B], position after the last end token, or 0 if the segment has none.
    last: jax.Array

    def valid(self, valid: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """Returns how many slots [B] belong to the document that continues after the segment.

        They are at most `valid` [B], the filled slots after the segment. If the segment has an end
        token, they are the positions after the last one, to the end of the segment or of the row's
        `lengths` [B].
        """
        n_token = self.start.shape[1] if lengths is None else lengths
        of_last_document = jnp.minimum(valid, n_token - self.last)
        return jnp.where(self.last > 0, of_last_document, valid)


def documents(
    tokens: jax.Array, end_token: int | None, lengths: jax.Array | None = None
) -> Documents | None:
    """Returns the documents of a segment of tokens [B, L].

    Returns None without an end token, or for embeddings. An end token in the padding after
    `lengths` [B] does not count.
    """
    if end_token is None or jnp.issubdtype(tokens.dtype, jnp.floating):
        return None
    return documents_by_ends(tokens == end_token, lengths)


def documents_by_ends(is_end: jax.Array, lengths: jax.Array | None = None) -> Documents:
    """Returns the documents of a segment from the positions that end one, bool [B, L].

    An end in the padding after `lengths` [B] does not count.
    """
    next_position = jnp.arange(1, is_end.shape[1] + 1, dtype=jnp.int32)
    if lengths is not None:
        is_end &= next_position[None, :] <= lengths[:, None]
    # The position after each position's latest end, the position's own included, or 0.
    after_end = jnp.where(is_end, next_position[None, :], 0)
    after_latest_end = jax.lax.cummax(after_end, axis=1)

    # An end belongs to the document that it ends: documents start one position later.
    start = jnp.pad(after_latest_end[:, :-1], ((0, 0), (1, 0)))
    return Documents(start=start, last=after_latest_end[:, -1])


@jax.named_scope("memory")
def reset(memory: Memory, rows: jax.Array | Sequence[bool]) -> Memory:
    """Sets the rows marked in `rows` (bool [B]) back to the memory's start, `memory.start`.

    Masked slots keep their states, which nothing attends to, because clearing a memory of gigabytes
    takes time. So a row whose states are not finite needs a new memory: a mask does not hide nan.

    Args:
      memory: The memory, from `init_memory` or a later segment.
      rows: bool [B], the rows to set back. A list of bools is converted.

    Raises:
      UserError: If `rows` is not bool [B].
    """
    rows = _checked_rows(rows, batch_size=memory.valid.shape[0])
    hidden = memory.hidden
    if memory.start is MemoryStart.ZEROS:
        hidden = jnp.where(rows[None, :, None, None], 0, hidden)
    valid = jnp.where(rows, start_valid(memory.mem_len, memory.start), memory.valid)
    return memory.replace(hidden=hidden, valid=valid)


def _checked_rows(rows: jax.Array | Sequence[bool], *, batch_size: int) -> jax.Array:
    """Returns the rows to reset as an array.

    Raises:
      UserError: If they are not bool [B]. Indices of rows, for example, would mark other rows.
    """
    rows = jnp.asarray(rows)
    if rows.shape != (batch_size,) or rows.dtype != jnp.bool_:
        raise UserError(
            f"rows must be bool [{batch_size}], whether each row is reset, got {rows.dtype.name} "
            f"{list(rows.shape)}. To reset rows by their indices, pass "
            f"jnp.zeros({batch_size}, bool).at[indices].set(True)"
        )
    return rows


def start_valid(mem_len: int, start: MemoryStart) -> int:
    """Returns the number of slots that count as filled before the first segment."""
    return mem_len if start is MemoryStart.ZEROS else 0
