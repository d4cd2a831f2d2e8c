"""The rows of the server: the functions of `inference.decode` for R rows, each at its own position.

A row has its own ring of slots, indexed by the number of tokens that it has read, which the host
keeps. Its results therefore depend only on its own tokens, to the last bit, no matter when it
joined or what other rows do:

- A call that writes runs all R rows with matmuls of one shape, in which no row's numbers meet
  another's.
- A call that reads takes one row out of the rings, for a segment of one of two widths, which the
  row's tokens decide.
- Samples depend on the request's seed, the number of its sample and the number of the token, never
  on the row.

A ring has M + K slots or more, of which the latest M can be seen. K is `block`, a row's tokens per
call. So a row that has nothing to do needs no branch: it overwrites its oldest slot, which cannot
be seen. A row can go back by up to K - 1 tokens, exactly, by setting its position back, as after a
stop string in the middle of a call.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import MemoryStart
from txl_jax.config.config_tree import require
from txl_jax.inference import decode, forward
from txl_jax.inference.cache import KVCache, cache_capacity
from txl_jax.inference.decode import Sampling, Scores, row_key
from txl_jax.inference.prepare import DecodeParams, prepare_params
from txl_jax.inference.scorer import memory_dtype
from txl_jax.memory import start_valid
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.runs.build import Built

# Tokens of the segments that are read.
WIDTHS = (16, 64)
# Most likely tokens that come with logprobs: OpenAI's limit.
TOP = 5


class PreparedParams(NamedTuple):
    """Parameters prepared for segments of a prompt, and for single tokens."""

    segment: DecodeParams
    token: DecodeParams


class Rows(NamedTuple):
    """Arguments of a call that writes: arrays [R]."""

    last: Any  # int32, the latest token, which is read first.
    position: Any  # int32, tokens read before.
    steps: Any  # int32, tokens to draw; 0 if the row does nothing.
    number: Any  # int32, number of the first token to draw.
    key: Any  # uint32 [R, ..], `decode.row_key`.
    temperature: Any  # float32
    top_p: Any  # float32
    scored: Any  # bool, whether logprobs are wanted.

    @staticmethod
    def idle(batch_size: int) -> "Rows":
        """Returns the arguments of rows that have nothing to do."""
        return Rows(
            last=np.zeros(batch_size, np.int32),
            position=np.zeros(batch_size, np.int32),
            steps=np.zeros(batch_size, np.int32),
            number=np.zeros(batch_size, np.int32),
            key=np.zeros((batch_size, *_key_shape()), np.uint32),
            temperature=np.zeros(batch_size, np.float32),
            top_p=np.zeros(batch_size, np.float32),
            scored=np.zeros(batch_size, bool),
        )


@functools.cache
def _key_shape() -> tuple[int, ...]:
    return row_key(0).shape


class Step:
    """The compiled programs of one model at its evaluation lengths, for R rows."""

    def __init__(self, built: Built, *, batch_size: int, block: int = 8):
        """Compiles nothing yet. `block` is K, the maximum tokens of a row per call.

        Whether the model can generate at all is checked by `runs.generate.check_can_generate`.

        Raises:
          UserError: If the mesh has more than one device, or the model keeps documents apart
            (`data.reset_at`).
        """
        # A row's filled slots follow from its position here.
        reset_at = built.config.data.reset_at
        require(
            reset_at is None,
            f"the model separates documents at the token {reset_at!r}, which the server does "
            "not support. Generate with txl_jax.load.",
        )
        num_devices = built.mesh.size
        require(
            num_devices == 1,
            f"the server must run on one device, got a mesh of {num_devices}. "
            "Start it where JAX finds one device, for example with CUDA_VISIBLE_DEVICES=0 or "
            "JAX_NUM_CPU_DEVICES=1.",
        )
        assert isinstance(built.model, TransformerXL)
        self._built = built
        self._model = built.model
        self.batch_size = batch_size
        self.block = block
        self.mem_len = built.config.eval.mem_len
        # Slots of a ring: a call of `block` tokens overwrites none that can be seen.
        self.capacity = cache_capacity(mem_len=self.mem_len + block, segment_len=min(WIDTHS))

        self._prepare: Callable[..., DecodeParams] = built.jit(self._prepare_params)
        self._init: Callable[..., KVCache] = built.jit(self._init_rows, static_argnums=1)
        self._write = built.jit(
            decode.decode_block, static_argnames=("count", "top"), donate_argnums=1
        )
        self._read = built.jit(_read_row, donate_argnums=1)
        # Puts the rings of one row into the cache of all, which is donated, or takes them out.
        self.put: Callable[..., KVCache] = built.jit(decode.put_row, donate_argnums=0)
        self.take: Callable[..., KVCache] = built.jit(decode.take_row)

    def prepare_params(self, params: Any) -> PreparedParams:
        """Prepares the parameters for reading and for writing."""
        segment = self._prepare(params)
        return PreparedParams(segment, segment.for_single_tokens(mem_len=self.capacity))

    def row_bytes(self, params: Any) -> int:
        """Returns the memory of one row's cache."""
        prepared = jax.eval_shape(self._prepare_params, params)
        cache = jax.eval_shape(functools.partial(self._init_rows, batch_size=1), prepared)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    def init_cache(self, prepared: PreparedParams) -> KVCache:
        """Returns the cache of R rows that have read nothing."""
        return self._init(prepared.segment, self.batch_size)

    def empty_row(self, prepared: PreparedParams) -> KVCache | None:
        """Returns the cache [1, ..] to `put` before a row begins.

        The result is None if a position of 0 is enough.
        """
        if self._model.config.compat.memory_start is MemoryStart.MASKED:
            return None
        return self._init(prepared.segment, 1)

    def write(
        self, prepared: PreparedParams, cache: KVCache, rows: Rows
    ) -> tuple[KVCache, np.ndarray, Scores]:
        """Samples up to K tokens of each row. The cache is donated.

        Returns the cache, and tokens int32 [R, K] and their scores [R, K], of which a row's first
        `steps` count.
        """
        block_rows = decode.BlockRows(
            known=rows.last[:, None],
            number=rows.number,
            steps=rows.steps,
            key=rows.key,
            stop=np.int32(-1),
            scored=rows.scored,
        )
        sampling = Sampling(rows.temperature, rows.top_p)
        cache, tokens, _, scores = self._write(
            prepared.token,
            self._at(cache, rows.position),
            block_rows,
            sampling,
            count=self.block,
            top=TOP,
        )
        return cache, np.asarray(tokens), _on_host(scores)

    def read(
        self,
        prepared: PreparedParams,
        cache: KVCache,
        row: int,
        position: int,
        tokens: np.ndarray,
        *,
        scored: bool,
    ) -> tuple[KVCache, Scores]:
        """Reads the next tokens of one row at its position. The cache is donated.

        `tokens` [T] are the remaining ones, the last of which is not read. Returns the cache, and
        the scores of the tokens that follow the n that were read: n is the largest of `WIDTHS` that
        is at most T - 1, or T - 1.
        """
        num_left = len(tokens) - 1
        width = max((width for width in WIDTHS if width <= num_left), default=min(WIDTHS))
        count = min(width, num_left)

        # A segment is filled up by zeros, which count for nothing.
        segment = np.zeros(width, np.int32)
        targets = np.zeros(width, np.int32)
        segment[:count] = tokens[:count]
        targets[:count] = tokens[1 : count + 1]
        cache, scores = self._read(
            prepared.segment,
            self._at(cache, np.full(self.batch_size, position)),
            segment,
            targets,
            np.int32(row),
            np.int32(count),
            np.bool_(scored),
        )
        return cache, Scores(*(array[:count] for array in _on_host(scores)))

    def normal_position(self, position: int) -> int:
        """Returns the smallest position of the same slots and number of visible ones."""
        if position < 2 * self.capacity:
            return position
        return self.capacity + position % self.capacity

    def _at(self, cache: KVCache, position: np.ndarray) -> KVCache:
        """Returns the cache with its rows at these positions, [R]."""
        start = start_valid(self.mem_len, self._model.config.compat.memory_start)
        valid = np.minimum(start + position, self.mem_len)
        index = position % self.capacity
        return cache.replace(valid=valid.astype(np.int32), write_index=index.astype(np.int32))

    def _prepare_params(self, params: Any) -> DecodeParams:
        config = self._built.config.eval
        is_on_cpu = self._built.mesh.devices.flat[0].platform == "cpu"
        # Positions are prepared for all slots of the ring. How many of them a token attends to
        # follows from the window and from M.
        prepared = prepare_params(
            params,
            self._model,
            window=self._model.config.compat.window(self.mem_len, same_length=config.same_length),
            segment_len=max(WIDTHS),
            mem_len=self.capacity,
            clamp_len=config.clamp_len,
            weight_dtype=config.weight_dtype,
            transposed=self.batch_size > 1 and is_on_cpu,
        )
        return prepared.for_generation(mem_len=self.mem_len)

    def _init_rows(self, prepared: DecodeParams, batch_size: int) -> KVCache:
        cache = forward.init_cache(
            prepared,
            batch_size=batch_size,
            mem_len=self.capacity,
            segment_len=min(WIDTHS),
            dtype=memory_dtype(self._model, self._built.config.eval),
        )
        # All slots were memory so far. Only M of them are attended to. Each row has its own index.
        return cache.replace(write_index=jnp.zeros_like(cache.valid), mem_len=self.mem_len)


def _on_host(scores: Scores) -> Scores:
    return Scores(*(np.asarray(array) for array in scores))


def _read_row(
    prepared: DecodeParams,
    cache: KVCache,
    tokens: Any,
    targets: Any,
    row: Any,
    count: Any,
    scored: Any,
) -> tuple[KVCache, Scores]:
    """Reads the first `count` of tokens [W] in one row, and scores their targets [W]."""
    cache, hidden = decode.prefill_row(prepared, cache, row, tokens, count)
    return cache, decode.score_if(scored, prepared, hidden, targets, top=TOP)
