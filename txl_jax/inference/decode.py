"""Decoding: functions that prefill prompts and sample tokens, one token of R rows per step.

One prompt, n samples of a prompt, many prompts in parallel (`inference.generate`) and the server
(`serving.rows`) all run `decode_block`. The state between calls is the cache on the device. The
host keeps everything else and passes it as `BlockRows`, so in any call a row may read, sample
("draw") or do nothing:

    number  -2    -1     0     1     2       number of the token to draw, negative to draw nothing
    reads    a     b     c     x     y       a, b and c are the end of the prompt
    draws    -     -     x     y     z

- Token number i of a sample is sampled with a key that depends only on (seed, sample, i). A text
  therefore depends neither on the number of tokens per call nor on the other rows.
- Rows that read and end together share one index of the ring: a step writes one slice. In the
  server each row has its own index (position), so that its results do not depend on when it joined.
  An idle row keeps its position. It still computes, and overwrites its oldest slot: such a ring
  needs more than M slots (`serving.rows`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import GenerateConfig
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.cache import KVCache
from txl_jax.inference.prepare import DecodeParams
from txl_jax.ops import sampling as sampling_lib


class BlockRows(NamedTuple):
    """Arguments for each of R rows in one call of `decode_block`, from the host.

    In `inference.cache` and `ops.attention`, R is the number of slots of the ring instead.
    """

    # int32 [R, G], known tokens, the latest last. The ones before it are read while number < 0.
    known: Any
    # int32 [R], number of the token that the first step draws, at least -(G - 1).
    number: Any
    # int32 [R], steps of this call, or 0 if the row does nothing.
    steps: Any
    # uint32 [R, ..], the key data of each row's sample (`row_key`).
    key: Any
    # int32 [], the token that ends a row, or -1 if no token does.
    stop: Any
    # bool [R], whether to score the row's tokens, or None without `top`.
    scored: Any = None


class Sampling(NamedTuple):
    """Sampling settings: numbers for all rows, or arrays [R] with one number per row.

    Arrays do not support top-k.
    """

    temperature: Any
    top_p: Any
    top_k: int | None = None

    @staticmethod
    def of(config: GenerateConfig) -> "Sampling":
        """Returns the temperature, top-p and top-k of the generation settings."""
        return Sampling(config.temperature, config.top_p, config.top_k)

    def draw(self, keys: jax.Array, hidden: jax.Array, clusters: Any) -> jax.Array:
        """Samples one token per row: keys [R] and hidden states [R, D] -> int32 [R]."""
        # Numbers are static arguments of the compiled function. Only arrays are traced.
        is_same_for_all_rows = isinstance(self.temperature, int | float)
        if is_same_for_all_rows:
            return sampling_lib.sample(
                keys,
                hidden,
                clusters,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
            )
        return sampling_lib.sample_rows(
            keys, hidden, clusters, temperature=self.temperature, top_p=self.top_p
        )


class Scores(NamedTuple):
    """Scores of tokens, or zeros where scores were not requested."""

    nats: Any  # float [..], minus the logprob of each token.
    top_logprobs: Any  # float [.., top], of the most likely tokens in its place, largest first.
    top_tokens: Any  # int32 [.., top], the tokens that have these logprobs.


class _Progress(NamedTuple):
    """State that one step of `decode_block` passes to the next."""

    step: jax.Array  # int32 [], number of steps that have run.
    cache: KVCache
    newest: jax.Array  # int32 [R], what each row drew last, at first its last known token.
    remaining: jax.Array  # int32 [R], number of steps that each row still takes part in.
    tokens: jax.Array  # int32 [R, count], a column per step. Undefined for steps that only read.
    scores: Scores | None  # [R, count], scores of these tokens, or None without `top`.


def row_key(seed: int | np.uint32, sample: int = 0) -> np.ndarray:
    """Returns the key data, uint32 [..], of a sample of a prompt."""
    sample_key = jax.random.fold_in(jax.random.key(seed), sample)
    return np.asarray(jax.random.key_data(sample_key))


def decode_block(
    params: DecodeParams,
    cache: KVCache,
    rows: BlockRows,
    sampling: Sampling,
    *,
    count: int,
    top: int = 0,
) -> tuple[KVCache, jax.Array, jax.Array, Scores | None]:
    """Runs up to `count` steps, until every row has done its steps or sampled its stop token.

    Args:
      params: Parameters for segments of one token (`DecodeParams.for_single_tokens`).
      cache: Cache of R rows, with one index or an index per row. It is to be donated.
      rows: The tokens that each row reads and samples.
      sampling: Sampling settings.
      count: Maximum number of steps, and the number of columns of the results.
      top: Number of most likely tokens that are scored along with each sampled token. 0 disables
        all scores.

    Returns:
      The cache, the drawn tokens int32 [R, count], which are `rows.stop` where a row has ended, the
      number of steps that ran, and the scores [R, count], or None without `top`. Columns of steps
      in which a row only reads its prompt have no meaning. The host knows them by their number.
    """
    n_row, n_known = rows.known.shape
    sample_keys = jax.random.wrap_key_data(rows.key)

    def one_step(progress: _Progress) -> _Progress:
        is_active = progress.remaining > 0
        number = rows.number + progress.step

        # Every row reads one token: the next one of its prompt, or the one that it drew last.
        # To draw its token 0 it reads its prompt's last, with which `newest` begins.
        token = jnp.where(number < 0, _prompt_token(rows.known, number), progress.newest)
        hidden, cache = forward.forward(params, token[:, None], progress.cache)
        hidden = hidden[:, 0]
        # So that a TPU does not copy the cache at both ends of the loop.
        cache = cache_lib.keep_layout(cache)

        # The index is [R] or []. Rows with an index of their own continue in a later call, from
        # where they stopped. With a common index all rows belong to one generation, and one that
        # has ended is not read again.
        has_index_per_row = cache.write_index.ndim > 0
        if has_index_per_row:
            cache = _hold_idle_rows(before=progress.cache, after=cache, is_active=is_active)

        # A row whose number is negative still reads its prompt. All others draw a token. The key of
        # a draw that is dropped does not matter, but `fold_in` takes no negative number.
        is_drawing = is_active & (number >= 0)
        token_keys = jax.vmap(jax.random.fold_in)(sample_keys, jnp.maximum(number, 0))

        def draw() -> jax.Array:
            return sampling.draw(token_keys, hidden, params.clusters)

        def draw_nothing() -> jax.Array:
            return jnp.zeros(n_row, jnp.int32)

        if n_known == 1:
            # No row has more of its prompt to read, so every step draws.
            drawn = draw()
        else:
            drawn = jax.lax.cond(jnp.any(is_drawing), draw, draw_nothing)

        scores = progress.scores
        if top:
            any_scored = jnp.any(rows.scored & is_drawing)
            step_scores = score_if(any_scored, params, hidden, drawn, top=top)
            scores = jax.tree.map(
                lambda all_steps, this_step: all_steps.at[:, progress.step].set(this_step),
                scores,
                step_scores,
            )

        # A row that draws its stop token takes part in no further step.
        has_stopped = is_drawing & (drawn == rows.stop)
        remaining = jnp.where(has_stopped, 0, progress.remaining - is_active)

        # Rows that have ended before this step are filled with the stop token.
        column = jnp.where(is_active, drawn, rows.stop)
        return _Progress(
            step=progress.step + 1,
            cache=cache,
            newest=jnp.where(is_drawing, drawn, progress.newest),
            remaining=remaining,
            tokens=progress.tokens.at[:, progress.step].set(column),
            scores=scores,
        )

    def any_remaining(progress: _Progress) -> jax.Array:
        return jnp.any(progress.remaining > 0)

    scores = None
    if top:
        scores = _zero_scores(params, n_row, count, top=top)
    start = _Progress(
        step=jnp.zeros((), jnp.int32),
        cache=cache,
        newest=rows.known[:, -1],
        remaining=jnp.minimum(rows.steps, count),
        tokens=jnp.zeros((n_row, count), jnp.int32),
        scores=scores,
    )
    end = jax.lax.while_loop(any_remaining, one_step, start)
    return end.cache, end.tokens, end.step, end.scores


def _prompt_token(known: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the token int32 [R] of `known` [R, G] that is read to draw token `number` [R].

    For numbers above 0, which do not read a known token, it is the last one.
    """
    column = known.shape[1] - 1 + jnp.minimum(number, 0)
    return jnp.take_along_axis(known, column[:, None], axis=1)[:, 0]


def _hold_idle_rows(*, before: KVCache, after: KVCache, is_active: jax.Array) -> KVCache:
    """Returns the cache `after` a step, with rows that are not active at their place `before` it.

    What an idle row has written stays in its oldest slot, which its next step overwrites.
    """
    return after.replace(
        valid=jnp.where(is_active, after.valid, before.valid),
        write_index=jnp.where(is_active, after.write_index, before.write_index),
    )


def _zero_scores(params: DecodeParams, n_row: int, count: int, *, top: int) -> Scores:
    """Returns zeros of the shapes of `count` steps' scores, [R, count]."""
    config = params.model.config
    hidden = jax.ShapeDtypeStruct((n_row, config.d_model), config.dtype)
    targets = jax.ShapeDtypeStruct((n_row,), jnp.int32)
    step_shapes = jax.eval_shape(functools.partial(score, params, top=top), hidden, targets)
    return jax.tree.map(
        lambda leaf: jnp.zeros((n_row, count, *leaf.shape[1:]), leaf.dtype), step_shapes
    )


def prefill(params: DecodeParams, cache: KVCache, tokens: jax.Array) -> KVCache:
    """Reads a segment [R, L] of every row.

    The rows have one index, a multiple of L. The cache is to be donated.
    """
    _, cache = forward.forward(params, tokens, cache)
    return cache


def prefill_row(
    params: DecodeParams, cache: KVCache, row: jax.Array, tokens: jax.Array, count: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Reads the first `count` of tokens [W] in one row, whose index may be any.

    The cache is to be donated.

    The row is taken out of the rings, so nothing of the others is in its numbers. The tokens after
    the first `count` are padding, which leaves no trace.

    Returns:
      The cache, in which `valid` and `write_index` are as before (the host sets them), and hidden
      states [W, D].
    """
    row_cache = take_row(cache, row)
    write_index = row_cache.write_index[0]
    # With one index instead of an index per row, the segment may have more than one token.
    hidden, keys, values = forward.apply_layers(
        params, tokens[None], row_cache.replace(write_index=write_index)
    )

    slots = (write_index + jnp.arange(len(tokens), dtype=jnp.int32)) % cache.capacity
    row_of_token = jnp.full(len(tokens), row)
    cache = cache_lib.write_slots(
        cache, keys, values, row_of_token, slots, count=count, after=hidden
    )
    return cache, forward.finish(params, hidden)[0]


def take_row(cache: KVCache, row: jax.Array) -> KVCache:
    """Returns the cache of one row, [1, ..]. Each row has its own index."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, row, 1), cache)


def put_row(cache: KVCache, row: jax.Array, row_cache: KVCache) -> KVCache:
    """Returns the cache with the contents of one row replaced by `row_cache`, [1, ..].

    The cache is to be donated.
    """
    return jax.tree.map(
        lambda all_rows, new_row: jax.lax.dynamic_update_slice_in_dim(all_rows, new_row, row, 0),
        cache,
        row_cache,
    )


def score(params: DecodeParams, hidden: jax.Array, targets: jax.Array, *, top: int) -> Scores:
    """Computes the scores of targets [n] after hidden states [n, D]."""
    nats = forward.nll(params, hidden[:, None], targets[:, None])[:, 0]

    # A vocabulary of fewer than `top` tokens is padded with tokens of probability 0.
    n_top = min(top, params.model.vocab_size)
    logprobs, tokens = sampling_lib.top_k_tokens(hidden, params.clusters, n_top)
    padding = [(0, 0), (0, top - n_top)]
    return Scores(
        nats=nats,
        top_logprobs=jnp.pad(logprobs, padding, constant_values=-jnp.inf),
        top_tokens=jnp.pad(tokens, padding),
    )


def score_if(
    wanted: jax.Array, params: DecodeParams, hidden: jax.Array, targets: jax.Array, *, top: int
) -> Scores:
    """Computes `score` if it is wanted, and zeros otherwise."""
    compute = functools.partial(score, params, hidden, targets, top=top)
    shapes = jax.eval_shape(compute)

    def zeros() -> Scores:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    return jax.lax.cond(wanted, compute, zeros)
