"""The cached kernel through Mosaic, for chips that are not there: at evaluation shapes, without scores in memory."""

import functools
import math
import re

import jax
import pytest

from ops.attention.tpu.test_compiled import CHIPS, device_of, no_compilation_cache  # noqa: F401 (a fixture)
from txl_jax.ops.attention import CachedVisibility
from txl_jax.ops.attention.problem import Problem
from txl_jax.ops.attention.tpu.cached import tpu_cached_attention
from txl_jax.ops.attention.tpu.geometry import default_tile, refusal

pytestmark = pytest.mark.nightly(part="tpu")

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


def compiled(chip, preset, dtype, *, batch=1, cache_dtype=None, window=None):
    """Compiles the kernel with its default tile for a chip."""
    n_head, width, segment_len, capacity, n_positions = PRESETS[preset]
    device = device_of(chip)
    place = jax.sharding.SingleDeviceSharding(device)
    sizes = (batch, n_head, segment_len, capacity + segment_len, width, n_positions)
    problem = Problem("tpu", device.device_kind, dtype, *sizes, capacity=capacity, cache_dtype=cache_dtype)
    assert refusal(problem) is None

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    own = array(batch, n_head, segment_len, width)
    stored = cache_dtype or dtype
    ring = (array(batch, n_head, width, capacity, dtype=stored), array(batch, n_head, capacity, width, dtype=stored))
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("chip", CHIPS)
def test_evaluation_shapes_compile_without_the_scores(chip, preset, dtype):
    assert_no_scores(compiled(chip, preset, dtype), preset)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_cache_in_bfloat16_and_a_window_compile(chip):
    program = compiled(chip, "enwik8_12l", "float32", batch=16, cache_dtype="bfloat16", window=2100)
    assert_no_scores(program, "enwik8_12l", batch=16)
