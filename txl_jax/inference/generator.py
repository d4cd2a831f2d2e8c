"""Generation: the prompt is read in segments (prefill), then tokens are drawn one at a time, all on the device.

Token number i of sample b is drawn with a key made of (seed, b, i) alone, so the text depends neither on how many
tokens are drawn per call nor on how many samples are written beside it. Every query sees the keys at the distances 0
to M (with `same_length` to M - 1), so the text does not depend either on how the prompt was cut.

The KV cache is a ring: a step overwrites its oldest slot and moves nothing, so that time and memory per token stay the
same however long the text becomes.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from txl_jax.config import EvalConfig, GenerateConfig
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.cache import KVCache
from txl_jax.inference.forward import DecodeParams
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import sampling
from txl_jax.runtime import distributed
from txl_jax.sharding import bind_mesh


class Weights(NamedTuple):
    """Parameters prepared for segments of the prompt, and for single tokens."""

    segment: DecodeParams
    token: DecodeParams


class Context(NamedTuple):
    """State of generation: all that the next token depends on."""

    memory: KVCache
    last: Any  # int32 [B], the newest token, not yet read.
    done: Any  # bool [B], which samples have ended.


class Generator:
    """Compiled functions that generate text with one model at the evaluation lengths."""

    def __init__(
        self,
        model: TransformerXL,
        eval_config: EvalConfig,
        config: GenerateConfig,
        *,
        memory_dtype: jnp.dtype | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        stop_token: int | None = None,
    ):
        """Compiles nothing yet.

        Args:
          eval_config: segment and memory lengths, clamp and same_length.
          config: samples, length and how tokens are drawn.
          memory_dtype: type of the stored keys and values; None: as computed.
          mesh: the devices that the model is built for; None: one device, or the caller enters the mesh.
          stop_token: a sample ends with this token; None: at `config.length` only.
        """
        self._model = model
        self._eval_config = eval_config
        self._config = config
        self._memory_dtype = memory_dtype
        self._stop_token = stop_token
        self._mesh = mesh
        self._window = forward.generation_window(model, eval_config)
        self.prepare_segment = self._jit(self._prepare)
        self._init_memory = self._jit(self.empty)
        self._read = self._jit(self._read_segment, donate_argnums=1)
        self._read_rest = self._jit(self._read_tokens, donate_argnums=1)
        self.write = self._jit(self._write_block, static_argnames="count", donate_argnums=1)

    def tokens(
        self,
        weights: Weights,
        prompt: np.ndarray,
        *,
        block: int = 16,
        stop_requested: Callable[[], Any] = lambda: False,
    ) -> Iterator[np.ndarray]:
        """Yields int32 [B, up to `block`] until `config.length` tokens are written or every sample has ended.

        A sample that has ended goes on with its stop token.

        Args:
          weights: the result of `prepare_params`.
          prompt: int [T], at least one token.
          block: tokens per call; more is a little faster, fewer are seen sooner.
          stop_requested: asked between segments of the prompt and between blocks; once it is true nothing more comes.

        Raises:
          UserError: an empty prompt.
        """
        context, length = self.read(weights, prompt, stop_requested=stop_requested), self._config.length
        for first in range(0, length, block):
            if stop_requested():
                return
            count = min(block, length - first)
            context, tokens, written = self.write(weights.token, context, first, count, count=block)
            yield distributed.to_host(tokens)[:, : int(distributed.to_host(written))]
            if np.all(distributed.to_host(context.done)):
                return

    def read(
        self, weights: Weights, prompt: np.ndarray, *, stop_requested: Callable[[], Any] = lambda: False
    ) -> Context:
        """Returns the context after a prompt [T], read once from an empty cache, for all samples.

        Two programs read prompts of any length: whole segments, and then what is left token by token.
        """
        if len(prompt) == 0:
            raise UserError("the prompt is empty; generation needs at least one token to go on from")
        segment_len = self._eval_config.segment_len
        known = np.asarray(prompt[:-1], np.int32)
        memory = self._init_memory(weights.segment)
        n_whole = len(known) // segment_len
        for tokens in known[: n_whole * segment_len].reshape(n_whole, 1, segment_len):
            if stop_requested():
                break
            memory = self._read(weights.segment, memory, tokens)
        rest = known[n_whole * segment_len :]
        padded = np.pad(rest, (0, segment_len - len(rest)))
        memory = self._read_rest(weights.token, _unrotate(memory), padded, len(rest))
        samples = self._config.samples
        return Context(
            memory=_repeat_rows(memory, samples),
            # Of numpy: arrays that jax makes here would be on the devices of this process only.
            last=np.full(samples, prompt[-1], np.int32),
            done=np.zeros(samples, bool),
        )

    def prepare_params(self, params: Any) -> Weights:
        """Prepares the parameters. Both layouts share arrays, so this is not to be jitted as a whole."""
        segment = self.prepare_segment(params)
        return Weights(segment, self.for_tokens(segment))

    def for_tokens(self, segment: DecodeParams) -> DecodeParams:
        """Returns the parameters of segments prepared for single tokens."""
        return forward.for_single_tokens(segment, mem_len=self._eval_config.mem_len)

    def _jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """Returns the jitted function, which enters the mesh whenever it is called or lowered."""
        return bind_mesh(self._mesh, jax.jit(function, **options))

    def _prepare(self, params: Any) -> DecodeParams:
        c = self._eval_config
        lengths: dict[str, Any] = {"segment_len": c.segment_len, "mem_len": c.mem_len, "clamp_len": c.clamp_len}
        return forward.prepare_params(params, self._model, weight_dtype=c.weight_dtype, **lengths)

    def empty(self, weights: DecodeParams) -> KVCache:
        """Returns the cache of one row before the prompt."""
        return forward.init_cache(
            weights,
            self._model,
            batch_size=1,
            mem_len=self._eval_config.mem_len,
            segment_len=self._eval_config.segment_len,
            dtype=self._memory_dtype,
        )

    def _read_segment(self, weights: DecodeParams, memory: KVCache, tokens: jax.Array) -> KVCache:
        """Returns the cache after tokens [1, L]."""
        return forward.forward(weights, self._model, tokens, memory, window=self._window)[1]

    def _read_tokens(self, weights: DecodeParams, memory: KVCache, tokens: jax.Array, count: jax.Array) -> KVCache:
        """Returns the cache after the first `count` of tokens [L], read one at a time."""

        def read(i: jax.Array, memory: KVCache) -> KVCache:
            return self._read_segment(weights, memory, tokens[i][None, None])

        return jax.lax.fori_loop(0, count, read, memory)

    def _write_block(
        self, weights: DecodeParams, context: Context, first: jax.Array, limit: jax.Array, *, count: int
    ) -> tuple[Context, jax.Array, jax.Array]:
        """Draws tokens `first` to `first + limit - 1`, fewer if all samples end before.

        Returns:
          The context after them, int32 [B, count], and how many columns of it were written.
        """
        config, n_sample = self._config, context.last.shape[0]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(config.seed), jnp.arange(n_sample))
        limits: dict[str, Any] = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}

        def write(state: tuple[jax.Array, Context, jax.Array]) -> tuple[jax.Array, Context, jax.Array]:
            i, context, written = state
            hidden, memory = forward.forward(
                weights, self._model, context.last[:, None], context.memory, window=self._window
            )
            token_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, first + i)
            drawn = sampling.sample(token_keys, hidden[:, 0], weights.clusters, **limits)
            done = context.done
            if self._stop_token is not None:
                drawn = jnp.where(done, self._stop_token, drawn)
                done |= drawn == self._stop_token
            return i + 1, Context(memory, drawn, done), written.at[:, i].set(drawn)

        def goes_on(state: tuple[jax.Array, Context, jax.Array]) -> jax.Array:
            i, context, _ = state
            return (i < limit) & ~jnp.all(context.done)

        start = jnp.zeros((), jnp.int32), context, jnp.zeros((n_sample, count), jnp.int32)
        written, context, tokens = jax.lax.while_loop(goes_on, write, start)
        return context, tokens, written


_unrotate = jax.jit(cache_lib.unrotate)


@functools.partial(jax.jit, static_argnums=1)
def _repeat_rows(memory: KVCache, samples: int) -> KVCache:
    """Repeats the cache of one row for `samples` equal rows."""
    return jax.tree.map(lambda array: jnp.repeat(array, samples, axis=0) if array.ndim else array, memory)
