"""The functions with which streaming evaluation scores a model.

The model is a Transformer-XL with a KV cache, or an RNN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import EvalConfig, MemoryStart
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.modules import AnyModel
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL


class Scorer(NamedTuple):
    """Functions to be jitted.

    Only these functions know the contents of the trees of weights and memories.
    """

    # Parameters to weights.
    prepare_params: Callable[[Any], Any]
    # Weights to the memory before the first segment.
    init_memory: Callable[[Any], Any]
    # Weights, memory, tokens [B, L] to hidden, memory.
    forward: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
    # Weights, hidden, targets to nats [B, L].
    nll: Callable[[Any, jax.Array, jax.Array], jax.Array]
    # Weights, memory, rows bool [B] to the memory with those rows emptied.
    reset: Callable[[Any, Any, jax.Array], Any]


def make_scorer(model: AnyModel, eval_config: EvalConfig) -> Scorer:
    """Returns the scorer of a model at the lengths of evaluation."""
    if isinstance(model, RecurrentModel):
        return _of_recurrent(model, eval_config)
    return _of_transformer(model, eval_config)


def memory_dtype(model: AnyModel, eval_config: EvalConfig) -> jnp.dtype:
    """Returns the type of stored keys and values."""
    return jnp.dtype(eval_config.cache_dtype or model.config.dtype)


def at_temperature(params: Any, hidden: jax.Array, temperature: float) -> tuple[Any, jax.Array]:
    """Returns parameters and hidden states with logits (h w + b) / T.

    This is for a full softmax, and T is `temperature`.
    """
    if temperature == 1:
        return params, hidden
    softmax = params["softmax"] | {"bias": params["softmax"]["bias"] / temperature}
    return params | {"softmax": softmax}, hidden / temperature


def _of_transformer(model: TransformerXL, eval_config: EvalConfig) -> Scorer:
    lengths: dict[str, Any] = {
        "segment_len": eval_config.segment_len,
        "mem_len": eval_config.mem_len,
    }
    start = model.config.compat.memory_start

    def nll(weights: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        if eval_config.temperature != 1:  # (h w + b) / T; there is one cluster.
            [cluster] = weights.clusters
            weights = weights.replace(
                clusters=(cluster._replace(bias=cluster.bias / eval_config.temperature),)
            )
            hidden = hidden / eval_config.temperature
        return forward.nll(weights, hidden, targets)

    return Scorer(
        prepare_params=functools.partial(
            prepare_params,
            model=model,
            window=model.config.compat.window(
                eval_config.mem_len, same_length=eval_config.same_length
            ),
            clamp_len=eval_config.clamp_len,
            weight_dtype=eval_config.weight_dtype,
            **lengths,
        ),
        init_memory=functools.partial(
            forward.init_cache,
            batch_size=eval_config.batch_size,
            dtype=memory_dtype(model, eval_config),
            **lengths,
        ),
        forward=lambda weights, memory, tokens: forward.forward(weights, tokens, memory),
        nll=nll,
        reset=lambda weights, memory, rows: cache_lib.reset_cache(
            memory, rows, weights.initial, start
        ),
    )


def _of_recurrent(model: RecurrentModel, eval_config: EvalConfig) -> Scorer:
    """Returns the scorer of an RNN. Nothing is prepared: the weights are the parameters."""

    def nll(params: Any, hidden: jax.Array, targets: jax.Array) -> Any:
        params, hidden = at_temperature(params, hidden, eval_config.temperature)
        return model.apply({"params": params}, hidden, targets, method=model.nll)

    return Scorer(
        prepare_params=lambda params: params,
        init_memory=lambda params: model.init_memory(
            batch_size=eval_config.batch_size, mem_len=eval_config.mem_len
        ),
        forward=lambda params, memory, tokens: model.apply({"params": params}, tokens, memory),
        nll=nll,
        reset=lambda params, memory, rows: memory_lib.reset(memory, rows, MemoryStart.MASKED),
    )
