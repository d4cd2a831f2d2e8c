"""The kernels compiled for an H200, which need not be at hand: scratch, and no array of all scores."""

import dataclasses
import functools
import math
import re

import jax
import pytest

from txl_jax.bench import topologies
from txl_jax.bench.attention_cases import Case, find_implementation, make_function, make_inputs

pytestmark = pytest.mark.nightly(part="cuda")

TRAINING = {
    # Queries, memory, heads and their width; dropout.
    "enwik8_12l": ((512, 512, 8, 64), 0.0),
    "enwik8_24l": ((768, 768, 8, 128), 0.0),
    "wt103_base": ((150, 150, 10, 41), 0.0),
    "wt103_large": ((384, 384, 16, 64), 0.0),
    "enwik8_24l with dropout": ((768, 768, 8, 128), 0.1),
}
EVALUATION = {
    # Queries, slots, heads and their width; position keys.
    "enwik8_12l": ((80, 2160, 8, 64), 821),
    "enwik8_24l": ((128, 3840, 8, 128), 1001),
    "wt103_base": ((64, 640, 10, 41), 401),
    "wt103_large": ((128, 1664, 16, 64), 1001),
}


@pytest.fixture(autouse=True)
def _no_compilation_cache():
    """A program for a device that is not there can be written to the cache of compiled programs, but not read."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", enabled)


@functools.cache
def compiled(case, path, topology):
    """Returns what a path is on a device, and the program of the case."""
    [device] = topologies.devices(topology)
    implementation, reason = find_implementation(case, path, device.platform, device.device_kind)
    assert implementation, reason
    inputs = jax.eval_shape(functools.partial(make_inputs, case))
    return implementation, topologies.lower_for(device, make_function(case, implementation), inputs).compile()


def writes_scores(case, program):
    """Whether an instruction makes an array with a number for each query and key, in evaluation of the KV cache."""
    n_keys = case.n_keys if case.capacity is None else case.capacity
    free = "parameter|bitcast|get-tuple-element"  # They name arrays that are there.
    shapes = re.findall(rf"= [a-z]+\d*\[([\d,]+)\]\S* (?!{free})[\w-]+\(", program.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
    return largest >= case.batch * case.n_head * case.segment_len * n_keys


def training(name, batch=4):
    (segment_len, mem_len, n_head, d_head), rate = TRAINING[name]
    sizes = {"segment_len": segment_len, "mem_len": mem_len, "n_head": n_head, "d_head": d_head}
    n_positions = segment_len + mem_len
    return Case(name, "training", "bfloat16", batch, n_positions=n_positions, window=None, dropout_rate=rate, **sizes)


def evaluation(name, batch=1):
    (segment_len, capacity, n_head, d_head), n_positions = EVALUATION[name]
    sizes = {"segment_len": segment_len, "mem_len": capacity, "n_head": n_head, "d_head": d_head}
    return Case(name, "evaluation", "bfloat16", batch, n_positions=n_positions, window=None, capacity=capacity, **sizes)


@pytest.mark.parametrize(
    "case", [*map(training, TRAINING), *map(evaluation, EVALUATION)], ids=lambda case: str(case.config)
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
