"""The functions with which streaming evaluation scores a model.

The model is a Transformer-XL with a KV cache, or an RNN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from txl_jax import memory as memory_lib
from txl_jax.config import EvalConfig
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.modules import AnyModel
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL


class Scorer(NamedTuple):
    """Functions to be jitted.

    Only these functions know the contents of the trees of prepared parameters and memories.
    """

    # Parameters -> prepared parameters.
    prepare_params: Callable[[Any], Any]
    # Prepared parameters -> the memory before the first segment.
    init_memory: Callable[[Any], Any]
    # Prepared parameters, memory and tokens int [B, L] -> hidden states [B, L, D] and the memory
    # after the segment.
    forward: Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
    # Prepared parameters, hidden states [B, L, D] and targets int [B, L] -> nats [B, L].
    nll: Callable[[Any, jax.Array, jax.Array], jax.Array]
    # Prepared parameters, memory and rows bool [B] -> the memory with the marked rows emptied.
    reset: Callable[[Any, Any, jax.Array], Any]


def make_scorer(model: AnyModel, eval_config: EvalConfig) -> Scorer:
    """Returns the scorer of a model at the lengths of evaluation."""
    if isinstance(model, RecurrentModel):
        return _of_recurrent(model, eval_config)
    return _of_transformer(model, eval_config)


def memory_dtype(model: AnyModel, eval_config: EvalConfig) -> jnp.dtype:
    """Returns the dtype of stored keys and values."""
    return jnp.dtype(eval_config.cache_dtype or model.config.dtype)


def at_temperature(params: Any, hidden: jax.Array, temperature: float) -> tuple[Any, jax.Array]:
    """Returns parameters and hidden states whose logits h w + b are divided by `temperature`.

    This is for a full softmax.
    """
    if temperature == 1:
        return params, hidden
    softmax = params["softmax"] | {"bias": params["softmax"]["bias"] / temperature}
    return params | {"softmax": softmax}, hidden / temperature


def _of_transformer(model: TransformerXL, eval_config: EvalConfig) -> Scorer:
    compat = model.config.compat

    def forward_segment(prepared: Any, memory: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return forward.forward(prepared, tokens, memory)

    def nll(prepared: Any, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        # As in `at_temperature`. With a temperature there is one cluster.
        if eval_config.temperature != 1:
            [cluster] = prepared.clusters
            cluster = cluster._replace(bias=cluster.bias / eval_config.temperature)
            prepared = prepared.replace(clusters=(cluster,))
            hidden = hidden / eval_config.temperature
        return forward.nll(prepared, hidden, targets)

    def reset(prepared: Any, memory: Any, rows: jax.Array) -> Any:
        return cache_lib.reset_cache(memory, rows, prepared.initial, compat.memory_start)

    return Scorer(
        prepare_params=functools.partial(
            prepare_params,
            model=model,
            window=compat.window(eval_config.mem_len, same_length=eval_config.same_length),
            segment_len=eval_config.segment_len,
            mem_len=eval_config.mem_len,
            clamp_len=eval_config.clamp_len,
            weight_dtype=eval_config.weight_dtype,
        ),
        init_memory=functools.partial(
            forward.init_cache,
            batch_size=eval_config.batch_size,
            mem_len=eval_config.mem_len,
            segment_len=eval_config.segment_len,
            dtype=memory_dtype(model, eval_config),
        ),
        forward=forward_segment,
        nll=nll,
        reset=reset,
    )


def _of_recurrent(model: RecurrentModel, eval_config: EvalConfig) -> Scorer:
    """Returns the scorer of an RNN. Nothing is prepared: its parameters are used as they are."""

    def init_memory(params: Any) -> Any:
        return model.init_memory(batch_size=eval_config.batch_size, mem_len=eval_config.mem_len)

    def forward_segment(params: Any, memory: Any, tokens: jax.Array) -> Any:
        return model.apply({"params": params}, tokens, memory)

    def nll(params: Any, hidden: jax.Array, targets: jax.Array) -> Any:
        params, hidden = at_temperature(params, hidden, eval_config.temperature)
        return model.apply({"params": params}, hidden, targets, method=model.nll)

    def reset(params: Any, memory: Any, rows: jax.Array) -> Any:
        return memory_lib.reset(memory, rows)

    return Scorer(
        prepare_params=lambda params: params,
        init_memory=init_memory,
        forward=forward_segment,
        nll=nll,
        reset=reset,
    )
