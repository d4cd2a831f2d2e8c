"""What streaming evaluation asks of a model: to lay out its weights, to remember, to read on, to score, to forget."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import EvalConfig, MemoryStart
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.modules.language_model import LanguageModel
from txl_jax.modules.lstm import LSTM
from txl_jax.modules.transformer_xl import TransformerXL


class Scorer(NamedTuple):
    """Functions to be jitted; weights and memories are trees that only the reader's own functions look into."""

    prepare_params: Callable[[Any], Any]  # Parameters to weights.
    init_memory: Callable[[Any], Any]  # Weights to the memory before the first segment.
    read: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]  # Weights, memory, tokens [B, L] to hidden, memory.
    nll: Callable[[Any, jax.Array, jax.Array], jax.Array]  # Weights, hidden, targets to nats [B, L].
    reset: Callable[[Any, Any, jax.Array], Any]  # Weights, memory, rows bool [B] to the memory with those rows emptied.


def make_scorer(model: LanguageModel, span: EvalConfig) -> Scorer:
    """The reader of a model at the lengths of evaluation."""
    return _of_lstm(model, span) if isinstance(model, LSTM) else _of_transformer(model, span)


def memory_dtype(model: LanguageModel, span: EvalConfig) -> jnp.dtype:
    """Type of stored keys and values."""
    return jnp.dtype(span.cache_dtype or model.config.dtype)


def at_temperature(params: Any, hidden: jax.Array, temperature: float) -> tuple[Any, jax.Array]:
    """Parameters and hidden states whose logits are divided by `temperature`, where the softmax is full: (h w + b) / T."""
    if temperature == 1:
        return params, hidden
    softmax = params["softmax"] | {"bias": params["softmax"]["bias"] / temperature}
    return params | {"softmax": softmax}, hidden / temperature


def _of_transformer(model: TransformerXL, span: EvalConfig) -> Scorer:
    lengths = {"segment_len": span.segment_len, "mem_len": span.mem_len}

    def read(weights: Any, memory: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        window = model.compat.window(memory.mem_len, same_length=span.same_length)
        return forward.read(weights, model, tokens, memory, window=window)

    def nll(weights: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        if span.temperature != 1:  # (h w + b) / T; there is one cluster.
            [cluster] = weights.clusters
            weights = weights.replace(clusters=(cluster._replace(bias=cluster.bias / span.temperature),))
            hidden = hidden / span.temperature
        return forward.nll(weights, model, hidden, targets)

    def reset(weights: Any, memory: Any, rows: jax.Array) -> Any:
        return cache_lib.reset_cache(memory, rows, weights.start, model.compat.memory_start)

    return Scorer(
        prepare_params=functools.partial(forward.prepare_params, model=model, clamp_len=span.clamp_len, **lengths),
        init_memory=functools.partial(
            forward.init_memory,
            model=model,
            batch_size=span.batch_size,
            dtype=memory_dtype(model, span),
            **lengths,
        ),
        read=read,
        nll=nll,
        reset=reset,
    )


def _of_lstm(model: LSTM, span: EvalConfig) -> Scorer:
    """Nothing can be kept but the state: the weights are the parameters."""

    def read(params: Any, memory: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return model.apply({"params": params}, tokens, memory)

    def nll(params: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        params, hidden = at_temperature(params, hidden, span.temperature)
        return model.apply({"params": params}, hidden, targets, method=model.nll)

    return Scorer(
        prepare_params=lambda params: params,
        init_memory=lambda params: model.init_memory(batch_size=span.batch_size, mem_len=span.mem_len),
        read=read,
        nll=nll,
        reset=lambda params, memory, rows: memory_lib.reset(memory, rows, MemoryStart.MASKED),
    )
