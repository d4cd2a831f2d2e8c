"""Tests that compile the TPU kernels by Mosaic, without a chip: at the published models' shapes,
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
# Heads, L, K, E and P, and R.
CACHED = {
    "enwik8_24l, no clamp": ((8, 128, 3968, 128, 3968), 3840),
    "absolute positions": ((8, 128, 768, 64, 0), 640),
    "no cache": ((8, 300, 300, 64, 300), 0),
}
for name, (sizes, capacity, _) in EVALUATION.items():
    CACHED[name] = (sizes, capacity)

in_both_types = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
on_all_chips = pytest.mark.parametrize("chip", CHIPS)


@functools.cache
def devices_of(chip):
    """Returns devices to compile for."""
    # Raises an error with the package's name if it is not installed.
    importlib.metadata.version("libtpu")
    topologies.set_environment()
    return topologies.devices(chip)


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """Programs that were compiled without their chip cannot be loaded again."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def arrays_on(device, dtype):
    """Returns the function from a shape to an array on the device that has no numbers."""
    return functools.partial(
        jax.ShapeDtypeStruct, dtype=dtype, sharding=jax.sharding.SingleDeviceSharding(device)
    )


def compiled(chip, preset, dtype, *, batch=BATCH, rate=None, causal=True, positions=True):
    """The program of attention in training, forward and backward."""
    n_head, length, n_keys, width, _ = TRAINING[preset]
    device = devices_of(chip)[0]
    visibility = Visibility(arrays_on(device, jnp.int32)((batch,)), length, length, causal=causal)
    n_positions = visibility.n_positions if positions else 0
    problem = AttentionCall(
        platform="tpu",
        device_kind=device.device_kind,
        dtype=dtype,
        batch=batch,
        n_head=n_head,
        segment_len=length,
        n_keys=n_keys,
        d_head=width,
        n_positions=n_positions,
        causal=causal,
    )

    names = NAMES[:6] if positions else NAMES[:3]
    sizes = shapes(visibility, n_head, width)
    arrays = {}
    for name in names:
        arrays[name] = arrays_on(device, dtype)(sizes[name])
    operands = Operands(**arrays)

    def run(operands, visibility, seed, gradient):
        dropout = None
        if rate is not None:
            dropout = ProbabilityDropout(rate=rate, seed=seed, n_head=n_head)
        attend = functools.partial(
            tpu_attention,
            problem,
            visibility=visibility,
            dropout=dropout,
            tile=default_tile(problem),
            kernel=kernel_of(problem),
        )
        out, pull_back = jax.vjp(attend, operands)
        return out, pull_back(gradient)

    seed = arrays_on(device, jnp.uint32)(())
    return jax.jit(run).lower(operands, visibility, seed, operands.query).compile()


def size_of(shape):
    """The number of elements of a shape in a program, such as "8,128"."""
    return math.prod(map(int, shape.split(",")))


def assert_no_scores(program, preset, batch=BATCH):
    """Asserts that no buffer has B x H x L x K numbers, in any order of the axes."""
    n_head, length, *_ = TRAINING[preset]
    # In training M is L, so K is 2 L.
    scores = batch * n_head * length * 2 * length
    shapes = re.findall(r"(?:f32|bf16|s32|u32|pred)\[([\d,]+)\]", program.as_text())
    largest = max(set(shapes), key=size_of)
    assert size_of(largest) < scores / 2, largest


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
    large = compiled("v5e:1x1", "enwik8_24l", "bfloat16", batch=64)
    small = compiled("v5e:1x1", "enwik8_24l", "bfloat16")

    # Scratch of the kernels is 20 MB at most. The reference has 9.9 GB.
    assert large.memory_analysis().temp_size_in_bytes < 20e6
    # A tenth of the reference's bytes.
    assert small.cost_analysis()["bytes accessed"] < 429e6


def test_shards_of_a_slice_compile_without_the_scores_and_only_sum_gradients():
    n_head, length, _, width, _ = TRAINING["wt103_base"]
    sizes = shapes(Visibility(np.zeros(8), length, length), n_head, width)
    mesh = make_mesh(MeshConfig(data=2, tensor=2), devices_of("v5e:2x2"))
    # The whole segment of 150 queries and 300 keys, rounded up to registers.
    implementation = Implementation("fused", "mosaic_roll", Tile(160, 384))
    rows_and_heads = jax.NamedSharding(mesh, PartitionSpec("data", "tensor"))
    heads = jax.NamedSharding(mesh, PartitionSpec("tensor"))
    arrays = {}
    for name in ("query", "key", "value"):
        arrays[name] = jax.ShapeDtypeStruct(sizes[name], jnp.bfloat16, sharding=rows_and_heads)
    for name in ("position_key", "content_bias", "position_bias"):
        arrays[name] = jax.ShapeDtypeStruct(sizes[name], jnp.bfloat16, sharding=heads)

    def run(arrays, gradient):
        dropout = ProbabilityDropout(rate=0.1, seed=jnp.uint32(1), n_head=n_head)
        visibility = Visibility(jnp.zeros(8, jnp.int32), length, length)

        def attend(arrays):
            return attention(
                **arrays, visibility=visibility, dropout=dropout, implementation=implementation
            )

        _, pull_back = jax.vjp(attend, arrays)
        return pull_back(gradient)

    with use_mesh(mesh):
        program = jax.jit(run).lower(arrays, arrays["query"]).compile()

    # A device has 4 of the 8 rows and half of the heads. Its scores are half of those of 4 rows,
    # which is the size that no buffer may reach.
    assert_no_scores(program, "wt103_base", batch=4)
    collectives = re.findall(r"all-[a-z]+|collective-permute|reduce-scatter", program.as_text())
    assert set(collectives) == {"all-reduce"}


def check_cached(chip, preset, dtype, *, batch=1, cache_dtype=None, window=None):
    """Compiles the kernel over a KV cache, which must write neither an array of the size of the
    scores to memory, nor a ring.

    On-chip memory, into which XLA fetches arrays ahead where they fit, has an S in its layout. For
    E 41 XLA stores another axis than E next to the slots, and does copy rings where they are
    arguments of a program.
    """
    sizes, capacity = CACHED[preset]
    n_head, segment_len, n_keys, width, n_positions = sizes
    device = devices_of(chip)[0]
    problem = AttentionCall(
        platform="tpu",
        device_kind=device.device_kind,
        dtype=dtype,
        batch=batch,
        n_head=n_head,
        segment_len=segment_len,
        n_keys=n_keys,
        d_head=width,
        n_positions=n_positions,
        capacity=capacity,
        cache_dtype=cache_dtype,
    )
    assert refusal(problem) is None

    array = arrays_on(device, dtype)
    stored = arrays_on(device, cache_dtype or dtype)
    integers = arrays_on(device, "int32")
    segment = array((batch, n_head, segment_len, width))
    operands = CachedOperands(
        query=segment,
        key=segment,
        value=segment,
        ring=(
            stored((batch, n_head, width, capacity)),
            stored((batch, n_head, capacity, width)),
        ),
        position=(segment, array((n_head, width, n_positions)), None) if n_positions else None,
    )
    visibility = CachedVisibility(integers((batch,)), integers(()), segment_len, capacity, window)
    run = functools.partial(tpu_cached_attention, problem, tile=default_tile(problem))
    program = jax.jit(run).lower(operands, visibility).compile()

    scores = batch * n_head * segment_len * n_keys
    ring_size = batch * n_head * width * capacity
    results = re.findall(r"= \(?\w+\[([\d,]+)\](\{\S*\})? (?!parameter|bitcast)", program.as_text())
    sizes_in_memory = set()
    for shape, layout in results:
        if "S(" not in layout:
            sizes_in_memory.add(size_of(shape))
    assert max(sizes_in_memory - {ring_size}) < scores / 2
    if capacity and width % 8 == 0:
        assert ring_size not in sizes_in_memory
        bytes_of_scores = 4 * scores  # In float32.
        assert program.memory_analysis().temp_size_in_bytes < bytes_of_scores


@in_both_types
@pytest.mark.parametrize("preset", CACHED)
@on_all_chips
def test_evaluation_shapes_compile_without_the_scores(chip, preset, dtype):
    check_cached(chip, preset, dtype)


@on_all_chips
def test_a_cache_in_bfloat16_and_a_window_compile(chip):
    check_cached(chip, "enwik8_12l", "float32", batch=16, cache_dtype="bfloat16", window=2100)
