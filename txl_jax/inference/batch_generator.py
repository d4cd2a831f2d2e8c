"""Generation after many prompts at once: different prompts in the rows of a batch.

Every row computes what `txl_jax.inference.generator` does for its prompt alone, with the same segments and keys. No row
reads padding into its cache:

- Whole segments of the prompts are read side by side. When the last one of a row is read, the row's cache is copied to
  the caches of single tokens, before other rows' segments go on.
- What is left of each prompt, less than a segment, is read by the loop that draws: a row draws its token 0 as soon as
  it has read its last token. So rows draw tokens of different numbers in the same step.

With L = 3 and prompts of 5 (a) and 8 (b) tokens, x marks drawn tokens:

    row 0:   a a a |       | a a x x x ..
    row 1:   b b b | b b b | b b x x x ..
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from txl_jax.config import EvalConfig, GenerateConfig
from txl_jax.data.vocabulary import TextStream
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.cache import KVCache
from txl_jax.inference.forward import DecodeParams
from txl_jax.inference.generator import Context, Weights
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling
from txl_jax.runtime import distributed
from txl_jax.sharding import bind_mesh


class Prompts(NamedTuple):
    """The prompts of B rows; a row without a prompt has drawn all its tokens."""

    whole: np.ndarray  # int32 [W, B, L], their whole segments; 0 where a prompt has fewer.
    n_whole: np.ndarray  # int [B], number of those.
    rest: np.ndarray  # int32 [B, L], the tokens after them, up to the prompt's last one.
    n_rest: np.ndarray  # int32 [B], number of those, without the prompt's last one.

    @staticmethod
    def of(prompts: Sequence[np.ndarray], *, rows: int, segment_len: int) -> "Prompts":
        """Returns the prompts [T], each of at least one token, in the first of B = `rows` rows."""
        lengths = [len(prompt) - 1 for prompt in prompts] + [0] * (rows - len(prompts))
        n_whole, n_rest = np.divmod(lengths, segment_len)
        whole = np.zeros((n_whole.max(), rows, segment_len), np.int32)
        rest = np.zeros((rows, segment_len), np.int32)
        for row, prompt in enumerate(prompts):
            end = n_whole[row] * segment_len
            whole[: n_whole[row], row] = prompt[:end].reshape(-1, segment_len)
            rest[row, : len(prompt) - end] = prompt[end:]
        return Prompts(whole, n_whole, rest, n_rest.astype(np.int32))


class Drawn(NamedTuple):
    """Tokens of one call."""

    tokens: np.ndarray  # int32 [B, count]
    numbers: np.ndarray  # int [B, count], of the drawn tokens in their rows; outside 0 .. length - 1: nothing.


class BatchGenerator:
    """Compiled functions that generate text after many prompts, with one model at the evaluation lengths."""

    def __init__(
        self,
        model: TransformerXL,
        eval_config: EvalConfig,
        config: GenerateConfig,
        *,
        memory_dtype: jnp.dtype | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ):
        """Compiles nothing yet.

        Args:
          model: whose parameters the weights are.
          eval_config: segment and memory lengths, clamp and same_length.
          config: temperature, top_k and top_p; nothing else of it is read.
          memory_dtype: type of the stored keys and values; None: as computed.
          mesh: the devices that the model is built for; None: one device, or the caller enters the mesh.
        """
        self._model = model
        self._eval_config = eval_config
        self._limits: dict[str, Any] = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        self._memory_dtype = memory_dtype
        self._window = forward.generation_window(model, eval_config)

        def jit(function: Any, **options: Any) -> Any:
            return bind_mesh(mesh, jax.jit(function, **options))

        self._empty = jit(self._init_cache, static_argnums=1)
        self._read = jit(self._read_segment, donate_argnums=1)
        self._take = jit(_take_rows, donate_argnums=0)
        self._unrotate = jit(cache_lib.unrotate)
        self._write = jit(self._write_block, static_argnames="count", donate_argnums=1)

    def pieces(
        self,
        weights: Weights,
        prompts: Sequence[np.ndarray],
        *,
        seeds: Sequence[int],
        decode: Callable[[Any], bytes],
        length: int,
        stop_token: int | None,
        stop_strings: Sequence[str],
        batch_size: int,
    ) -> Iterator[tuple[int, str]]:
        """Yields the texts after all prompts in pieces, each with its prompt's number; each text is as for it alone.

        Args:
          weights: Prepared parameters.
          prompts: Ids [T] of at least one token.
          seeds: One per prompt.
          decode: Returns the bytes of ids.
          length: Maximum tokens of a text.
          stop_token: Ends a text, which includes it; None if nothing does.
          stop_strings: End a text, which does not include them.
          batch_size: Maximum number of prompts continued side by side.
        """
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for first in range(0, len(order), batch_size):
            group = order[first : first + batch_size]
            rows = min(1 << (len(group) - 1).bit_length(), batch_size)  # A program for each power of two.
            keys = np.stack([row_key(seeds[number]) for number in group] + [row_key(0)] * (rows - len(group)))
            given = [prompts[number] for number in group]
            placed = Prompts.of(given, rows=rows, segment_len=self._eval_config.segment_len)
            streams = [TextStream(decode, stop_strings) for _ in group]
            ended = np.arange(rows) >= len(group)
            for drawn in self.tokens(weights, placed, keys, length=length, ended=ended, stop_token=stop_token):
                for row, number in enumerate(group):
                    if ended[row]:
                        continue
                    numbers, stream = drawn.numbers[row], streams[row]
                    own = (numbers >= 0) & (numbers < length)
                    ids = drawn.tokens[row][own]
                    stops = [] if stop_token is None else np.flatnonzero(ids == stop_token).tolist()
                    is_last = bool(stops) or bool(np.any(numbers[own] == length - 1))
                    text = stream.add(ids[: stops[0] + 1] if stops else ids) + (stream.finish() if is_last else "")
                    ended[row] = is_last or stream.ended
                    if text:
                        yield number, text

    def read(self, weights: Weights, prompts: Prompts) -> KVCache:
        """Returns the caches of single tokens after the whole segments of the prompts."""
        memory = self._empty(weights.segment, len(prompts.rest))
        ready = self._unrotate(memory)
        for number, tokens in enumerate(prompts.whole, start=1):
            memory = self._read(weights.segment, memory, tokens)
            if np.any(ends := prompts.n_whole == number):
                ready = self._take(ready, memory, ends)
        return ready

    def tokens(
        self,
        weights: Weights,
        prompts: Prompts,
        keys: np.ndarray,
        *,
        length: int,
        ended: np.ndarray,
        stop_token: int | None = None,
        block: int = 16,
    ) -> Iterator[Drawn]:
        """Yields drawn tokens until every row has `length` of them or has ended.

        Args:
          weights: prepared parameters.
          prompts: of B rows.
          keys: uint32 [B, ..], data of a random key for each row; token i is drawn with the key folded with i.
          length: tokens of each row, at most.
          ended: bool [B], read before each call: rows of which nothing more is wanted.
          stop_token: ends a row; None: nothing does.
          block: steps per call.
        """
        stop = np.int32(-1 if stop_token is None else stop_token)
        context = Context(self.read(weights, prompts), np.zeros(len(ended), np.int32), ended.copy())
        first = 0
        while not ended.all():
            context, tokens, written = self._write(
                weights.token,
                context,
                (prompts.rest, prompts.n_rest),
                keys,
                np.int32(first),
                np.int32(length),
                stop,
                count=block,
            )
            columns = np.arange(int(distributed.to_host(written)))
            numbers = first + columns[None, :] - prompts.n_rest[:, None]
            yield Drawn(distributed.to_host(tokens)[:, : len(columns)], numbers)
            # The caller may have ended rows since.
            context = context._replace(done=distributed.to_host(context.done) | ended)
            if context.done.all():
                return
            first += block

    def _init_cache(self, weights: DecodeParams, rows: int) -> KVCache:
        lengths = {"mem_len": self._eval_config.mem_len, "segment_len": self._eval_config.segment_len}
        return forward.init_cache(weights, self._model, batch_size=rows, dtype=self._memory_dtype, **lengths)

    def _read_segment(self, weights: DecodeParams, memory: KVCache, tokens: jax.Array) -> KVCache:
        """Returns the caches after tokens [B, L]."""
        return forward.forward(weights, self._model, tokens, memory, window=self._window)[1]

    def _write_block(
        self,
        weights: DecodeParams,
        context: Context,
        rests: tuple[jax.Array, jax.Array],
        keys: jax.Array,
        first: jax.Array,
        length: jax.Array,
        stop: jax.Array,
        *,
        count: int,
    ) -> tuple[Context, jax.Array, jax.Array]:
        """Runs the steps `first` to `first + count - 1`, fewer if all rows end before.

        Returns:
          The context after them, int32 [B, count], and how many columns of it were written.
        """
        typed_keys = jax.random.wrap_key_data(keys)
        rest, n_rest = rests

        def write(state: tuple[jax.Array, Context, jax.Array]) -> tuple[jax.Array, Context, jax.Array]:
            i, context, written = state
            step = first + i
            given = jnp.take_along_axis(rest, jnp.minimum(step, n_rest)[:, None], axis=1)[:, 0]
            token = jnp.where(step <= n_rest, given, context.last)
            hidden, memory = forward.forward(weights, self._model, token[:, None], context.memory, window=self._window)
            index = step - n_rest  # Of the drawn token; below 0 the row is still reading.
            token_keys = jax.vmap(jax.random.fold_in)(typed_keys, jnp.maximum(index, 0))
            drawn = sampling.sample(token_keys, hidden[:, 0], weights.clusters, **self._limits)
            done = context.done | (index >= length - 1) | ((index >= 0) & (drawn == stop))
            return i + 1, Context(memory, drawn, done), written.at[:, i].set(drawn)

        def goes_on(state: tuple[jax.Array, Context, jax.Array]) -> jax.Array:
            i, context, _ = state
            return (i < count) & ~jnp.all(context.done)

        start = jnp.zeros((), jnp.int32), context, jnp.zeros((len(keys), count), jnp.int32)
        written, context, tokens = jax.lax.while_loop(goes_on, write, start)
        return context, tokens, written


def row_key(seed: int) -> np.ndarray:
    """Returns the data of the key of a prompt alone, as the first sample of `Generator` has it."""
    return np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 0)))


def _take_rows(ready: KVCache, memory: KVCache, rows: jax.Array) -> KVCache:
    """Returns `ready` with the `rows` (bool [B]) of a ring of segments, turned for single tokens."""

    def take(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (old.ndim - 1)), new, old) if old.ndim else old

    return jax.tree.map(take, ready, cache_lib.unrotate(memory))
