"""First contact, which compares a path of attention with the reference on the device.

The comparison is made before a run uses the path there.

Kernels are compiled for each kind of device by each version of jax and the compiler, and nobody may
have tried these together. So `runs.build` compares its choice, forward and backward, with the run's
dtype, head size, memory and tile, and with few rows, heads and queries. A finding holds for the
process. A later process compares again, with programs from JAX's compilation cache, whose keys have
device and versions. CPUs compare only kernels that are interpreted: the tests compare the others.

`experiments.bench.device` compares and times all paths with the same functions.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

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
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.problem import REFERENCE, default_device
from txl_jax.runtime import distributed

T = TypeVar("T")
Arrays = dict[str, jax.Array]
# Relative differences above which an implementation is wrong, not rounded: in float32, and in 16
# bits, where tiles differ from the reference in float32 by 0.7 % at the sizes of enwik8_24l.
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-3, 2e-2
# If an array has no larger element, such as the gradient of queries with one key, it is rounding.
_LEAST = 0.1
# Odd, no smaller than the largest tile, and enough for the kernels with any number of keys.
_MOST_QUERIES = 511
_DROPOUT_RATE = 0.1
# Inputs and their axes in `AttentionCall`'s letters, in training and over a KV cache: of all calls,
# and with position keys.
_INPUTS = (
    (
        "query:bhle key:bhke value:bhke cotangent:bhle",
        "position_key:hpe content_bias:he position_bias:he",
    ),
    (
        "query:bhle key:bhle value:bhle ring_key:bher ring_value:bhre",
        "position_query:bhle position_key:hep",
    ),
)


class Finding(NamedTuple):
    """What a comparison has found."""

    failed: bool
    sentence: str  # For the log. Empty if nothing was compared.


_findings: dict[str, Finding] = {}


def compare(implementation: Implementation, problem: AttentionCall) -> Finding:
    """Compares an implementation that was chosen for a run with the reference.

    Each comparison is made once in a process. The function never raises.
    """
    device = default_device()
    # Estimates compile for devices that are not here.
    is_here = (problem.platform, problem.device_kind) == (device.platform, device.device_kind)
    is_new = is_here and device.platform != "cpu"
    if implementation.path == "reference" or not (is_new or implementation.interpret):
        return Finding(False, "")
    segment_len = min(problem.segment_len, _MOST_QUERIES)
    n_keys = problem.n_keys - problem.segment_len + segment_len
    sizes: dict[str, Any] = {
        "batch": 2,
        "n_head": 2 + problem.n_head % 2,
        "segment_len": segment_len,
        "n_keys": n_keys,
    }
    sizes["n_positions"] = min(problem.n_positions, n_keys)
    small = dataclasses.replace(problem, **sizes, documents=False)
    key = f"{implementation}, {small}"
    if key not in _findings:
        _findings[key] = _compare(implementation, small)
    return _findings[key]


def build_on_all(build: Callable[[], T]) -> T:
    """Runs `build`, which calls `compare`, in all processes.

    What failed in one process has then failed in all of them.
    """
    while True:
        built = distributed.run_on_all(build)
        failures = {
            key: finding.sentence for key, finding in sorted(_findings.items()) if finding.failed
        }
        texts = (
            distributed.gather_texts(json.dumps(failures)) if distributed.is_multiprocess() else []
        )
        if len(set(texts)) < 2:
            return built
        for text in reversed(texts):  # The first process's sentence stays.
            _findings.update(
                {key: Finding(True, sentence) for key, sentence in json.loads(text).items()}
            )


def _compare(implementation: Implementation, problem: AttentionCall) -> Finding:
    where = f"{implementation} on {default_device().device_kind}"
    if distributed.is_multiprocess():
        where += f" of process {jax.process_index()}"
    slots = problem.n_keys - problem.segment_len
    try:
        name, difference = largest_difference(
            implementation, problem, make_inputs(problem, [slots, slots // 3])
        )
    except Exception as error:  # noqa: BLE001 (whatever a compiler raises, another path may work)
        return Finding(True, f"{where} does not compile or run: {first_line(error)}")
    if wrong := describe_error(name, difference, problem):
        return Finding(True, f"{where} is wrong: {wrong}")
    return Finding(False, f"within {difference:.0e} of the reference here")


def describe_error(name: str, difference: float, problem: AttentionCall) -> str:
    """Describes a difference that is too large for rounding, or returns an empty string."""
    most = _TOLERANCE if jnp.dtype(problem.dtype).itemsize > 2 else _TOLERANCE_OF_16_BITS
    if difference <= most:
        return ""
    return (
        f"its {name} differs from the reference by {difference:.1e} of the largest "
        f"element, above {most:.0e}"
    )


def largest_difference(
    implementation: Implementation, problem: AttentionCall, inputs: Arrays
) -> tuple[str, float]:
    """Compares output and gradients with the reference in at least float32.

    Returns (array that differs most, how much it differs).

    An array's difference is its elements' largest, divided by the reference's largest element, or
    infinity for nan.
    """
    wide = {
        name: array.astype(jnp.promote_types(array.dtype, jnp.float32))
        for name, array in inputs.items()
    }
    # By default TPUs round float32 to bfloat16, and GPUs to TF32. For 16 bits that will do, and
    # compiles in a third of the time (TPU v5e, 511 x 1023 pairs: 12 s, not 34).
    with jax.default_matmul_precision(
        "highest" if jnp.dtype(problem.dtype).itemsize > 2 else "default"
    ):
        expected = jax.device_get(
            jax.jit(make_function(REFERENCE, problem))(wide | {"valid": inputs["valid"]})
        )
        found = jax.device_get(jax.jit(make_function(implementation, problem))(inputs))
    differences = {
        name: np.max(np.abs(found[name].astype(array.dtype) - array))
        / max(np.max(np.abs(array)), _LEAST)
        for name, array in expected.items()
    }
    worst = max(differences, key=lambda name: np.nan_to_num(differences[name], nan=np.inf))
    return worst, float(np.nan_to_num(differences[worst], nan=np.inf))


def make_inputs(problem: AttentionCall, valid: Sequence[int]) -> Arrays:
    """Returns random arrays for rows with `valid` filled slots.

    Queries, keys and values have unit variance, as behind a layer norm, and biases a standard
    deviation of 0.2.
    """
    p = problem
    lengths = {
        "b": p.batch,
        "h": p.n_head,
        "l": p.segment_len,
        "k": p.n_keys,
        "e": p.d_head,
        "r": p.capacity or 0,
    }
    lengths["p"] = p.n_positions or p.n_keys
    names = (
        " ".join(_INPUTS[p.cached][: 2 if p.n_positions else 1])
        + " position_score:hp" * p.has_position_score
    )
    rng, arrays = np.random.default_rng(0), {"valid": jnp.asarray(valid, jnp.int32)}
    for name, axes in (each.split(":") for each in names.split()):
        scale = (
            0.2
            if name.endswith("bias")
            else p.d_head**-0.5
            if p.cached and name.endswith("query")
            else 1.0
        )
        array = scale * rng.standard_normal([lengths[axis] for axis in axes], np.float32)
        dtype = p.cache_dtype if name.startswith("ring") else None
        arrays[name] = jnp.asarray(array.astype(jnp.dtype(dtype or p.dtype)))
    return arrays


def make_function(
    implementation: Implementation, problem: AttentionCall
) -> Callable[[Arrays], Arrays]:
    """Returns the function that computes attention's output and, in training, all gradients.

    The function takes the inputs and returns its results by name.
    """
    p = problem

    def training(inputs: Arrays) -> Arrays:
        given = dict(inputs)
        cotangent = given.pop("cotangent")
        options: dict[str, Any] = {"implementation": implementation}
        options["visibility"] = Visibility(
            given.pop("valid"), p.segment_len, p.n_keys - p.segment_len, p.window
        )
        options["dropout"] = Dropout(_DROPOUT_RATE, jnp.uint32(7), p.n_head) if p.dropout else None
        output, pull_back = jax.vjp(lambda given: attention(**given, **options), given)
        [gradients] = pull_back(cotangent)
        return {"output": output} | {
            f"gradient of {name}": each for name, each in gradients.items()
        }

    def evaluation(inputs: Arrays) -> Arrays:
        assert p.capacity is not None
        # The seam of the ring is in the middle, at a segment's border, as after some segments.
        write_index = jnp.int32(p.capacity // 2 // p.segment_len * p.segment_len)
        visibility = CachedVisibility(
            inputs["valid"], write_index, p.segment_len, p.capacity, p.window
        )
        own = inputs["query"], inputs["key"], inputs["value"]
        ring = inputs["ring_key"], inputs["ring_value"]
        position = None
        if p.n_positions or p.has_position_score:
            position = (
                inputs.get("position_query", own[0]),
                inputs.get("position_key"),
                inputs.get("position_score"),
            )
        return {
            "output": cached_attention(
                *own, ring, position, visibility, implementation=implementation
            )
        }

    return evaluation if p.cached else training
