"""Tests kernels compiled for an H200, which this machine need not have: scratch, and no array of all scores."""

import dataclasses
import functools
import math
import re

import jax
import pytest

from experiments.bench import estimate
from experiments.bench.attention import Case, find_implementation, make_function, make_inputs
from ops.attention.tpu.test_compiled import no_compilation_cache  # noqa: F401 (a fixture)
from ops.attention.tpu.test_limits import EVALUATION, TRAINING

pytestmark = pytest.mark.nightly(part="cuda")


@functools.cache
def compiled(case, path, topology):
    """Returns what a path is on a device, and the program of the case."""
    [device] = estimate.devices(topology)
    case = dataclasses.replace(case, platform=device.platform, device_kind=device.device_kind)
    implementation = find_implementation(case, path)
    inputs = jax.eval_shape(functools.partial(make_inputs, case))
    return implementation, estimate.lower_for(device, make_function(case, implementation), inputs).compile()


def writes_scores(case, program):
    """Whether an instruction makes an array with a number for each query and key, in evaluation of the KV cache."""
    n_keys = case.capacity or case.n_keys
    free = "parameter|bitcast|get-tuple-element"  # They name arrays that are there.
    shapes = re.findall(rf"= [a-z]+\d*\[([\d,]+)\]\S* (?!{free})[\w-]+\(", program.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    return largest >= case.batch * case.n_head * case.segment_len * n_keys


def training(name, batch=4, rate=0.0):
    n_head, segment_len, n_keys, *sizes = TRAINING[name]
    lengths = {"mem_len": n_keys - segment_len, "dropout": rate > 0, "dropout_rate": rate}
    return Case("gpu", "", "bfloat16", batch, n_head, segment_len, n_keys, *sizes, config=name, **lengths)


def evaluation(name):
    sizes, capacity, _ = EVALUATION[name]
    return Case("gpu", "", "bfloat16", 1, *sizes, capacity=capacity, config=name, mem_len=capacity)


@pytest.mark.parametrize(
    "case",
    [*map(training, TRAINING), training("enwik8_24l", rate=0.1), *map(evaluation, EVALUATION)],
    ids=lambda case: str(case.config),
)
def test_published_shapes(case):
    implementation, program = compiled(case, "fused", "h200")
    assert "triton" in str(implementation)
    assert not writes_scores(case, program)


def test_a_quarter_of_the_memory_of_the_reference():
    case = training("enwik8_24l")
    fused, reference = (compiled(case, path, "h200")[1] for path in ("fused", "reference"))
    assert fused.memory_analysis().temp_size_in_bytes <= reference.memory_analysis().temp_size_in_bytes / 4
    assert writes_scores(case, reference)


def test_scratch_of_a_large_batch_is_that_of_a_chunk():
    """The reference's grows with the batch, 151 MB a row (604 MB for 4 rows)."""
    case = training("enwik8_24l", batch=64)
    _, program = compiled(case, "fused", "h200")
    assert not writes_scores(case, program)
    assert program.memory_analysis().temp_size_in_bytes < 64 * 151e6 / 20


def test_smaller_tiles_for_gpus_with_less_shared_memory():
    compiled(dataclasses.replace(training("enwik8_24l"), batch=2), "fused", "a100")
