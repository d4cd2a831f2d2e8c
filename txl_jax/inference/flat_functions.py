"""Scoring and a generation step as functions of named arrays, for `jax.export` (StableHLO) and programs without Flax.

    score(weights, memory, tokens, targets, reset) -> (nats, memory)
    generate(weights, memory, token, key, temperature, reset) -> (token, logprobs, memory)

Weights and memory are dictionaries, {"layers.0.output": array}, since trees of classes of this project cannot be
deserialized without it. A memory begins as zeros with `reset` set in every row.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import EvalConfig
from txl_jax.inference import forward
from txl_jax.inference.scorer import make_scorer
from txl_jax.modules.language_model import LanguageModel
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops import adaptive_softmax

Arrays = dict[str, Any]  # By name; arrays, or their shapes and types.

KEY_IMPL = "threefry2x32"  # Of random keys, whatever jax's default is where the function runs.


class FlatFunction(NamedTuple):
    """A function of named arrays.

    Attributes:
      call: takes weights, memory and the arguments in their order; returns the results in theirs, then the memory.
      arguments: shape and type of each argument after weights and memory.
      results: names of the results before the memory.
    """

    call: Callable[..., Any]
    arguments: Arrays
    results: tuple[str, ...]


class FlatModel(NamedTuple):
    """The functions of a model, its weights, and the shapes and types of its memory."""

    weights: Arrays
    memory: Arrays
    functions: dict[str, FlatFunction]


def flat_model(model: LanguageModel, eval_config: EvalConfig, weights: Any, *, generates: bool) -> FlatModel:
    """Makes the functions of B = `eval_config.batch_size` rows and segments of L = `eval_config.segment_len` tokens.

    Args:
      model: on one device.
      eval_config: the lengths.
      weights: prepared parameters on the host (`Scorer.prepare_params`).
      generates: whether the model generates token by token, so that there is a generation step.
    """
    scorer = make_scorer(model, eval_config)
    named, nest_weights = _flatten_once(weights)
    memory = jax.eval_shape(scorer.init_memory, weights)
    names, structure = _names(memory), jax.tree.structure(memory)

    def nest(named_weights: Arrays, named_memory: Arrays, reset: jax.Array) -> tuple[Any, Any]:
        nested = nest_weights(named_weights)
        memory = jax.tree.unflatten(structure, [named_memory[name] for name in names])
        return nested, scorer.reset(nested, memory, reset)

    def flatten(nested: Any) -> Arrays:
        return dict(zip(names, jax.tree.leaves(nested), strict=True))

    def score(weights: Arrays, memory: Arrays, tokens: Any, targets: Any, reset: Any) -> tuple[jax.Array, Arrays]:
        nested, before = nest(weights, memory, reset)
        hidden, after = scorer.forward(nested, before, tokens)
        return scorer.nll(nested, hidden, targets), flatten(after)

    def generate(
        weights: Arrays, memory: Arrays, token: Any, key: Any, temperature: Any, reset: Any
    ) -> tuple[jax.Array, jax.Array, Arrays]:
        nested, before = nest(weights, memory, reset)
        assert isinstance(model, TransformerXL)
        window = forward.generation_window(model, eval_config)
        hidden, after = forward.forward(nested, model, token[:, None], before, window=window)
        log_p = adaptive_softmax.log_probabilities(hidden[:, 0], nested.clusters, None)
        return _draw(log_p, key, temperature), log_p, flatten(after)

    rows, segment_len = eval_config.batch_size, eval_config.segment_len
    ids, reset = _array((rows, segment_len), jnp.int32), _array((rows,), jnp.bool)
    found = {"score": FlatFunction(score, {"tokens": ids, "targets": ids, "reset": reset}, ("nats",))}
    if generates:
        arguments = {
            "token": _array((rows,), jnp.int32),
            "key": _array((rows, 2), jnp.uint32),
            "temperature": _array((rows,), jnp.float32),
            "reset": reset,
        }
        found["generate"] = FlatFunction(generate, arguments, ("token", "logprobs"))
    return FlatModel(named, dict(zip(names, jax.tree.leaves(memory), strict=True)), found)


def _draw(log_p: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    """Draws a token per row of [B, V] at temperatures [B]; at 0 the likeliest, of equally likely ones the lowest id."""
    keys = jax.random.wrap_key_data(key, impl=KEY_IMPL)
    greedy = temperature <= 0
    warm = jnp.where(greedy, 1, temperature)[:, None].astype(log_p.dtype)
    drawn = jax.vmap(jax.random.categorical)(keys, log_p / warm)
    return jnp.where(greedy, jnp.argmax(log_p, axis=-1), drawn).astype(jnp.int32)


def _flatten_once(weights: Any) -> tuple[Arrays, Callable[[Arrays], Any]]:
    """Names the leaves of a tree, equal ones once: a tied softmax is the embedding's table.

    Returns:
      The distinct arrays by name, and the function that makes the tree of them.
    """
    leaves, structure = jax.tree.flatten(weights)
    first: dict[Any, str] = {}
    named: Arrays = {}
    names = []
    for name, leaf in zip(_names(weights), leaves, strict=True):
        array = np.ascontiguousarray(leaf)
        content = array.dtype.name, array.shape, hashlib.sha256(array.tobytes()).digest()
        names.append(first.setdefault(content, name))
        named.setdefault(names[-1], array)
    return named, lambda given: jax.tree.unflatten(structure, [given[name] for name in names])


def _names(tree: Any) -> list[str]:
    """Returns the names of a tree's leaves, as "layers.0.output"."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(tree)]


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
