"""The cached kernel through Mosaic, for chips that are not there: at evaluation shapes, without scores in memory."""

import functools
import importlib.util
import math
import re

import jax
import pytest

from experiments.bench.aot_environment import set_environment
from txl_jax.bench import tpu_topologies
from txl_jax.ops.attention import CachedVisibility
from txl_jax.ops.attention.problem import Problem
from txl_jax.ops.attention.tpu.cached import tpu_cached_attention
from txl_jax.ops.attention.tpu.limits import default_tile, refusal

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install 'jax[tpu]'"
)

CHIPS = ("v4:2x2x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1")
# Heads, E, L, R, P.
PRESETS = {
    "enwik8_12l": (8, 64, 80, 2160, 821),
    "enwik8_24l": (8, 128, 128, 3840, 1001),
    "enwik8_24l, no clamp": (8, 128, 128, 3840, 3968),
    "wt103_base": (10, 41, 64, 640, 401),
    "wt103_large": (16, 64, 128, 1664, 1001),
    "absolute positions": (8, 64, 128, 640, 0),
    "no cache": (8, 64, 300, 0, 300),
}


@pytest.fixture(autouse=True)
def _no_compilation_cache():
    """Programs that were compiled for a chip that is not there cannot be loaded again."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@functools.cache
def _device(chip):
    set_environment()
    return tpu_topologies.devices(chip)[0]


def compiled(chip, preset, dtype, *, batch=1, cache_dtype=None, window=None):
    """Compiles the kernel with its default tile for a chip."""
    n_head, width, segment_len, capacity, n_positions = PRESETS[preset]
    device = _device(chip)
    place = jax.sharding.SingleDeviceSharding(device)
    problem = Problem(
        "tpu",
        device.device_kind,
        dtype,
        batch,
        n_head,
        segment_len,
        capacity + segment_len,
        width,
        n_positions,
        capacity=capacity,
        cache_dtype=cache_dtype,
    )
    assert refusal(problem) is None

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    own = array(batch, n_head, segment_len, width)
    stored = cache_dtype or dtype
    ring = (
        array(batch, n_head, width, capacity, dtype=stored),
        array(batch, n_head, capacity, width, dtype=stored),
    )
    position = (own, array(n_head, width, n_positions), None) if n_positions else None
    visibility = CachedVisibility(array(batch, dtype="int32"), array(dtype="int32"), segment_len, capacity, window)
    run = functools.partial(tpu_cached_attention, tile=default_tile(problem))
    return jax.jit(run).lower(own, own, own, ring, position, visibility).compile()


def assert_no_scores(program, preset, batch=1):
    """Asserts that nothing of the size of the scores is written to memory, nor a ring.

    On-chip memory, into which XLA fetches arrays ahead where they fit, has an S in its layout. For E 41 XLA puts
    another axis than E beside the slots, and does copy rings where they are arguments of a program.
    """
    n_head, width, segment_len, capacity, _ = PRESETS[preset]
    scores, ring = batch * n_head * segment_len * (capacity + segment_len), batch * n_head * width * capacity
    made = re.findall(r"= \(?\w+\[([\d,]+)\](\{\S*\})? (?!parameter|bitcast)", program.as_text())
    sizes = {math.prod(map(int, shape.split(","))) for shape, layout in made if "S(" not in layout}
    assert max(sizes - {ring}) < scores / 2
    if capacity and width % 8 == 0:
        assert ring not in sizes
        assert program.memory_analysis().temp_size_in_bytes < 4 * scores


@pytest.mark.parametrize("chip", CHIPS)
def test_the_kernel_compiles_on_every_generation(chip):
    assert_no_scores(compiled(chip, "enwik8_12l", "bfloat16"), "enwik8_12l")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("chip", CHIPS)
def test_evaluation_shapes_compile_without_the_scores(chip, preset, dtype):
    assert_no_scores(compiled(chip, preset, dtype), preset)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_a_cache_in_bfloat16_and_a_window_compile(chip):
    program = compiled(chip, "enwik8_12l", "float32", batch=16, cache_dtype="bfloat16", window=2100)
    assert_no_scores(program, "enwik8_12l", batch=16)
