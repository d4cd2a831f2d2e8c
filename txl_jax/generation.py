"""Writing text: the prompt goes through the memory in segments, then one token at a time.

Token number i of sample b is drawn with a key made of (seed, b, i) alone, so the text depends neither on
how many tokens are drawn per call nor on how many samples are written beside it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax import recurrence
from txl_jax.config import EvalConfig, GenerateConfig
from txl_jax.data.segments import Segments
from txl_jax.memory import Memory
from txl_jax.modules.transformer_xl import TransformerXL


class Context(NamedTuple):
    """What the next token is drawn from."""

    memory: Memory
    log_probabilities: jax.Array  # [B, V], of the next token


class Generator:
    """Compiled functions that read and write with one model at the evaluation lengths."""

    def __init__(self, model: TransformerXL, span: EvalConfig, config: GenerateConfig):
        self._model = model
        self._span = span
        self._config = config
        self._walk = jax.jit(self._walk_segments, donate_argnums=1)
        self._read = jax.jit(self._read_segment, donate_argnums=1)
        self._write = jax.jit(self._write_block, static_argnames="count", donate_argnums=1)

    def tokens(self, params: Any, prompt: np.ndarray, *, block: int = 16) -> Iterator[np.ndarray]:
        """Yields int32 [B, up to `block`] until `config.length` tokens of each sample are written.

        Args:
          prompt: int [T], at least one token.
          block: tokens per call; more is a little faster, fewer reach the reader sooner.

        Raises:
          ValueError: an empty prompt.
        """
        context = self.read(params, prompt)
        context = jax.tree.map(jnp.copy, _repeat_rows(context, self._config.samples))
        length = self._config.length
        for first in range(0, length, block):
            context, tokens = self._write(params, context, first, count=block)
            yield np.asarray(tokens)[:, : length - first]  # The last call draws a few too many, but compiles no more.

    def read(self, params: Any, prompt: np.ndarray) -> Context:
        """The context after a prompt [T], read in segments from an empty memory (one row)."""
        if len(prompt) == 0:
            raise ValueError("the prompt is empty; generation needs at least one token to go on from")
        memory = self._model.init_memory(batch_size=1, mem_len=self._span.mem_len)
        tokens = np.asarray(prompt, np.int32)[None, :]
        # Whole segments in one walk, all but the last token at the most; what is left is shorter, or one segment.
        n_whole = (len(prompt) - 1) // self._span.segment_len
        walked = n_whole * self._span.segment_len
        if n_whole:
            memory = self._walk(params, memory, tokens[:, :walked].reshape(n_whole, 1, -1))
        return self._read(params, memory, tokens[:, walked:])

    def _walk_segments(self, params: Any, memory: Memory, tokens: jax.Array) -> Memory:
        """Reads tokens [S, 1, L]; only the memory after them is of use."""

        def read(params: Any, memory: Memory, segment: Segments) -> tuple[Any, Memory, None]:
            _, memory = self._encode(params, memory, segment.inputs)
            return params, memory, None

        segments = Segments(tokens, tokens, jnp.ones(tokens.shape), jnp.zeros(tokens.shape[:2], bool))
        start = self._model.compat.memory_start
        return recurrence.scan_segments(read, params, memory, segments, start=start)[1]

    def _encode(self, params: Any, memory: Memory, tokens: jax.Array) -> tuple[jax.Array, Memory]:
        """Hidden states of tokens [B, L] at the evaluation lengths, and the memory after them."""
        return self._model.apply(
            {"params": params},
            tokens,
            memory,
            clamp_len=self._span.clamp_len,
            same_length=self._span.same_length,
            deterministic=True,
            method=self._model.encode,
        )

    def _read_segment(self, params: Any, memory: Memory, tokens: jax.Array) -> Context:
        """Reads tokens [B, L]; the log probabilities are those after the last."""
        hidden, memory = self._encode(params, memory, tokens)
        log_probabilities = self._model.apply({"params": params}, hidden[:, -1:], method=self._model.log_probabilities)
        return Context(memory, log_probabilities[:, 0])

    def _write_block(self, params: Any, context: Context, first: int, *, count: int) -> tuple[Context, jax.Array]:
        """Draws tokens `first` to `first + count - 1`: the context after them, and int32 [B, count]."""
        samples = jnp.arange(context.log_probabilities.shape[0])
        sample_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self._config.seed), samples)

        def write(context: Context, index: jax.Array) -> tuple[Context, jax.Array]:
            keys = jax.vmap(jax.random.fold_in, (0, None))(sample_keys, index)
            tokens_B = draw(keys, context.log_probabilities, self._config)
            return self._read_segment(params, context.memory, tokens_B[:, None]), tokens_B

        context, tokens = jax.lax.scan(write, context, first + jnp.arange(count))
        return context, tokens.T


def draw(keys: jax.Array, log_probabilities: jax.Array, config: GenerateConfig) -> jax.Array:
    """One token per row: keys [B] and log probabilities [B, V] -> int32 [B]."""
    if config.temperature == 0:
        return jnp.argmax(log_probabilities, axis=-1).astype(jnp.int32)
    logits = restrict(log_probabilities / config.temperature, top_k=config.top_k, top_p=config.top_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def restrict(logits: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    """Sets to -inf what may not be drawn: [B, V] -> [B, V].

    First all but the `top_k` largest (0: none). Of the distribution that is left, then all but its
    likeliest tokens that together reach `top_p`; the likeliest always stays. Ties at a border all stay.
    """
    if 0 < top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    if top_p < 1:
        sorted_logits = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probabilities = jax.nn.softmax(sorted_logits, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # What the likelier ones reach without it.
        smallest = jnp.min(jnp.where(before < top_p, sorted_logits, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    return logits


def _repeat_rows(context: Context, samples: int) -> Context:
    """The context of one row as that of `samples` equal rows."""
    memory = context.memory
    return Context(
        Memory(jnp.repeat(memory.hidden, samples, axis=1), jnp.repeat(memory.valid, samples)),
        jnp.repeat(context.log_probabilities, samples, axis=0),
    )
