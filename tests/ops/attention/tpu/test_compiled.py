"""The TPU kernels through Mosaic, for chips that are not there: at the published models' shapes, without the scores.

That over a KV cache is in `test_cached_compiled`.
"""

import functools
import importlib.metadata
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from experiments.bench import estimate
from ops.attention.tpu.test_limits import TRAINING
from txl_jax import sharding
from txl_jax.config import MeshConfig
from txl_jax.ops.attention import Visibility, attention
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.problem import Implementation, Problem, Tile
from txl_jax.ops.attention.tpu.geometry import default_tile, kernel_of
from txl_jax.ops.attention.tpu.kernels import tpu_attention

pytestmark = pytest.mark.nightly(part="tpu")

CHIPS = ("v4:2x2x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1")
BATCH = 4  # Rows of a chip.


def devices_of(chip):
    """Returns devices to compile for, which needs libtpu."""
    importlib.metadata.version("libtpu")
    estimate.set_environment()
    return estimate.devices(chip)


@functools.cache
def device_of(chip):
    return devices_of(chip)[0]


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """Programs that were compiled for a chip that is not there cannot be loaded again."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def compiled(chip, preset, dtype, *, batch=BATCH, rate=None, causal=True, positions=True):
    n_head, length, _, width, _ = TRAINING[preset]
    device = device_of(chip)
    place = jax.sharding.SingleDeviceSharding(device)
    visibility = Visibility(jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=place), length, length, causal=causal)
    problem = Problem("tpu", device.device_kind, dtype, batch, n_head, length, 2 * length, width, 2 * length)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    query, key = array(batch, n_head, length, width), array(batch, n_head, 2 * length, width)
    arrays = {"query": query, "key": key, "value": key}
    if positions:
        arrays["position_key"] = array(n_head, visibility.n_positions, width)
        arrays |= {name: array(n_head, width) for name in ("content_bias", "position_bias")}

    def run(arrays, visibility, seed, gradient):
        dropout = None if rate is None else Dropout(rate=rate, seed=seed, n_head=n_head)
        options = {"tile": default_tile(problem), "kernel": kernel_of(problem)}
        attend = functools.partial(tpu_attention, visibility=visibility, dropout=dropout, **options)
        out, gradients_of = jax.vjp(lambda arrays: attend(**arrays), arrays)
        return out, gradients_of(gradient)

    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=place)
    return jax.jit(run).lower(arrays, visibility, seed, query).compile()


def assert_no_scores(program, preset, batch=BATCH):
    """Asserts that no buffer has B x H x L x K numbers, in any order of the axes."""
    n_head, length, *_ = TRAINING[preset]
    scores = batch * n_head * length * 2 * length
    shapes = re.findall(r"(?:f32|bf16|s32|u32|pred)\[([\d,]+)\]", program.as_text())
    sizes = {shape: functools.reduce(int.__mul__, map(int, shape.split(","))) for shape in set(shapes)}
    assert max(sizes.values()) < scores / 2, max(sizes, key=sizes.get)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("preset", TRAINING)
@pytest.mark.parametrize("chip", CHIPS)
def test_training_shapes_compile_without_the_scores(chip, preset, dtype):
    assert_no_scores(compiled(chip, preset, dtype), preset)


@pytest.mark.parametrize("options", [{"rate": 0.1}, {"causal": False}, {"positions": False}], ids=str)
@pytest.mark.parametrize("chip", CHIPS)
def test_dropout_both_directions_and_no_positions_compile(chip, options):
    assert_no_scores(compiled(chip, "enwik8_24l", "bfloat16", **options), "enwik8_24l")


def test_64_rows_need_hardly_more_memory_than_their_arrays():
    program = compiled("v5e:1x1", "enwik8_24l", "bfloat16", batch=64)
    assert program.memory_analysis().temp_size_in_bytes < 20e6  # The reference: 9.9 GB.


def test_what_is_read_and_written_is_a_tenth_of_what_the_reference_does():
    assert compiled("v5e:1x1", "enwik8_24l", "bfloat16").cost_analysis()["bytes accessed"] < 429e6


def test_shards_of_a_slice_compile_without_the_scores_and_only_sum_gradients():
    n_head, length, _, width, _ = TRAINING["wt103_base"]
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2), devices_of("v5e:2x2"))
    implementation = Implementation("fused", "mosaic_roll", Tile(160, 384))

    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, PartitionSpec(*spec)))

    both, heads = ("data", "tensor"), ("tensor",)
    query, key = (array(8, n_head, n, width, spec=both) for n in (length, 2 * length))
    biases = {name: array(n_head, width, spec=heads) for name in ("content_bias", "position_bias")}
    arrays = {"query": query, "key": key, "value": key, **biases}
    arrays["position_key"] = array(n_head, 2 * length, width, spec=heads)

    def run(arrays, gradient):
        dropout = Dropout(rate=0.1, seed=jnp.uint32(1), n_head=n_head)
        visibility = Visibility(jnp.zeros(8, jnp.int32), length, length)
        attend = functools.partial(attention, visibility=visibility, dropout=dropout, implementation=implementation)
        return jax.vjp(lambda arrays: attend(**arrays), arrays)[1](gradient)

    with sharding.use_mesh(mesh):
        program = jax.jit(run).lower(arrays, query).compile()
    assert_no_scores(program, "wt103_base", batch=4)
    assert set(re.findall(r"all-[a-z]+|collective-permute|reduce-scatter", program.as_text())) == {"all-reduce"}
