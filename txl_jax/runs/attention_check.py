"""Checks attention on a device: compares a path with the reference implementation.

The comparison is made before a run first uses the path on this device.

Kernels are compiled for each kind of device by each version of jax and the compiler, and this
combination may be untested. `runs.attention_choice` therefore compares its choice, forward and
backward, with the run's dtype, head size, memory and tile, and with few rows, heads and queries. A
finding is valid for the process. A later process compares again, with programs from JAX's
compilation cache, whose keys include the device and versions. On CPUs only interpreted kernels are
compared, because the tests compare the other paths.

`experiments.bench.device` compares and times all paths with the same functions.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.errors import first_line
from txl_jax.ops.attention import (
    AttentionCall,
    CachedVisibility,
    Implementation,
    Visibility,
    attention,
    cached_attention,
)
from txl_jax.ops.attention.dropout import ProbabilityDropout
from txl_jax.ops.attention.problem import REFERENCE, default_device
from txl_jax.runtime import distributed

T = TypeVar("T")
# Arrays by name.
Arrays = dict[str, jax.Array]

# Relative differences above which an implementation counts as wrong: in float32, and in 16 bits,
# where tiles differ from the reference in float32 by 0.7 % at the sizes of enwik8_24l.
_TOLERANCE = 1e-3
_TOLERANCE_OF_16_BITS = 2e-2
# Differences are relative to an array's largest element, but at least to this: an array of small
# elements, such as the gradient of queries with one key, is only rounding.
_LEAST_ELEMENT = 0.1

# Sizes of a comparison. Queries: odd, no smaller than the largest tile, and enough for the kernels
# with any number of keys.
_ROWS = 2
_MOST_QUERIES = 511
_DROPOUT_RATE = 0.1
_DROPOUT_SEED = 7
# Standard deviation of the biases u and v.
_BIAS_SCALE = 0.2


class Finding(NamedTuple):
    """The result of a comparison."""

    # Whether the path is wrong, or does not compile or run.
    failed: bool
    # Text for the log. Empty if nothing was compared.
    sentence: str


NOT_COMPARED = Finding(failed=False, sentence="")

# Findings of this process, by implementation and call.
_findings: dict[str, Finding] = {}


def compare(implementation: Implementation, call: AttentionCall) -> Finding:
    """Compares an implementation that was chosen for a run with the reference.

    Each comparison is made once in a process. The function never raises.
    """
    # Estimates compile for devices that this machine does not have.
    device = default_device()
    is_here = (call.platform, call.device_kind) == (device.platform, device.device_kind)
    is_on_accelerator = is_here and device.platform != "cpu"
    is_checked = is_on_accelerator or implementation.interpret
    if implementation.path == "reference" or not is_checked:
        return NOT_COMPARED

    # Fewer rows, heads and queries, with the run's memory. The number of heads stays odd or even.
    segment_len = min(call.segment_len, _MOST_QUERIES)
    n_keys = call.n_keys - call.segment_len + segment_len
    small_call = dataclasses.replace(
        call,
        batch=_ROWS,
        n_head=2 + call.n_head % 2,
        segment_len=segment_len,
        n_keys=n_keys,
        n_positions=min(call.n_positions, n_keys),
        documents=False,
    )
    key = f"{implementation}, {small_call}"
    if key not in _findings:
        _findings[key] = _compare(implementation, small_call)
    return _findings[key]


def build_on_all(build: Callable[[], T]) -> T:
    """Runs `build`, which calls `compare`, in all processes.

    A path that failed in one process has then failed in all of them.
    """
    while True:
        built = distributed.run_on_all(build)
        if not distributed.is_multiprocess():
            return built

        failures = {
            key: finding.sentence for key, finding in sorted(_findings.items()) if finding.failed
        }
        texts = distributed.gather_texts(json.dumps(failures))
        if len(set(texts)) == 1:
            return built

        # Build again with the failures of all processes, in reverse order, so that the message of
        # the first process remains.
        for text in reversed(texts):
            for key, sentence in json.loads(text).items():
                _findings[key] = Finding(failed=True, sentence=sentence)


def _compare(implementation: Implementation, call: AttentionCall) -> Finding:
    """Compares an implementation with the reference on this call. Never raises."""
    place = f"{implementation} on {default_device().device_kind}"
    if distributed.is_multiprocess():
        place += f" of process {jax.process_index()}"

    # The memory of one row is full, and the other row's memory only to a third.
    slots = call.n_keys - call.segment_len
    try:
        inputs = make_inputs(call, [slots, slots // 3])
        name, difference = largest_difference(implementation, call, inputs)
    except Exception as error:  # noqa: BLE001 (whatever a compiler raises, another path may work)
        sentence = f"{place} does not compile or run: {first_line(error)}"
        return Finding(failed=True, sentence=sentence)

    error_text = describe_error(name, difference, call)
    if error_text:
        return Finding(failed=True, sentence=f"{place} is wrong: {error_text}")
    return Finding(failed=False, sentence=f"within {difference:.0e} of the reference here")


def describe_error(name: str, difference: float, call: AttentionCall) -> str:
    """Describes a difference that is too large for rounding, or returns an empty string."""
    tolerance = _TOLERANCE_OF_16_BITS if _has_16_bits(call) else _TOLERANCE
    if difference <= tolerance:
        return ""
    return (
        f"its {name} differs from the reference by {difference:.1e} of the largest "
        f"element, above {tolerance:.0e}"
    )


def _has_16_bits(call: AttentionCall) -> bool:
    return jnp.dtype(call.dtype).itemsize <= 2


def largest_difference(
    implementation: Implementation, call: AttentionCall, inputs: Arrays
) -> tuple[str, float]:
    """Compares output and gradients with the reference in at least float32.

    Args:
      implementation: The implementation to compare.
      call: What it computes.
      inputs: The inputs by name (`make_inputs`).

    Returns:
      (name of the array that differs most, its difference). An array's difference is the largest
      difference of its elements, divided by the reference's largest element, or infinity for nan.
    """
    wide_inputs = {
        name: array.astype(jnp.promote_types(array.dtype, jnp.float32))
        for name, array in inputs.items()
    }
    # Numbers of slots stay integers.
    wide_inputs["valid"] = inputs["valid"]

    # By default TPUs round float32 to bfloat16, and GPUs to TF32. For 16 bits this is sufficient,
    # and compiles in a third of the time (TPU v5e, 511 x 1023 pairs: 12 s instead of 34 s).
    precision = "default" if _has_16_bits(call) else "highest"
    with jax.default_matmul_precision(precision):
        reference = jax.jit(make_function(REFERENCE, call))
        expected = jax.device_get(reference(wide_inputs))
        function = jax.jit(make_function(implementation, call))
        actual = jax.device_get(function(inputs))

    differences = {
        name: _relative_difference(actual[name], array) for name, array in expected.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    return worst, differences[worst]


def _relative_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = np.max(np.abs(actual.astype(expected.dtype) - expected))
    largest = max(np.max(np.abs(expected)), _LEAST_ELEMENT)
    return float(np.nan_to_num(difference / largest, nan=np.inf))


def make_inputs(call: AttentionCall, valid: Sequence[int]) -> Arrays:
    """Returns random arrays for rows with `valid` filled slots.

    Queries, keys and values have unit variance, as after a layer norm, and biases a standard
    deviation of 0.2. Over a KV cache, queries are also divided by sqrt(E).
    """
    lengths = {
        "b": call.batch,
        "h": call.n_head,
        "l": call.segment_len,
        "k": call.n_keys,
        "e": call.d_head,
        "r": call.capacity or 0,
        # Scores by distance do not need position keys.
        "p": call.n_positions or call.n_keys,
    }
    rng = np.random.default_rng(0)
    arrays = {"valid": jnp.asarray(valid, jnp.int32)}
    # The order of the names is the order of the random numbers.
    for name, axes in _input_axes(call).items():
        scale = 1.0
        if name.endswith("bias"):
            scale = _BIAS_SCALE
        elif call.cached and name.endswith("query"):
            scale = call.d_head**-0.5

        dtype = call.dtype
        if name.startswith("ring") and call.cache_dtype is not None:
            dtype = call.cache_dtype

        shape = [lengths[axis] for axis in axes]
        array = scale * rng.standard_normal(shape, np.float32)
        arrays[name] = jnp.asarray(array.astype(jnp.dtype(dtype)))
    return arrays


def _input_axes(call: AttentionCall) -> dict[str, str]:
    """Returns the axes of each input by its name, as letters.

    The letters are B, H, L, K, E, P and R of `AttentionCall`, in lower case. `cotangent` is the
    gradient of the output.
    """
    if call.cached:
        axes = {
            "query": "bhle",
            "key": "bhle",
            "value": "bhle",
            "ring_key": "bher",
            "ring_value": "bhre",
        }
        position_axes = {"position_query": "bhle", "position_key": "hep"}
    else:
        axes = {"query": "bhle", "key": "bhke", "value": "bhke", "cotangent": "bhle"}
        position_axes = {"position_key": "hpe", "content_bias": "he", "position_bias": "he"}

    if call.n_positions > 0:
        axes |= position_axes
    if call.has_position_score:
        axes["position_score"] = "hp"
    return axes


def make_function(
    implementation: Implementation, call: AttentionCall
) -> Callable[[Arrays], Arrays]:
    """Returns the function that computes attention's output and, in training, all gradients.

    The function takes the inputs (`make_inputs`) and returns its results by name.
    """
    if call.cached:
        return functools.partial(_cached_results, implementation, call)
    return functools.partial(_training_results, implementation, call)


def _training_results(
    implementation: Implementation, call: AttentionCall, inputs: Arrays
) -> Arrays:
    """Computes the output and the gradients of all operands, by name."""
    operands = dict(inputs)
    valid = operands.pop("valid")
    cotangent = operands.pop("cotangent")
    mem_len = call.n_keys - call.segment_len
    visibility = Visibility(valid, call.segment_len, mem_len, call.window)
    dropout = None
    if call.dropout:
        dropout = ProbabilityDropout(_DROPOUT_RATE, jnp.uint32(_DROPOUT_SEED), call.n_head)

    def compute(operands: Arrays) -> jax.Array:
        return attention(
            operands["query"],
            operands["key"],
            operands["value"],
            operands.get("position_key"),
            content_bias=operands.get("content_bias"),
            position_bias=operands.get("position_bias"),
            position_score=operands.get("position_score"),
            visibility=visibility,
            dropout=dropout,
            implementation=implementation,
        )

    output, pull_back = jax.vjp(compute, operands)
    [gradients] = pull_back(cotangent)

    results = {"output": output}
    for name, gradient in gradients.items():
        results[f"gradient of {name}"] = gradient
    return results


def _cached_results(implementation: Implementation, call: AttentionCall, inputs: Arrays) -> Arrays:
    """Computes the output over a KV cache, by name."""
    assert call.capacity is not None, "a call over a KV cache has a capacity"
    # The oldest slot is in the middle of the ring, at a segment's border, as after some segments.
    write_index = jnp.int32(call.capacity // 2 // call.segment_len * call.segment_len)
    visibility = CachedVisibility(
        inputs["valid"], write_index, call.segment_len, call.capacity, call.window
    )

    # With only scores, queries for position keys are not read. The query replaces them.
    position = None
    if call.n_positions or call.has_position_score:
        position = (
            inputs.get("position_query", inputs["query"]),
            inputs.get("position_key"),
            inputs.get("position_score"),
        )
    output = cached_attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        (inputs["ring_key"], inputs["ring_value"]),
        position,
        visibility,
        implementation=implementation,
    )
    return {"output": output}
