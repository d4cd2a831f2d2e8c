"""Generation on the host: prompts in, pieces of text out, over the programs of `inference.decode`.

Whole segments of the prompts are prefilled in parallel, from an empty cache. The rest of each
prompt, less than a segment, is read token by token. No row reads padding into its cache: when the
last segment of a row is read, its cache is copied to the caches of single tokens before other rows'
segments continue. With L = 3 and prompts of 5 (a) and 8 (b) tokens, x marks drawn tokens:

    row 0:   a a a |       | a a x x x ..
    row 1:   b b b | b b b | b b x x x ..

Every query sees the keys at the distances 0 to M (with `same_length` to M - 1), so a text does not
depend on how its prompt was cut. A step overwrites the oldest slot of the ring and moves nothing,
so time and memory per token stay the same however long the text becomes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from txl_jax.config import EvalConfig, GenerateConfig
from txl_jax.data.vocabulary import Ending, TextStream
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import decode, forward
from txl_jax.inference.cache import KVCache
from txl_jax.inference.decode import Limits, Rows, row_key
from txl_jax.inference.prepare import DecodeParams
from txl_jax.inference.scorer import memory_dtype
from txl_jax.runtime import distributed
from txl_jax.sharding.mesh import bind_mesh

# Rows whose prompts are read, but for the last tokens: the cache, and `given` [R, G] and `number`
# [R] of `decode.Rows`.
Started = tuple[KVCache, np.ndarray, np.ndarray]
BLOCK = 16  # Tokens per call. Larger blocks are a little faster, smaller ones are seen sooner.


class Generator:
    """Compiled functions that generate text with prepared parameters, at the evaluation lengths."""

    def __init__(
        self,
        params: DecodeParams,
        eval_config: EvalConfig,
        *,
        mesh: Mesh | AbstractMesh | None = None,
    ):
        """Takes parameters as evaluation prepares them (`Scorer.prepare_params`).

        Nothing is compiled yet.

        `mesh` has the devices that the model is built for. None means one device, or the mesh that
        the caller enters.
        """
        self.for_segments = params.for_generation(mem_len=eval_config.mem_len)
        self.for_tokens = self.for_segments.for_single_tokens(mem_len=eval_config.mem_len)
        self._eval_config = eval_config

        def jit(function: Any, **options: Any) -> Any:
            return bind_mesh(mesh, jax.jit(function, **options))

        # Functions of the module, which jax compiles once for all generators of a model.
        self._empty = jit(_init_cache, static_argnums=(1, 2))
        self._read = jit(decode.prefill, donate_argnums=1)
        self._unrotate = jit(cache_lib.unrotate)
        self._take = jit(cache_lib.take_unrotated, donate_argnums=0)
        self._repeat = jit(cache_lib.repeat_rows, static_argnums=1)
        self.decode = jit(
            decode.decode_block, static_argnames=("limits", "count"), donate_argnums=1
        )

    def tokens(
        self,
        prompt: np.ndarray,
        config: GenerateConfig,
        *,
        stop_token: Ending = None,
        stop_requested: Callable[[], Any] = lambda: False,
    ) -> Iterator[np.ndarray]:
        """Yields the tokens of B samples, int32 [B, up to `BLOCK`].

        It stops when `config.length` tokens of each sample are sampled, or all samples have ended.

        The prompt [T] is read once for all samples. A sample ends with `stop_token`, which then
        fills its rest, or only at `config.length` if that is None or a string. Once
        `stop_requested`, asked between segments of the prompt and between blocks, is true nothing
        more comes. Raises `UserError` if the prompt is empty.
        """
        if len(prompt) == 0:
            raise UserError("the prompt must have at least one token, got an empty one")
        started = self.read(prompt, config, stop_requested=stop_requested)
        keys = [row_key(config.seed, sample) for sample in range(config.samples)]
        ended = np.zeros(config.samples, bool)
        if stop_requested():
            return
        for tokens, _ in self._blocks(started, keys, config, ended, stop_token):
            if isinstance(stop_token, int):
                ended |= (tokens == stop_token).any(axis=1)
            yield tokens
            if stop_requested():
                return

    def read(
        self,
        prompt: np.ndarray,
        config: GenerateConfig,
        *,
        stop_requested: Callable[[], Any] = lambda: False,
    ) -> Started:
        """Reads a prompt [T], but for its last token, once for all samples."""
        cache, given, number = self.prefill([prompt], 1, stop_requested=stop_requested)
        if number[0] < 0:
            rows = Rows(given, number, -number, row_key(0)[None], np.int32(-1))
            cache, *_ = self.decode(
                self.for_tokens, cache, rows, Limits.of(config), count=given.shape[1]
            )
        if config.samples > 1:
            cache = self._repeat(cache, config.samples)
        return (
            cache,
            np.full((config.samples, 1), prompt[-1], np.int32),
            np.zeros(config.samples, np.int32),
        )

    def pieces(
        self,
        prompts: Sequence[np.ndarray],
        config: GenerateConfig,
        *,
        draws: Sequence[tuple[int, int]],
        decode: Callable[[Any], bytes],
        ending: Ending,
        batch_size: int,
        stop_strings: Sequence[str] = (),
    ) -> Iterator[tuple[int, str]]:
        """Yields the texts after all prompts in pieces, each with its prompt's number.

        Each text is as by itself.

        A prompt [T] has at least one token and, in `draws`, a seed and a sample's number. `decode`
        returns the bytes of ids. A text includes its `ending`, but not the stop string. At most
        `batch_size` are continued side by side.
        """
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for first in range(0, len(order), batch_size):
            group = order[first : first + batch_size]
            # A program for each power of two.
            rows = min(1 << (len(group) - 1).bit_length(), batch_size)
            keys = [row_key(*draws[number]) for number in group] + [row_key(0)] * (
                rows - len(group)
            )
            started = self.prefill([prompts[number] for number in group], rows)
            streams = [TextStream(decode, stop_strings, ending) for _ in group]
            ended = np.arange(rows) >= len(group)
            for tokens, numbers in self._blocks(started, keys, config, ended, ending):
                for row, number in enumerate(group):
                    if ended[row]:
                        continue
                    own = (numbers[row] >= 0) & (numbers[row] < config.length)
                    is_last, stream = (
                        bool(np.any(numbers[row][own] == config.length - 1)),
                        streams[row],
                    )
                    text = stream.add(tokens[row][own]) + (stream.finish() if is_last else "")
                    ended[row] = is_last or stream.ended
                    if text:
                        yield number, text

    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        rows: int,
        *,
        stop_requested: Callable[[], Any] = lambda: False,
    ) -> Started:
        """Prefills the whole segments of prompts [T] in the first of R = `rows` rows.

        Each prompt has at least one token.
        """
        segment_len = self._eval_config.segment_len
        known = [len(prompt) - 1 for prompt in prompts] + [0] * (rows - len(prompts))
        n_whole, n_rest = np.divmod(known, segment_len)
        segments = np.zeros((n_whole.max(), rows, segment_len), np.int32)
        given = np.zeros((rows, segment_len), np.int32)
        for row, prompt in enumerate(prompts):
            end = n_whole[row] * segment_len
            segments[: n_whole[row], row] = np.reshape(prompt[:end], (-1, segment_len))
            given[row, segment_len - (len(prompt) - end) :] = prompt[end:]
        memory = self._empty(self.for_segments, rows, self._eval_config)
        ready = self._unrotate(memory)
        for number, tokens in enumerate(segments, start=1):
            if stop_requested():
                break
            memory = self._read(self.for_segments, memory, tokens)
            if np.any(ends := n_whole == number):
                ready = self._take(ready, memory, ends)
        return ready, given, -n_rest.astype(np.int32)

    def _blocks(
        self,
        started: Started,
        keys: Sequence[np.ndarray],
        config: GenerateConfig,
        ended: np.ndarray,
        stop_token: Ending,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields tokens int32 [R, up to `BLOCK`], and their numbers.

        It stops when every row has `config.length` tokens or has ended.

        Numbers below 0 or from the length on count steps without a token. `ended`, bool [R], is
        read before each call:
        nothing more is wanted of those rows.
        """
        cache, given, number = started
        of_keys, stop = np.stack(keys), np.int32(stop_token if isinstance(stop_token, int) else -1)
        while np.any(steps := np.where(ended, 0, np.clip(config.length - number, 0, BLOCK))):
            rows = Rows(given, number, steps.astype(np.int32), of_keys, stop)
            cache, tokens, done, _ = self.decode(
                self.for_tokens, cache, rows, Limits.of(config), count=BLOCK
            )
            tokens = distributed.to_host(tokens)[:, : int(distributed.to_host(done))]
            yield tokens, number[:, None] + np.arange(tokens.shape[1])
            number = number + np.int32(tokens.shape[1])
            newest = np.where(number > 0, tokens[:, -1], given[:, -1])
            given = np.concatenate([given[:, :-1], newest[:, None]], axis=1)


def _init_cache(params: DecodeParams, rows: int, c: EvalConfig) -> KVCache:
    lengths = {"mem_len": c.mem_len, "segment_len": c.segment_len}
    return forward.init_cache(
        params, batch_size=rows, dtype=memory_dtype(params.model, c), **lengths
    )
