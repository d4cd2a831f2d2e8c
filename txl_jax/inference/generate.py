"""Generation on the host, from prompts to pieces of text, with the functions of `inference.decode`.

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
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from txl_jax.config import EvalConfig, GenerateConfig
from txl_jax.data.vocabulary import Ending, TextStream
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import decode, forward
from txl_jax.inference.cache import KVCache
from txl_jax.inference.decode import BlockRows, Sampling, row_key
from txl_jax.inference.prepare import DecodeParams
from txl_jax.inference.scorer import memory_dtype
from txl_jax.runtime import distributed
from txl_jax.sharding.mesh import bind_mesh

BLOCK = 16  # Tokens per call. Larger blocks are a little faster, smaller ones are seen sooner.


class Prefilled(NamedTuple):
    """R rows whose prompts are in the cache, except for their last tokens."""

    # The cache for segments of one token.
    cache: KVCache
    # int32 [R, G], the last tokens of each prompt (`BlockRows.known`).
    known: np.ndarray
    # int32 [R], minus the number of tokens before the last that are not in the cache yet
    # (`BlockRows.number`).
    number: np.ndarray


class _DecodedBlock(NamedTuple):
    """Tokens of R rows from one call of `decode_block`."""

    # int32 [R, n], n up to `BLOCK`.
    tokens: np.ndarray
    # int32 [R, n], number of each token in its row. Numbers below 0 or from the length on are steps
    # without a token.
    numbers: np.ndarray


class Generator:
    """Compiled functions that generate text with prepared parameters, at the evaluation lengths."""

    def __init__(
        self,
        params: DecodeParams,
        eval_config: EvalConfig,
        *,
        mesh: Mesh | AbstractMesh | None = None,
    ):
        """Takes parameters as evaluation prepares them. Nothing is compiled yet.

        Args:
          params: Prepared parameters (`Scorer.prepare_params`).
          eval_config: The lengths of evaluation, and the dtype of the cache.
          mesh: The devices that the model is built for, or None for one device or the mesh that the
            caller enters.
        """
        # Whole segments of prompts are read with the first parameters and single tokens with the
        # second. In both, a query attends to at most M + 1 keys, itself included.
        self.for_segments = params.for_generation(mem_len=eval_config.mem_len)
        self.for_tokens = self.for_segments.for_single_tokens(mem_len=eval_config.mem_len)
        self._eval_config = eval_config

        def jit(function: Any, **options: Any) -> Any:
            return bind_mesh(mesh, jax.jit(function, **options))

        # The functions are the module's, not made here, so that jax compiles them once for all
        # generators of a model.
        self._empty = jit(_init_cache, static_argnums=(1, 2))
        self._prefill_segment = jit(decode.prefill, donate_argnums=1)
        # Both turn the ring of segments into a cache for single tokens: the first all of its rows,
        # the second only rows that are to be copied to such a cache.
        self._unrotate = jit(cache_lib.unrotate)
        self._take = jit(cache_lib.take_unrotated, donate_argnums=0)
        # Copies the cache of a prompt for each of its samples.
        self._repeat = jit(cache_lib.repeat_rows, static_argnums=1)
        self.decode = jit(
            decode.decode_block, static_argnames=("sampling", "count"), donate_argnums=1
        )

    def tokens(
        self,
        prompt: np.ndarray,
        config: GenerateConfig,
        *,
        stop_token: Ending = None,
        stop_requested: Callable[[], Any] = lambda: False,
    ) -> Iterator[np.ndarray]:
        """Yields the tokens of B samples of a prompt, int32 [B, up to `BLOCK`].

        It stops when `config.length` tokens of each sample are sampled, or all samples have ended.

        Args:
          prompt: Token ids [T], which are read once for all samples.
          config: Length, number of samples, seed, temperature, top-p and top-k.
          stop_token: The token that ends a sample and then fills its rest. If it is None or a
            string, a sample ends only at `config.length`.
          stop_requested: Called between segments of the prompt and between blocks. Once it returns
            true, no more tokens are yielded.

        Raises:
          UserError: If the prompt is empty.
        """
        if len(prompt) == 0:
            raise UserError("the prompt must have at least one token, got an empty one")
        prefilled = self.read(prompt, config, stop_requested=stop_requested)
        keys = [row_key(config.seed, sample) for sample in range(config.samples)]
        ended = np.zeros(config.samples, bool)
        if stop_requested():
            return
        for block in self._blocks(prefilled, keys, config, ended, stop_token):
            if isinstance(stop_token, int):
                # Changed in place: `_blocks` reads this array again before its next block.
                ended |= (block.tokens == stop_token).any(axis=1)
            yield block.tokens
            if stop_requested():
                return

    def read(
        self,
        prompt: np.ndarray,
        config: GenerateConfig,
        *,
        stop_requested: Callable[[], Any] = lambda: False,
    ) -> Prefilled:
        """Reads a prompt [T], except for its last token, once for all samples."""
        cache, known, number = self.prefill([prompt], 1, stop_requested=stop_requested)

        # The tokens after the last whole segment are read one by one, and none is drawn yet. There
        # are -number of them, without the prompt's last, so after as many steps the next number
        # would be 0: the first token to draw. The key is not used.
        if number[0] < 0:
            rows = BlockRows(
                known=known,
                number=number,
                steps=-number,
                key=row_key(0)[None],
                stop=np.int32(-1),
            )
            cache, *_ = self.decode(
                self.for_tokens, cache, rows, Sampling.of(config), count=known.shape[1]
            )

        if config.samples > 1:
            cache = self._repeat(cache, config.samples)
        # Only the prompt's last token is not in the cache now. All samples begin with it.
        return Prefilled(
            cache=cache,
            known=np.full((config.samples, 1), prompt[-1], np.int32),
            number=np.zeros(config.samples, np.int32),
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

        Each text is the same as if its prompt were the only one. It includes its `ending`, but not
        the stop string.

        Args:
          prompts: Token ids [T] of each prompt, at least one token each.
          config: Length, temperature, top-p and top-k.
          draws: Seed and sample number of each prompt.
          decode: Returns the bytes of token ids.
          ending: Further conditions that end a text, besides the stop strings and its length.
          batch_size: Maximum number of prompts that are continued side by side.
          stop_strings: Strings that end a text, whatever their tokens are.
        """
        # Prompts of similar lengths share a batch, so that short ones do not wait for long ones.
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        for first in range(0, len(by_length), batch_size):
            group = by_length[first : first + batch_size]

            # The rows are a power of two, so that few numbers of rows are compiled.
            n_row = min(1 << (len(group) - 1).bit_length(), batch_size)
            keys = [row_key(0)] * n_row
            for row, number in enumerate(group):
                seed, sample = draws[number]
                keys[row] = row_key(seed, sample)
            prefilled = self.prefill([prompts[number] for number in group], n_row)

            # Rows without a prompt have ended before they begin. `_blocks` reads this array again
            # before each block.
            ended = np.arange(n_row) >= len(group)
            streams = [TextStream(decode, stop_strings, ending) for _ in group]
            for block in self._blocks(prefilled, keys, config, ended, ending):
                for row, number in enumerate(group):
                    if ended[row]:
                        continue
                    text, ended[row] = _add_to_stream(streams[row], block, row, config.length)
                    if text:
                        yield number, text

    def prefill(
        self,
        prompts: Sequence[np.ndarray],
        rows: int,
        *,
        stop_requested: Callable[[], Any] = lambda: False,
    ) -> Prefilled:
        """Prefills the whole segments of prompts [T] in the first of R = `rows` rows.

        Each prompt has at least one token. Its last token is never prefilled, because the first
        step of decoding reads it.
        """
        segment_len = self._eval_config.segment_len
        n_before_last = [len(prompt) - 1 for prompt in prompts]
        n_before_last += [0] * (rows - len(prompts))
        n_segments, n_rest = np.divmod(n_before_last, segment_len)

        # Each prompt is cut into whole segments, if it is long enough, and the known tokens: the
        # remaining 1 to L tokens, with its last token, which is never part of a segment. They are
        # aligned on the right.
        segments = np.zeros((n_segments.max(), rows, segment_len), np.int32)
        known = np.zeros((rows, segment_len), np.int32)
        for row, prompt in enumerate(prompts):
            cut = n_segments[row] * segment_len
            segments[: n_segments[row], row] = np.reshape(prompt[:cut], (-1, segment_len))
            known[row, segment_len - (len(prompt) - cut) :] = prompt[cut:]

        # The ring of segments is read for all rows at once. A row whose last segment was read is
        # copied to the cache of single tokens, before padding is read into it.
        ring = self._empty(self.for_segments, rows, self._eval_config)
        # Empty, too. `_take` replaces its rows.
        cache = self._unrotate(ring)
        for n_read, tokens in enumerate(segments, start=1):
            if stop_requested():
                break
            ring = self._prefill_segment(self.for_segments, ring, tokens)
            is_complete = n_segments == n_read
            if np.any(is_complete):
                cache = self._take(cache, ring, is_complete)
        return Prefilled(cache, known, -n_rest.astype(np.int32))

    def _blocks(
        self,
        prefilled: Prefilled,
        keys: Sequence[np.ndarray],
        config: GenerateConfig,
        ended: np.ndarray,
        stop_token: Ending,
    ) -> Iterator[_DecodedBlock]:
        """Yields blocks of tokens until every row has `config.length` tokens or has ended.

        Args:
          prefilled: The rows before their first token. Its cache is donated.
          keys: Key data of each row's sample (`row_key`).
          config: Length, temperature, top-p and top-k.
          ended: bool [R], rows that need no further tokens. The caller sets more of them between
            two blocks: the array is read again before each block.
          stop_token: A token that ends a row within a block. Other endings are the caller's to
            find.
        """
        cache, known, number = prefilled
        sample_keys = np.stack(keys)
        stop = np.int32(-1)
        if isinstance(stop_token, int):
            stop = np.int32(stop_token)
        while True:
            steps = np.where(ended, 0, np.clip(config.length - number, 0, BLOCK))
            if not np.any(steps):
                return
            rows = BlockRows(known, number, steps.astype(np.int32), sample_keys, stop)
            cache, tokens, n_step, _ = self.decode(
                self.for_tokens, cache, rows, Sampling.of(config), count=BLOCK
            )
            # Fewer steps ran if all rows have ended.
            tokens = distributed.to_host(tokens)[:, : int(distributed.to_host(n_step))]
            yield _DecodedBlock(tokens, number[:, None] + np.arange(tokens.shape[1]))

            # From here on `number` belongs to the next token: above 0, the row has drawn one.
            number = number + np.int32(tokens.shape[1])
            # The latest known token is the one that a row drew last, or else its prompt's last. The
            # columns before it stay, for rows that have not read all of their prompt.
            newest = np.where(number > 0, tokens[:, -1], known[:, -1])
            known = np.concatenate([known[:, :-1], newest[:, None]], axis=1)


def _add_to_stream(
    stream: TextStream, block: _DecodedBlock, row: int, length: int
) -> tuple[str, bool]:
    """Adds a row's tokens to its text of up to `length` tokens.

    Returns:
      The piece of text that they complete, perhaps empty, and whether the text has ended.
    """
    numbers = block.numbers[row]
    is_token = (numbers >= 0) & (numbers < length)
    text = stream.add(block.tokens[row][is_token])

    has_last_token = bool(np.any(numbers[is_token] == length - 1))
    if has_last_token:
        text += stream.finish()
    return text, has_last_token or stream.ended


def _init_cache(params: DecodeParams, rows: int, eval_config: EvalConfig) -> KVCache:
    return forward.init_cache(
        params,
        batch_size=rows,
        mem_len=eval_config.mem_len,
        segment_len=eval_config.segment_len,
        dtype=memory_dtype(params.model, eval_config),
    )
