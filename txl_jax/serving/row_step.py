"""The compiled programs of serving: tokens of R rows at a time, and a segment of one row.

Each row has a ring of slots of its own, which its own position indexes: the number of tokens that it has read. So what
a row computes depends on its own tokens alone, to the last bit, whenever it joined and whatever the others do:

- The program that writes runs all R rows in every call, with products of one shape; a row's numbers never meet
  another's. Its attention is a `vmap` over rows, each with its own position, in place of the one index that the rows
  of `inference.cache.KVCache` share: with a shared one, a row's slots would lie otherwise for each moment at which it
  joined, and sums over them would round otherwise.
- The program that reads takes one row out of the rings. Nothing of the others is in it. It reads segments of two
  widths; which one follows from what is left of the row's own tokens.
- Draws depend on the request's seed, the number of its sample and the number of the token, never on the row.

A ring has R = M + `slack` slots or more, of which the newest M can be seen; `slack` is K, the tokens of a row that a
call writes. The others may hold anything. So a row that has nothing to do needs no branch: it computes from its last
token and overwrites its oldest slot, which cannot be seen, at a position that does not move. For the same reason a row
can go back by K - 1 tokens, exactly, as after a stop string at the beginning of a call: its position is set back, and
that is all. The host keeps the positions; the device has the rings and nothing else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import MemoryStart
from txl_jax.errors import UserError
from txl_jax.inference import forward
from txl_jax.inference.cache import KVCache, as_stored, cache_capacity
from txl_jax.inference.forward import DecodeParams
from txl_jax.inference.generator import Weights
from txl_jax.inference.weight_layout import transpose_layers
from txl_jax.memory import start_valid
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling
from txl_jax.runs.build import RunComponents

WIDTHS = (16, 64)  # Tokens of the segments that are read.
TOP = 5  # Likeliest tokens that come with logprobs: OpenAI's limit.


class Rings(NamedTuple):
    """Stored keys and values, per layer [B, H, E, R] and [B, H, R, E]."""

    keys: tuple[Any, ...]
    values: tuple[Any, ...]


class Rows(NamedTuple):
    """Arguments of a call that writes, of B rows; arrays [B]."""

    last: Any  # int32, the newest token, which is read first.
    position: Any  # int32, tokens read before.
    steps: Any  # int32, tokens to draw; 0: nothing.
    number: Any  # int32, of the first token to draw.
    seed: Any  # uint32
    sample: Any  # int32, number of the sample.
    temperature: Any  # float32
    top_p: Any  # float32
    scored: Any  # bool, whether logprobs are wanted.

    @staticmethod
    def idle(batch_size: int) -> "Rows":
        """Returns the arguments of rows that have nothing to do."""
        types = (np.int32, np.int32, np.int32, np.int32, np.uint32, np.int32, np.float32, np.float32, bool)
        return Rows(*(np.zeros(batch_size, dtype) for dtype in types))


class Scores(NamedTuple):
    """Scores of tokens; zeros where none were wanted."""

    nats: Any  # float [..], of each token: minus its logprob.
    top_logprobs: Any  # float [.., TOP], of the likeliest tokens in its place, the largest first.
    top_tokens: Any  # int32 [.., TOP]


class Step:
    """The compiled programs of one model at its evaluation lengths, for B rows."""

    def __init__(self, components: RunComponents, *, batch_size: int, block: int = 8):
        """Compiles nothing yet.

        Args:
          components: the model, one that can generate (`jobs.generate.check_can_generate`), and its settings.
          batch_size: B, rows.
          block: K, tokens of a row per call, at most.

        Raises:
          UserError: a mesh of several devices, or a model that keeps documents apart.
        """
        if components.config.data.reset_at is not None:  # A row's filled slots follow from its position here.
            raise UserError(
                f"the model keeps documents apart by the token {components.config.data.reset_at!r}, which the "
                "server does not; generate with txl_jax.load"
            )
        if components.mesh.size > 1:
            raise UserError(
                f"the mesh has {components.mesh.size} devices and rows are served by one; start the server where JAX "
                "finds one device, as with CUDA_VISIBLE_DEVICES=0, or with JAX_NUM_CPU_DEVICES=1"
            )
        assert isinstance(components.model, TransformerXL)
        eval_config = components.config.eval
        self._model = components.model
        self._dtype = components.evaluation.memory_dtype
        self.batch_size, self.block = batch_size, block
        self.mem_len = eval_config.mem_len
        self._clamp_len = eval_config.clamp_len
        self._weight_dtype = eval_config.weight_dtype
        self._transposed = batch_size > 1 and components.mesh.devices.flat[0].platform == "cpu"
        self.slack = block
        self.capacity = cache_capacity(mem_len=self.mem_len + self.slack, segment_len=min(WIDTHS))
        limit = self._model.compat.window(self.mem_len, same_length=eval_config.same_length)
        self._window = self.mem_len + 1 if limit is None else limit
        self._start = self._model.compat.memory_start
        self._prepare = components.jit(self._prepare_params)
        self._init = components.jit(self._init_rings, static_argnums=1)
        self._write = components.jit(self._write_block, donate_argnums=1)
        self._read = components.jit(self._read_segment, donate_argnums=1)
        self._put = components.jit(_put_row, donate_argnums=0)
        self._take = components.jit(_take_row)

    def prepare_params(self, params: Any) -> Weights:
        """Prepares the parameters for reading and for writing."""
        segment = self._prepare(params)
        return Weights(segment, forward.for_single_tokens(segment, mem_len=self.capacity))

    def init_rings(self, weights: Weights) -> Rings:
        """Returns the rings of B rows that have read nothing."""
        rings: Rings = self._init(weights.segment, self.batch_size)
        return rings

    def empty_row(self, weights: Weights) -> Rings | None:
        """Returns the rings [1, ..] that `put` a row's beginning; None: a position of 0 is enough."""
        if self._start is MemoryStart.MASKED:
            return None
        row: Rings = self._init(weights.segment, 1)
        return row

    def width(self, length: int) -> int:
        """Returns the width of the segment that is read next where `length` tokens are left to read."""
        return max((width for width in WIDTHS if width <= length), default=min(WIDTHS))

    def write(self, weights: Weights, rings: Rings, rows: Rows) -> tuple[Rings, np.ndarray, Scores]:
        """Draws up to K tokens of each row; the rings are donated.

        Returns:
          The rings, the tokens int32 [B, K] and their scores [B, K]; of a row's first `steps` tokens.
        """
        rings, tokens, scores = self._write(weights.token, rings, rows)
        return rings, np.asarray(tokens), Scores(*map(np.asarray, scores))

    def read(
        self, weights: Weights, rings: Rings, row: int, position: int, tokens: np.ndarray, *, scored: bool
    ) -> tuple[Rings, Scores]:
        """Reads the next tokens of one row; the rings are donated.

        Args:
          weights: prepared parameters.
          rings: of all rows.
          row: its number.
          position: tokens that it has read before.
          tokens: [T], the tokens that are left, the last of which is not read.
          scored: whether logprobs are wanted.

        Returns:
          The rings, and the scores of the tokens that follow those that were read: of up to `width(T - 1)`.
        """
        width = self.width(len(tokens) - 1)
        count = min(width, len(tokens) - 1)
        given, targets = (np.zeros(width, np.int32) for _ in range(2))
        given[:count], targets[:count] = tokens[:count], tokens[1 : count + 1]
        numbers = np.array([row, position, count, scored], np.int32)
        rings, scores = self._read(weights.segment, rings, given, targets, numbers)
        return rings, Scores(*(np.asarray(each)[:count] for each in scores))

    def put(self, rings: Rings, row: int, state: Any) -> Rings:
        """Returns the rings with `state` [1, ..] in a row; the rings are donated."""
        rings = self._put(rings, np.int32(row), state)
        return rings

    def take(self, rings: Rings, row: int) -> Rings:
        """Returns a copy of a row's rings on the host, [1, ..]."""
        return jax.tree.map(np.array, self._take(rings, np.int32(row)))

    def normal_position(self, position: int) -> int:
        """Returns the smallest position of the same slots and number of visible ones."""
        return position if position < 2 * self.capacity else self.capacity + position % self.capacity

    def _prepare_params(self, params: Any) -> DecodeParams:
        lengths: dict[str, Any] = {"segment_len": max(WIDTHS), "mem_len": self.capacity, "clamp_len": self._clamp_len}
        prepared = forward.prepare_params(params, self._model, weight_dtype=self._weight_dtype, **lengths)
        return transpose_layers(prepared) if self._transposed else prepared

    def _init_rings(self, weights: DecodeParams, batch_size: int) -> Rings:
        lengths = {"mem_len": self.capacity, "segment_len": min(WIDTHS)}
        cache = forward.init_cache(weights, self._model, batch_size=batch_size, dtype=self._dtype, **lengths)
        return Rings(cache.keys, cache.values)

    def _cache(self, rings: Rings, position: jax.Array) -> KVCache:
        """Returns the cache of rows at positions [B], or of one row, with rings [1, ..], at a position []."""
        valid = jnp.minimum(start_valid(self.mem_len, self._start) + position, self.mem_len)
        return KVCache(
            keys=rings.keys,
            values=rings.values,
            valid=jnp.atleast_1d(valid).astype(jnp.int32),
            write_index=position % self.capacity,
            mem_len=self.mem_len,
        )

    def _write_block(self, weights: DecodeParams, rings: Rings, rows: Rows) -> tuple[Rings, jax.Array, Scores]:
        """Runs steps until every row has drawn its tokens."""
        keys = jax.vmap(lambda seed, sample: jax.random.fold_in(jax.random.key(seed), sample))(rows.seed, rows.sample)
        limits = {"temperature": rows.temperature, "top_p": rows.top_p}

        def write(i: jax.Array, carry: Any) -> Any:
            rings, last, tokens, scores = carry
            active = i < rows.steps
            position = rows.position + jnp.minimum(i, rows.steps)
            states = forward.apply_layers(
                weights, self._model, last[:, None], self._cache(rings, position), window=self._window
            )
            hidden = forward.finish(weights, self._model, states.hidden)[:, 0]
            slots = _after(position % self.capacity, hidden)
            rings = _write_tokens(rings, states.keys, states.values, slots)
            token_keys = jax.vmap(jax.random.fold_in)(keys, rows.number + i)
            drawn = sampling.sample_rows(token_keys, hidden, weights.clusters, **limits)
            found = jax.lax.cond(
                jnp.any(rows.scored & active),
                lambda: self._score(weights, hidden, drawn),
                lambda: _no_scores(drawn, self._score_dtype(weights, hidden)),
            )
            scores = jax.tree.map(lambda all, one: all.at[:, i].set(one), scores, found)
            return rings, jnp.where(active, drawn, last), tokens.at[:, i].set(drawn), scores

        tokens = jnp.zeros((self.batch_size, self.block), jnp.int32)
        hidden = jnp.zeros((self.batch_size, self._model.config.d_model), self._model.config.dtype)
        scores = _no_scores(tokens, self._score_dtype(weights, hidden))
        carry = rings, jnp.asarray(rows.last), tokens, scores
        rings, _, tokens, scores = jax.lax.fori_loop(0, jnp.max(rows.steps), write, carry)
        return rings, tokens, scores

    def _read_segment(
        self, weights: DecodeParams, rings: Rings, tokens: jax.Array, targets: jax.Array, numbers: jax.Array
    ) -> tuple[Rings, Scores]:
        """Reads the first `count` of tokens [W] in one row; those after them are seen by none of these."""
        row, position, count, scored = numbers
        states = forward.apply_layers(
            weights, self._model, tokens[None], self._cache(_take_row(rings, row), position), window=self._window
        )
        hidden = forward.finish(weights, self._model, states.hidden)[0]
        first = _after(position % self.capacity, states.hidden)
        rings = _write_segment(rings, states.keys, states.values, row, first, count)
        scores = jax.lax.cond(
            scored,
            lambda: self._score(weights, hidden, targets),
            lambda: _no_scores(targets, self._score_dtype(weights, hidden)),
        )
        return rings, scores

    def _score(self, weights: DecodeParams, hidden: jax.Array, targets: jax.Array) -> Scores:
        """Computes the scores of targets [n] after hidden states [n, D]."""
        nats = forward.nll(weights, self._model, hidden[:, None], targets[:, None])[:, 0]
        top = min(TOP, self._model.vocab_size)
        logprobs, tokens = sampling.top_k_tokens(hidden, weights.clusters, top)
        pad = [(0, 0), (0, TOP - top)]
        return Scores(nats, jnp.pad(logprobs, pad, constant_values=-jnp.inf), jnp.pad(tokens, pad))

    def _score_dtype(self, weights: DecodeParams, hidden: jax.Array) -> Any:
        shapes = jax.eval_shape(self._score, weights, hidden, jnp.zeros(hidden.shape[:1], jnp.int32))
        return shapes.nats.dtype


def _no_scores(tokens: jax.Array, dtype: Any) -> Scores:
    """Returns zeros in the shape of the scores of tokens [..]."""
    several = (*tokens.shape, TOP)
    return Scores(jnp.zeros(tokens.shape, dtype), jnp.zeros(several, dtype), jnp.zeros(several, jnp.int32))


def _after(index: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns an index that depends on what was computed from the rings, so that they are written after all reads.

    As in `inference.cache.write`, without it XLA may keep a copy of them.
    """
    return index + jnp.minimum(jnp.abs(hidden.reshape(-1)[0]).astype(jnp.int32), 0)


def _bits(array: jax.Array) -> jax.Array:
    """Returns bfloat16 as bits: XLA's CPU backend would turn the whole ring to float32 to write to it."""
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.bfloat16 else array


def _unbits(array: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, dtype) if array.dtype != dtype else array


def _each(rings: Rings, keys: Sequence[jax.Array], values: Sequence[jax.Array], write: Any, count: Any) -> Rings:
    """Runs `write(i, ring, new, is_key)` for i < count on the bits of each ring with its new keys [.., L, E]."""
    of_keys, of_values = (
        tuple(as_stored(new, ring.dtype, axis=-1) for ring, new in zip(own, news, strict=True))
        for own, news in ((rings.keys, keys), (rings.values, values))
    )
    of_keys, of_values = jax.tree.map(_bits, (of_keys, of_values))

    def body(i: jax.Array, carry: Any) -> Any:
        key_rings, value_rings = carry
        return (
            jax.tree.map(lambda ring, new: write(i, ring, new, True), key_rings, of_keys),
            jax.tree.map(lambda ring, new: write(i, ring, new, False), value_rings, of_values),
        )

    written = jax.lax.fori_loop(0, count, body, jax.tree.map(_bits, tuple(rings)))
    return Rings(*jax.tree.map(lambda ring, old: _unbits(ring, old.dtype), written, tuple(rings)))


def _write_tokens(rings: Rings, keys: Any, values: Any, slots: jax.Array) -> Rings:
    """Writes keys and values, per layer [B, H, 1, E], of one token of each row."""

    def write(row: jax.Array, ring: jax.Array, new: jax.Array, is_key: bool) -> jax.Array:
        column = jax.lax.dynamic_slice_in_dim(new, row, 1)  # [1, H, 1, E]
        if is_key:
            return jax.lax.dynamic_update_slice(ring, column.swapaxes(2, 3), (row, 0, 0, slots[row]))
        return jax.lax.dynamic_update_slice(ring, column, (row, 0, slots[row], 0))

    return _each(rings, keys, values, write, slots.shape[0])


def _write_segment(rings: Rings, keys: Any, values: Any, row: jax.Array, first: jax.Array, count: jax.Array) -> Rings:
    """Writes the first `count` keys and values, per layer [1, H, W, E], from the slot `first` on, around the end."""
    capacity = rings.keys[0].shape[3]

    def write(i: jax.Array, ring: jax.Array, new: jax.Array, is_key: bool) -> jax.Array:
        column = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=2)  # [1, H, 1, E]
        slot = (first + i) % capacity
        if is_key:
            return jax.lax.dynamic_update_slice(ring, column.swapaxes(2, 3), (row, 0, 0, slot))
        return jax.lax.dynamic_update_slice(ring, column, (row, 0, slot, 0))

    return _each(rings, keys, values, write, count)


def _take_row(rings: Rings, row: jax.Array) -> Rings:
    return jax.tree.map(lambda ring: jax.lax.dynamic_slice_in_dim(ring, row, 1), rings)


def _put_row(rings: Rings, row: jax.Array, state: Rings) -> Rings:
    return jax.tree.map(lambda ring, own: jax.lax.dynamic_update_slice_in_dim(ring, own, row, 0), rings, state)
