"""Decoding: the programs that read prompts and draw tokens, one token of R rows per step.

One prompt, n samples of a prompt, many prompts side by side (`inference.generate`) and the server
(`serving.rows`) all run `decode_block`. State between calls is the cache on the device. The host
keeps everything else and passes it as `Rows`, so a row may read, draw or do nothing in any call:

    number  -2    -1     0     1     2       number of the token to sample, below 0: none
    reads    a     b     c     x     y       a, b, c: the end of the prompt
    draws    -     -     x     y     z

- Token number i of a sample is sampled with a key made only of (seed, sample, i). So a text depends
  neither on the number of tokens per call nor on the other rows.
- Rows that read and end together share one index of the ring: a step writes one slice. In the
  server each row has its own index, that is its own position, so that what it computes does not
  depend on when it joined. A row that does nothing stays where it is. It computes all the same, and
  overwrites its oldest slot: the ring needs M + 1 slots.
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
from txl_jax.ops import sampling


class Rows(NamedTuple):
    """Arguments of one call for R rows, made by the host."""

    # int32 [R, G], tokens that are known, the latest last. Those before it are read while number <
    # 0.
    given: Any
    # int32 [R], of the token that the first step draws, at least -(G - 1).
    number: Any
    # int32 [R], steps of this call; 0 if the row does nothing.
    steps: Any
    # uint32 [R, ..], `row_key`.
    key: Any
    # int32 [], the token that ends a row, or -1.
    stop: Any
    # bool [R], whether scores are wanted; None without `top`.
    scored: Any = None


class Limits(NamedTuple):
    """Limits of sampling: numbers for all rows, or arrays [R] with one number per row.

    Arrays do not support top-k.
    """

    temperature: Any
    top_p: Any
    top_k: int | None = None

    @staticmethod
    def of(config: GenerateConfig) -> "Limits":
        """Returns the limits in the settings of generation."""
        return Limits(config.temperature, config.top_p, config.top_k)

    def draw(self, keys: jax.Array, hidden: jax.Array, clusters: Any) -> jax.Array:
        """Samples one token per row: keys [R] and hidden states [R, D] -> int32 [R]."""
        if isinstance(self.temperature, int | float):
            return sampling.sample(keys, hidden, clusters, **self._asdict())
        return sampling.sample_rows(
            keys, hidden, clusters, temperature=self.temperature, top_p=self.top_p
        )


class Scores(NamedTuple):
    """Scores of tokens, or zeros where scores were not requested."""

    nats: Any  # float [..], of each token: minus its logprob.
    top_logprobs: Any  # float [.., top], of the most likely tokens in its place, the largest first.
    top_tokens: Any  # int32 [.., top]


def row_key(seed: int | np.uint32, sample: int = 0) -> np.ndarray:
    """Returns the key data, uint32 [..], of a sample of a prompt."""
    return np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), sample)))


def decode_block(
    params: DecodeParams, cache: KVCache, rows: Rows, limits: Limits, *, count: int, top: int = 0
) -> tuple[KVCache, jax.Array, jax.Array, Scores | None]:
    """Runs up to `count` steps, until every row has done its steps or has drawn its stop token.

    The parameters are for single tokens. The cache of R rows, with one index or an index per row,
    is to be donated. With `top` the drawn tokens and so many most likely ones are scored. Returns
    the cache, the drawn tokens int32 [R, count], which are `rows.stop` where a row has ended, the
    number of steps that ran, and the scores [R, count].
    """
    n_row, n_given = rows.given.shape
    keys = jax.random.wrap_key_data(rows.key)
    states = jax.ShapeDtypeStruct((n_row, params.model.config.d_model), params.model.config.dtype)

    def step(state: Any) -> Any:
        i, cache, newest, left, tokens, scores = state
        active, number = left > 0, rows.number + i
        earlier = jnp.take_along_axis(
            rows.given, (n_given - 1 + jnp.minimum(number, 0))[:, None], axis=1
        )[:, 0]
        hidden, after = forward.forward(
            params, jnp.where(number < 0, earlier, newest)[:, None], cache
        )
        hidden = hidden[:, 0]
        if cache.write_index.ndim:
            after = after.replace(
                valid=jnp.where(active, after.valid, cache.valid),
                write_index=jnp.where(active, after.write_index, cache.write_index),
            )
        draws = active & (number >= 0)
        token_keys = jax.vmap(jax.random.fold_in)(keys, jnp.maximum(number, 0))

        def draw() -> jax.Array:
            return limits.draw(token_keys, hidden, params.clusters)

        # Without tokens to read every step draws.
        drawn = (
            draw()
            if n_given == 1
            else jax.lax.cond(jnp.any(draws), draw, lambda: jnp.zeros(n_row, jnp.int32))
        )
        if top:
            found = score_if(jnp.any(rows.scored & draws), params, hidden, drawn, top=top)
            scores = jax.tree.map(lambda all_, one: all_.at[:, i].set(one), scores, found)
        newest = jnp.where(draws, drawn, newest)
        left = jnp.where(draws & (drawn == rows.stop), 0, left - active)
        return (
            i + 1,
            after,
            newest,
            left,
            tokens.at[:, i].set(jnp.where(active, drawn, rows.stop)),
            scores,
        )

    shapes = (
        jax.eval_shape(lambda *of: score(params, *of, top=top), states, rows.number)
        if top
        else None
    )
    scores = jax.tree.map(lambda of: jnp.zeros((n_row, count, *of.shape[1:]), of.dtype), shapes)
    tokens = jnp.zeros((n_row, count), jnp.int32)
    start = (
        jnp.zeros((), jnp.int32),
        cache,
        rows.given[:, -1],
        jnp.minimum(rows.steps, count),
        tokens,
        scores,
    )
    steps, cache, _, _, tokens, scores = jax.lax.while_loop(
        lambda state: jnp.any(state[3] > 0), step, start
    )
    return cache, tokens, steps, scores


def prefill(params: DecodeParams, cache: KVCache, tokens: jax.Array) -> KVCache:
    """Reads a segment [R, L] of every row.

    The rows have one index, a multiple of L. The cache is to be donated.
    """
    return forward.forward(params, tokens, cache)[1]


def prefill_row(
    params: DecodeParams, cache: KVCache, row: jax.Array, tokens: jax.Array, count: jax.Array
) -> tuple[KVCache, jax.Array]:
    """Reads the first `count` of tokens [W] in one row, whose index may be any.

    The cache is to be donated.

    The row is taken out of the rings, so nothing of the others is in its numbers. The tokens after
    the first `count` are padding, which leaves no trace. Returns the cache, in which `valid` and
    `write_index` are as before (the host sets them), and hidden states [W, D].
    """
    own = take_row(cache, row)
    first = own.write_index[0]
    hidden, keys, values = forward.apply_layers(
        params, tokens[None], own.replace(write_index=first)
    )
    slots = (first + jnp.arange(len(tokens), dtype=jnp.int32)) % cache.capacity
    where = jnp.full(len(tokens), row), slots
    cache = cache_lib.write_slots(cache, keys, values, *where, count=count, after=hidden)
    return cache, forward.finish(params, hidden)[0]


def take_row(cache: KVCache, row: jax.Array) -> KVCache:
    """Returns the cache of one row, [1, ..]. Each row has its own index."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, row, 1), cache)


def put_row(cache: KVCache, row: jax.Array, own: KVCache) -> KVCache:
    """Returns the cache with the contents of one row replaced by `own`, [1, ..].

    The cache is to be donated.
    """
    return jax.tree.map(
        lambda all_, one: jax.lax.dynamic_update_slice_in_dim(all_, one, row, 0), cache, own
    )


def score(params: DecodeParams, hidden: jax.Array, targets: jax.Array, *, top: int) -> Scores:
    """Computes the scores of targets [n] after hidden states [n, D]."""
    nats = forward.nll(params, hidden[:, None], targets[:, None])[:, 0]
    found = min(top, params.model.vocab_size)
    logprobs, tokens = sampling.top_k_tokens(hidden, params.clusters, found)
    pad = [(0, 0), (0, top - found)]
    return Scores(nats, jnp.pad(logprobs, pad, constant_values=-jnp.inf), jnp.pad(tokens, pad))


def score_if(
    wanted: jax.Array, params: DecodeParams, hidden: jax.Array, targets: jax.Array, *, top: int
) -> Scores:
    """Computes `score` if it is wanted, and zeros otherwise."""
    compute = functools.partial(score, params, hidden, targets, top=top)
    shapes = jax.eval_shape(compute)
    return jax.lax.cond(
        wanted, compute, lambda: jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes)
    )
