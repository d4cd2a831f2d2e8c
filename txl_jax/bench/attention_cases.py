"""The attention of one layer of a configuration, in training and in evaluation, as something to check or time.

Training is forward and backward over [memory; segment], evaluation forward over a KV cache. Letters: B rows, H heads,
L segment length, M memory length, K keys, E head width, P distances, R slots of the KV cache.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax.config import Encoding, ExperimentConfig, Network
from txl_jax.config.settings import require
from txl_jax.inference.cache import cache_capacity
from txl_jax.ops.attention import CachedVisibility, Visibility, attention, cached_attention, choice
from txl_jax.ops.attention.cached import table_length
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.problem import Implementation, Problem

TASKS = ("training", "evaluation")
Arrays = dict[str, jax.Array]
_DIFFERENTIATED = ("query", "key", "value", "position_key", "content_bias", "position_bias")
_SEED = 7


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one layer's attention."""

    config: str  # Name of the configuration.
    task: str  # Of `TASKS`.
    dtype: str  # Of queries, keys and values.
    batch: int  # B, on one device.
    n_head: int  # H.
    d_head: int  # E.
    segment_len: int  # L.
    mem_len: int  # M.
    n_positions: int  # P.
    window: int | None  # Keys that a query attends to at most, itself included, or None for no limit.
    dropout_rate: float = 0.0  # Of the probabilities in training.
    capacity: int | None = None  # R, or None in training.

    @property
    def n_keys(self) -> int:
        """K, keys of the arrays that attention reads."""
        return (self.mem_len if self.capacity is None else self.capacity) + self.segment_len

    @property
    def passes(self) -> int:
        """Times that each product of the forward pass is done: backward it has two of them."""
        return 1 if self.task == "evaluation" else 3

    @property
    def shape(self) -> str:
        """Sizes for a table."""
        return f"{self.batch} x {self.n_head} x {self.segment_len} x {self.n_keys}, {self.d_head}"

    def flops(self, *, positions: bool = True) -> float:
        """Returns the operations on visible pairs: scores by content, by distance, and weighted values."""
        seen = range(self.mem_len + 1, self.mem_len + self.segment_len + 1)  # Keys that are not behind a query.
        visible = sum(seen) if self.window is None else sum(min(keys, self.window) for keys in seen)
        pairs = self.batch * self.n_head * visible
        return 2 * self.d_head * pairs * (3 if positions else 2) * self.passes

    @property
    def flops_of_products(self) -> float:
        """Returns the operations on all pairs, those by distance once for each position key."""
        columns = 2 * self.n_keys + self.n_positions
        return 2 * self.d_head * self.batch * self.n_head * self.segment_len * columns * self.passes

    def problem(self, platform: str, device_kind: str, *, positions: bool = True) -> Problem:
        """Returns the description from which an implementation is chosen."""
        return Problem(
            platform=platform,
            device_kind=device_kind,
            dtype=self.dtype,
            batch=self.batch,
            n_head=self.n_head,
            segment_len=self.segment_len,
            n_keys=self.n_keys,
            d_head=self.d_head,
            n_positions=self.n_positions if positions else 0,
            window=self.window,
            dropout=self.dropout_rate > 0,
            capacity=self.capacity,
            cache_dtype=None if self.capacity is None else self.dtype,
        )


def make_case(name: str, config: ExperimentConfig, task: str, *, batch: int | None, dtype: str) -> Case:
    """Returns the sizes of a configuration's attention.

    `batch` is the rows of training on one device, or None for all of them. Evaluation has `eval.batch_size`.

    Raises:
      UserError: If the model is without this attention.
    """
    model, train, eval_config = config.model, config.train, config.eval
    require(
        model.network is Network.TRANSFORMER_XL and model.encoding is Encoding.RELATIVE,
        f"{name} has the network {model.network} with the encoding {model.encoding}; "
        "the benchmark is of attention with model.encoding=relative",
    )
    lengths = train if task == "training" else eval_config
    sizes: dict[str, Any] = {
        "config": name,
        "task": task,
        "dtype": dtype,
        "n_head": model.n_head,
        "d_head": model.d_head,
        "segment_len": lengths.segment_len,
        "mem_len": lengths.mem_len,
        "window": config.compat.window(lengths.mem_len, same_length=lengths.same_length),
    }
    if task == "training":
        n_positions = train.mem_len + train.segment_len
        rate = float(model.dropout.attention or 0)
        return Case(**sizes, batch=batch or train.batch_size, n_positions=n_positions, dropout_rate=rate)
    capacity = cache_capacity(mem_len=eval_config.mem_len, segment_len=eval_config.segment_len)
    n_positions = table_length(segment_len=eval_config.segment_len, capacity=capacity, clamp_len=eval_config.clamp_len)
    return Case(**sizes, batch=eval_config.batch_size, n_positions=n_positions, capacity=capacity)


def find_implementation(case: Case, path: str, platform: str, device_kind: str) -> tuple[Implementation | None, str]:
    """Returns what a path is on a device, or None and the reason if it cannot serve the case.

    Paths are "reference", "tiled", "fused", and "plain": the fused or else the tiled one without position keys.
    """
    reason = ""
    for name in ("fused", "tiled") if path == "plain" else (path,):
        problem = case.problem(platform, device_kind, positions=has_positions(path))
        reason = choice.refusal_of(name, problem) or ""
        if not reason:
            return choice.choose(name, problem)
    return None, reason


def has_positions(path: str) -> bool:
    """Returns whether a path has position keys."""
    return path not in ("plain", "cudnn")


def make_inputs(case: Case) -> Arrays:
    """Returns random arrays: keys and values of unit variance, as behind a layer norm, and biases a fifth of that."""
    shapes = _shapes(case)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    scale = {"content_bias": 0.2, "position_bias": 0.2}
    arrays = {
        name: scale.get(name, 1.0) * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    if case.capacity is not None:
        arrays["query"] *= case.d_head**-0.5
        arrays["position_query"] *= case.d_head**-0.5
    found = {name: array.astype(case.dtype) for name, array in arrays.items()}
    return found | {"valid": jnp.full((case.batch,), case.mem_len, jnp.int32)}


def make_function(
    case: Case, implementation: Implementation | str, *, positions: bool = True
) -> Callable[[Arrays], dict[str, jax.Array]]:
    """Returns the function of a case, with or without position keys: inputs -> output, in training with gradients."""
    of_task = _training if case.capacity is None else _evaluation
    return functools.partial(of_task, case, implementation, positions)


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    rows = (case.batch, case.n_head)
    own = (*rows, case.segment_len, case.d_head)
    if case.capacity is None:
        all_keys = (*rows, case.n_keys, case.d_head)
        bias = (case.n_head, case.d_head)
        return {
            "query": own,
            "key": all_keys,
            "value": all_keys,
            "position_key": (case.n_head, case.n_positions, case.d_head),
            "content_bias": bias,
            "position_bias": bias,
            "cotangent": own,
        }
    return {
        "query": own,
        "key": own,
        "value": own,
        "stored_key": (*rows, case.d_head, case.capacity),
        "stored_value": (*rows, case.capacity, case.d_head),
        "position_query": own,
        "position_key": (case.n_head, case.d_head, case.n_positions),
    }


def _training(
    case: Case, implementation: Implementation | str, positions: bool, inputs: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    visibility = Visibility(inputs["valid"], case.segment_len, case.mem_len, case.window)
    dropout = Dropout(case.dropout_rate, jnp.uint32(_SEED), case.n_head) if case.dropout_rate else None
    names = _DIFFERENTIATED if positions else _DIFFERENTIATED[:3]

    def forward(*arrays: jax.Array) -> jax.Array:
        given: dict[str, Any] = dict(zip(names, arrays, strict=True))
        return attention(**given, visibility=visibility, dropout=dropout, implementation=implementation)

    output, pull_back = jax.vjp(forward, *(inputs[name] for name in names))
    gradients = pull_back(inputs["cotangent"])
    return {"output": output} | {f"gradient of {name}": each for name, each in zip(names, gradients, strict=True)}


def _evaluation(
    case: Case, implementation: Implementation | str, positions: bool, inputs: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    assert case.capacity is not None
    # The seam of the ring is in the middle, at a segment's border, as after some segments.
    write_index = jnp.int32(case.capacity // 2 // case.segment_len * case.segment_len)
    visibility = CachedVisibility(inputs["valid"], write_index, case.segment_len, case.capacity, case.window)
    position = (inputs["position_query"], inputs["position_key"], None) if positions else None
    own = (inputs["query"], inputs["key"], inputs["value"])
    ring = (inputs["stored_key"], inputs["stored_value"])
    return {"output": cached_attention(*own, ring, position, visibility, implementation=implementation)}
