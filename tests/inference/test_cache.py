"""Tests how the KV cache is written on each platform, and under `vmap`."""

import functools
import importlib.metadata
import operator
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from experiments.bench import topologies
from support import tiny
from txl_jax.config import DType
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import forward
from txl_jax.inference.cache import KVCache
from txl_jax.inference.decode import (
    BlockRows,
    Sampling,
    decode_block,
    prefill,
    prefill_row,
    row_key,
)

PLATFORMS = ("cpu", "cuda", "tpu")
SEGMENT_LEN = 4
MEM_LEN = 8


def prepared(*, mem_len=MEM_LEN, **sizes):
    """Prepared parameters of a model in bfloat16."""
    model = tiny.make(dtype=DType.BFLOAT16, **sizes)
    variables = tiny.variables(model)
    return tiny.prepared(model, variables, segment_len=SEGMENT_LEN, mem_len=mem_len, clamp_len=None)


def empty_cache(weights, n_row, *, index_per_row=False) -> KVCache:
    """An empty cache. The server's rows each have their own position in the ring."""
    mem_len = weights.max_keys - SEGMENT_LEN
    cache = forward.init_cache(weights, batch_size=n_row, mem_len=mem_len, segment_len=SEGMENT_LEN)
    if index_per_row:
        return cache.replace(write_index=jnp.arange(n_row, dtype=jnp.int32))
    return cache


def cache_shapes(weights, n_row, *, index_per_row=False) -> KVCache:
    """The shapes of an empty cache, with which a function is traced."""
    make_cache = functools.partial(empty_cache, n_row=n_row, index_per_row=index_per_row)
    return jax.eval_shape(make_cache, weights)


def decoding(weights, *, index_per_row):
    """The function and the arguments with which generation, or the server, writes two texts."""
    zeros = np.zeros(2, np.int32)
    rows = BlockRows(
        known=zeros[:, None],
        number=zeros,
        steps=zeros + 3,
        key=np.stack([row_key(0)] * 2),
        stop=np.int32(-1),  # No token stops a row.
    )
    sampling = Sampling(temperature=1.0, top_p=1.0)
    function = functools.partial(decode_block, sampling=sampling, count=3)
    return function, (weights, cache_shapes(weights, 2, index_per_row=index_per_row), rows)


def reading(weights):
    """The function and the arguments with which a segment of two prompts is read."""
    tokens = jnp.zeros((2, SEGMENT_LEN), jnp.int32)
    return prefill, (weights, cache_shapes(weights, 2), tokens)


def reading_one_row(weights):
    """The function and the arguments with which the server reads three tokens into row 1."""
    cache = cache_shapes(weights, 3, index_per_row=True)
    tokens = jnp.zeros(SEGMENT_LEN, jnp.int32)
    return prefill_row, (weights, cache, jnp.int32(1), tokens, jnp.int32(3))


# The programs that write to a cache.
PROGRAMS = {
    "generation": functools.partial(decoding, index_per_row=False),
    "server": functools.partial(decoding, index_per_row=True),
    "prompt": reading,
    "prompt of one row": reading_one_row,
}


def lowered_texts(program, **sizes):
    """The text of a program of a model of these sizes, for each platform.

    The platform is the one that is compiled for: this process runs on a CPU in all cases. Nothing
    is compiled or run.
    """
    weights = jax.eval_shape(lambda: prepared(**sizes))
    function, arguments = program(weights)
    traced = jax.jit(function, donate_argnums=1).trace(*arguments)
    texts = {}
    for platform in PLATFORMS:
        texts[platform] = traced.lower(lowering_platforms=(platform,)).as_text()
    return texts


@pytest.mark.parametrize("program", PROGRAMS)
def test_bfloat16_is_written_as_integers_on_a_cpu_only(program):
    """A CPU would copy the ring to float32 for an update, and a TPU would copy it for integers."""
    texts = lowered_texts(PROGRAMS[program], n_layer=1)

    assert "xui16>" in texts["cpu"]
    assert "xui16>" not in texts["cuda"]
    assert "xui16>" not in texts["tpu"]


@pytest.mark.parametrize(("d_head", "n_constrained"), [(128, 4), (64, 0)], ids=["128", "64"])
def test_a_step_keeps_the_layout_of_whole_tiles_on_a_tpu_only(d_head, n_constrained):
    """Keys and values of two layers, if heads fill the 128 columns of a TPU's tile.

    Narrower heads would be padded.
    """
    texts = lowered_texts(PROGRAMS["generation"], n_layer=2, n_head=1, d_head=d_head)

    assert texts["cpu"].count("@LayoutConstraint") == 0
    assert texts["cuda"].count("@LayoutConstraint") == 0
    assert texts["tpu"].count("@LayoutConstraint") == n_constrained


@pytest.fixture
def no_compilation_cache():
    """Programs that were compiled for a chip that is not there cannot be loaded again."""
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX decides once, at the first program that it compiles.
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.nightly(part="tpu")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_tpu_writes_to_the_cache_in_place(program, no_compilation_cache):
    """No copy and no conversion of a whole ring in the loop over tokens, at a memory of 3,800."""
    importlib.metadata.version("libtpu")
    topologies.set_environment()
    device = topologies.devices("v5e:1x1")[0]
    weights = prepared(mem_len=3800, d_model=256, n_head=8, d_head=128, d_inner=256)
    function, arguments = PROGRAMS[program](weights)

    def on_device(array):
        sharding = SingleDeviceSharding(device)
        return jax.ShapeDtypeStruct(np.shape(array), array.dtype, sharding=sharding)

    traced = jax.jit(function, donate_argnums=1).trace(*jax.tree.map(on_device, arguments))
    text = traced.lower().compile().as_text()

    assert text.count("u16[") == 0
    # Outside of the loops, once in a call, rings may be copied to another layout.
    for name in re.findall(r"body=%([\w.-]+)", text):
        (body,) = re.findall(rf"^%{re.escape(name)} .*?^}}", text, re.MULTILINE | re.DOTALL)
        assert not re.findall(r"= bf16\[[\d,]*3800[\d,]*\]\S* (?:copy|bitcast-convert)\(.*", body)


def random_states(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def write_segment(cache: KVCache, new: jax.Array) -> KVCache:
    """Writes the same tokens [B, H, L, E] as keys and as values of all layers."""
    states = [new] * len(cache.keys)
    return cache_lib.write(cache, states, states, after=new)


def written(cache: KVCache, new: jax.Array) -> KVCache:
    """Does the same in float32, which is written as it is and holds every number of bfloat16."""

    def convert(cache, dtype):
        keys, values = jax.tree.map(lambda ring: ring.astype(dtype), (cache.keys, cache.values))
        return cache.replace(keys=keys, values=values)

    wide = write_segment(convert(cache, jnp.float32), new.astype(jnp.float32))
    return convert(wide, jnp.bfloat16)


def test_an_exported_write_of_bfloat16_runs_on_every_platform():
    """A program for several platforms decides when it runs. It runs on this CPU."""
    # The second segment is written.
    cache = empty_cache(prepared(), 2).replace(write_index=jnp.int32(SEGMENT_LEN))
    arrays, structure = jax.tree.flatten(cache)
    new = random_states(2, tiny.H, SEGMENT_LEN, tiny.E)

    @jax.jit
    def write_arrays(arrays, new):
        return jax.tree.leaves(write_segment(jax.tree.unflatten(structure, arrays), new))

    exported = jax.export.export(write_arrays, platforms=PLATFORMS)(arrays, new)
    exported_arrays = exported.call(arrays, new)
    expected = jax.tree.leaves(written(cache, new))
    jax.tree.map(np.testing.assert_array_equal, exported_arrays, expected)


def test_a_write_under_vmap_equals_a_write_to_each_cache():
    """The caches have different indices."""
    empty = empty_cache(prepared(), 2)
    caches = [empty.replace(write_index=jnp.int32(index)) for index in (SEGMENT_LEN, 0)]
    new = random_states(len(caches), 2, tiny.H, SEGMENT_LEN, tiny.E)

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
    all_written = jax.jit(jax.vmap(write_segment))(stacked, new)

    for number, cache in enumerate(caches):
        member = jax.tree.map(operator.itemgetter(number), all_written)
        jax.tree.map(np.testing.assert_array_equal, member, written(cache, new[number]))
