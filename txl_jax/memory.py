"""The memory that a Transformer-XL carries from segment to segment.

Layer l attends to its inputs at the M positions before the segment (Dai et al., 2019, section 3.2).
Shapes are fixed, and `valid` is the number of filled slots of each row. The only `stop_gradient` of
the recurrence is in `update`.

Inference keeps the keys and values of those inputs instead: `inference.cache.KVCache`.
"""

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
    dtype: jnp.dtype,
    start: MemoryStart,
) -> Memory:
    """Returns the initial memory of zeros, before the first segment.

    `start` determines whether the zeros are masked or attended to.
    """
    return Memory(
        hidden=jnp.zeros((n_layer, batch_size, mem_len, d_model), dtype),
        valid=jnp.full((batch_size,), start_valid(mem_len, start), jnp.int32),
        start=start,
    )


@jax.named_scope("memory")
def update(memory: Memory, layer_inputs: jax.Array, lengths: jax.Array | None = None) -> Memory:
    """Appends a segment's layer inputs [N, B, L, D] and drops the oldest positions.

    With `lengths`, int32 [B] as `token_counts` returns them, a row appends only that many
    positions. The rest of its segment is padding.
    """
    if lengths is not None:
        return _update_padded(memory, jax.lax.stop_gradient(layer_inputs), lengths)
    mem_len = memory.mem_len
    segment_len = layer_inputs.shape[2]

    # The last M positions. If the segment is longer, all of them are new. Kept states had their
    # gradients stopped when they were new.
    kept = memory.hidden[:, :, min(segment_len, mem_len) :]
    new = jax.lax.stop_gradient(layer_inputs[:, :, max(segment_len - mem_len, 0) :])
    return memory.replace(
        hidden=jnp.concatenate([kept, new.astype(kept.dtype)], axis=2),
        valid=jnp.minimum(memory.valid + segment_len, mem_len),
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


def token_counts(lengths: jax.Array | None, tokens: jax.Array) -> jax.Array | None:
    """Returns the number of tokens before the padding of each row of a segment, int32 [B].

    Returns None if `lengths` is None, for a segment without padding. A length above L means L, and
    a negative length means 0.

    Raises:
      UserError: If lengths are not integers [B].
    """
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    batch_size, segment_len = tokens.shape[:2]
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
def reset(memory: Memory, rows: jax.Array, start: MemoryStart | None = None) -> Memory:
    """Sets the rows marked in `rows` (bool [B]) back to the memory's start, `memory.start`.

    Masked slots keep their states, which nothing attends to, because clearing a memory of gigabytes
    takes time. So a row whose states are not finite needs a new memory: a mask does not hide nan.

    Args:
      memory: The memory, from a model's `init_memory`.
      rows: bool [B].
      start: None, or the memory's start, which is checked.

    Raises:
      UserError: If `start` is not the memory's start.
    """
    if start is not None and start is not memory.start:
        raise UserError(
            f"start must be the memory's start, {memory.start}, got {start}. Leave it out: the "
            "memory records how it starts"
        )
    hidden = memory.hidden
    if memory.start is MemoryStart.ZEROS:
        hidden = jnp.where(rows[None, :, None, None], 0, hidden)
    valid = jnp.where(rows, start_valid(memory.mem_len, memory.start), memory.valid)
    return memory.replace(hidden=hidden, valid=valid)


def start_valid(mem_len: int, start: MemoryStart) -> int:
    """Returns the number of slots that count as filled before the first segment."""
    return mem_len if start is MemoryStart.ZEROS else 0
