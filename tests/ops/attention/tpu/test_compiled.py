"""The TPU kernels through Mosaic, for chips that are not there: at the published models' shapes,
without the scores.
"""

import functools
import importlib.metadata
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments.bench import topologies
from ops.attention.tpu.test_limits import EVALUATION, TRAINING
from support.attention_arrays import NAMES, shapes
from txl_jax.config import MeshConfig
from txl_jax.ops.attention import (
    AttentionCall,
    CachedVisibility,
    Implementation,
    ProbabilityDropout,
    Tile,
    Visibility,
    attention,
)
from txl_jax.ops.attention.problem import CachedOperands, Operands
from txl_jax.ops.attention.tpu.cached import tpu_cached_attention
from txl_jax.ops.attention.tpu.geometry import default_tile, kernel_of, refusal
from txl_jax.ops.attention.tpu.kernels import tpu_attention
from txl_jax.sharding.mesh import make_mesh, use_mesh

pytestmark = pytest.mark.nightly(part="tpu")

CHIPS = ("v4:2x2x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1")
# Rows of a chip.
BATCH = 4
# Heads, L, K, E, P; R.
CACHED = {name: (sizes, capacity) for name, (sizes, capacity, _) in EVALUATION.items()} | {
    "enwik8_24l, no clamp": ((8, 128, 3968, 128, 3968), 3840),
    "absolute positions": ((8, 128, 768, 64, 0), 640),
    "no cache": ((8, 300, 300, 64, 300), 0),
}
in_both_types = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
on_all_chips = pytest.mark.parametrize("chip", CHIPS)


@functools.cache
def devices_of(chip):
    """Returns devices to compile for, which needs libtpu."""
    importlib.metadata.version("libtpu")
    topologies.set_environment()
    return topologies.devices(chip)


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """Programs that were compiled for a chip that is not there cannot be loaded again."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def arrays_on(device, dtype):
    """Returns the function from a shape to an array on the device that has no numbers."""
    return functools.partial(
        jax.ShapeDtypeStruct, dtype=dtype, sharding=jax.sharding.SingleDeviceSharding(device)
    )


def compiled(chip, preset, dtype, *, batch=BATCH, rate=None, causal=True, positions=True):
    n_head, length, _, width, _ = TRAINING[preset]
    device = devices_of(chip)[0]
    visibility = Visibility(arrays_on(device, jnp.int32)((batch,)), length, length, causal=causal)
    n_positions = visibility.n_positions if positions else 0
    problem = AttentionCall(
        "tpu", device.device_kind, dtype, batch, *TRAINING[preset][:4], n_positions, causal=causal
    )
    sizes = shapes(visibility, n_head, width)
    arrays = Operands(
        *(arrays_on(device, dtype)(sizes[name]) for name in NAMES[: 6 if positions else 3])
    )

    def run(arrays, visibility, seed, gradient):
        dropout = None if rate is None else ProbabilityDropout(rate=rate, seed=seed, n_head=n_head)
        options = {"tile": default_tile(problem), "kernel": kernel_of(problem)}
        attend = functools.partial(
            tpu_attention, problem, visibility=visibility, dropout=dropout, **options
        )
        out, gradients_of = jax.vjp(attend, arrays)
        return out, gradients_of(gradient)

    return (
        jax.jit(run)
        .lower(arrays, visibility, arrays_on(device, jnp.uint32)(()), arrays.query)
        .compile()
    )


def assert_no_scores(program, preset, batch=BATCH):
    """Asserts that no buffer has B x H x L x K numbers, in any order of the axes."""
    n_head, length, *_ = TRAINING[preset]
    scores = batch * n_head * length * 2 * length
    shapes = re.findall(r"(?:f32|bf16|s32|u32|pred)\[([\d,]+)\]", program.as_text())
    sizes = {shape: math.prod(map(int, shape.split(","))) for shape in set(shapes)}
    assert max(sizes.values()) < scores / 2, max(sizes, key=sizes.get)


@in_both_types
@pytest.mark.parametrize("preset", TRAINING)
@on_all_chips
def test_training_shapes_compile_without_the_scores(chip, preset, dtype):
    assert_no_scores(compiled(chip, preset, dtype), preset)


@pytest.mark.parametrize(
    "options", [{"rate": 0.1}, {"causal": False}, {"positions": False}], ids=str
)
@on_all_chips
def test_dropout_both_directions_and_no_positions_compile(chip, options):
    assert_no_scores(compiled(chip, "enwik8_24l", "bfloat16", **options), "enwik8_24l")


def test_memory_and_traffic_are_a_part_of_the_references():
    program = compiled("v5e:1x1", "enwik8_24l", "bfloat16", batch=64)
    # The reference: 9.9 GB.
    assert program.memory_analysis().temp_size_in_bytes < 20e6
    # A tenth.
    assert compiled("v5e:1x1", "enwik8_24l", "bfloat16").cost_analysis()["bytes accessed"] < 429e6


def test_shards_of_a_slice_compile_without_the_scores_and_only_sum_gradients():
    n_head, length, _, width, _ = TRAINING["wt103_base"]
    sizes = shapes(Visibility(np.zeros(8), length, length), n_head, width)
    mesh = make_mesh(MeshConfig(data=2, tensor=2), devices_of("v5e:2x2"))
    implementation = Implementation("fused", "mosaic_roll", Tile(160, 384))
    both, heads = (
        jax.NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data", "tensor"), ("tensor",))
    )
    arrays = {
        name: jax.ShapeDtypeStruct(
            sizes[name], jnp.bfloat16, sharding=both if name in NAMES[:3] else heads
        )
        for name in NAMES[:6]
    }

    def run(arrays, gradient):
        dropout = ProbabilityDropout(rate=0.1, seed=jnp.uint32(1), n_head=n_head)
        visibility = Visibility(jnp.zeros(8, jnp.int32), length, length)
        attend = functools.partial(
            attention, visibility=visibility, dropout=dropout, implementation=implementation
        )
        return jax.vjp(lambda arrays: attend(**arrays), arrays)[1](gradient)

    with use_mesh(mesh):
        program = jax.jit(run).lower(arrays, arrays["query"]).compile()
    assert_no_scores(program, "wt103_base", batch=4)
    assert set(re.findall(r"all-[a-z]+|collective-permute|reduce-scatter", program.as_text())) == {
        "all-reduce"
    }


def check_cached(chip, preset, dtype, *, batch=1, cache_dtype=None, window=None):
    """Compiles the kernel over a KV cache, which must write nothing of the size of the scores to
    memory, nor a ring.

    On-chip memory, into which XLA fetches arrays ahead where they fit, has an S in its layout. For
    E 41 XLA puts another axis than E beside the slots, and does copy rings where they are arguments
    of a program.
    """
    sizes, capacity = CACHED[preset]
    (n_head, segment_len, n_keys, width, n_positions), device = sizes, devices_of(chip)[0]
    problem = AttentionCall(
        "tpu", device.device_kind, dtype, batch, *sizes, capacity=capacity, cache_dtype=cache_dtype
    )
    assert refusal(problem) is None

    array, stored, integers = (
        arrays_on(device, name) for name in (dtype, cache_dtype or dtype, "int32")
    )
    own = array((batch, n_head, segment_len, width))
    ring = stored((batch, n_head, width, capacity)), stored((batch, n_head, capacity, width))
    position = (own, array((n_head, width, n_positions)), None) if n_positions else None
    visibility = CachedVisibility(integers((batch,)), integers(()), segment_len, capacity, window)
    run = functools.partial(tpu_cached_attention, problem, tile=default_tile(problem))
    program = (
        jax.jit(run).lower(CachedOperands(own, own, own, ring, position), visibility).compile()
    )

    scores, ring_size = batch * n_head * segment_len * n_keys, batch * n_head * width * capacity
    made = re.findall(r"= \(?\w+\[([\d,]+)\](\{\S*\})? (?!parameter|bitcast)", program.as_text())
    sizes = {math.prod(map(int, shape.split(","))) for shape, layout in made if "S(" not in layout}
    assert max(sizes - {ring_size}) < scores / 2
    if capacity and width % 8 == 0:
        assert ring_size not in sizes
        assert program.memory_analysis().temp_size_in_bytes < 4 * scores


@in_both_types
@pytest.mark.parametrize("preset", CACHED)
@on_all_chips
def test_evaluation_shapes_compile_without_the_scores(chip, preset, dtype):
    check_cached(chip, preset, dtype)


@on_all_chips
def test_a_cache_in_bfloat16_and_a_window_compile(chip):
    check_cached(chip, "enwik8_12l", "float32", batch=16, cache_dtype="bfloat16", window=2100)
