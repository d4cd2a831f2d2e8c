"""Tests inference with int8 weights and a narrow KV cache against the same numbers in float64."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but, nightly_but
from txl_jax.config import (
    DType,
    Encoding,
    EvalConfig,
    ExperimentConfig,
    GenerateConfig,
    NormPlace,
    WeightDType,
)
from txl_jax.errors import UserError
from txl_jax.inference import forward
from txl_jax.inference.decode import BlockRows, Sampling, row_key
from txl_jax.ops.matmul import Int8, Int8Table
from txl_jax.runs.build import build
from txl_jax.sharding.mesh import DATA, FSDP, TENSOR

MODELS = {
    "post": {},
    "pre": {"layer_norm": NormPlace.PRE},
    "adaptive": {"cutoffs": (4, 9), "div_val": 2, "d_embed": 8, "tie_projs": (False, True, True)},
    "shaw": {"encoding": Encoding.SHAW, "num_positions": 9},
}
# Segment and memory.
LENGTHS = {"segments": (4, 10), "one token": (1, 6)}


def prepared(model, segment_len, mem_len, weight_dtype=WeightDType.INT8):
    return tiny.prepared(
        model,
        tiny.variables(model),
        same_length=True,
        segment_len=segment_len,
        mem_len=mem_len,
        weight_dtype=weight_dtype,
    )


def dequantized(params):
    """The same parameters as arrays of float64."""

    def dense(leaf):
        if isinstance(leaf, Int8Table):
            return leaf.columns.dequantize(jnp.float64).T
        if isinstance(leaf, Int8):
            return leaf.dequantize(jnp.float64)
        return leaf

    @jax.jit
    def all_dense(params):
        return jax.tree.map(dense, params, is_leaf=lambda leaf: isinstance(leaf, Int8 | Int8Table))

    return all_dense(params)


def scores(weights, segment_len, mem_len, *, cache_dtype=None):
    """Nats [B, 8 L] of a text, and the last cache."""
    cache = forward.init_cache(
        weights,
        batch_size=tiny.B,
        mem_len=mem_len,
        segment_len=segment_len,
        dtype=cache_dtype,
    )

    def read(tokens, targets, cache):
        _, nats, cache = tiny.read_cached(weights, tokens, targets, cache)
        return nats, cache

    return tiny.over_segments(read, cache, tiny.text(8 * segment_len + 1), segment_len)


def count_tables(clusters):
    """How many matrices the clusters of embedding and softmax have."""
    count = 0
    for cluster in clusters:
        count += cluster.table is not None
        count += cluster.projection is not None
    return count


@pytest.mark.parametrize(
    ("name", "lengths"), nightly_but([("adaptive", "segments")], itertools.product(MODELS, LENGTHS))
)
def test_int8_weights_give_the_numbers_of_their_values_in_float64(name, lengths, x64):
    model = tiny.make(dtype=DType.FLOAT64, **MODELS[name])
    segment_len, mem_len = LENGTHS[lengths]
    weights = prepared(model, segment_len, mem_len)
    n_int8 = sum(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(weights))
    # A layer has matrices for queries, keys and values together, for attention's output, two of the
    # feed-forward network, and position keys.
    assert n_int8 == 5 * len(weights.layers) + count_tables(weights.clusters)
    plain_weights = prepared(model, segment_len, mem_len, weight_dtype=None)

    in_int8, _ = scores(weights, segment_len, mem_len)
    of_their_values, _ = scores(dequantized(weights), segment_len, mem_len)
    plain, _ = scores(plain_weights, segment_len, mem_len)

    # The first numbers differ because rows are rounded to 16 bits in products with int8. In nats: a
    # token of some of these models moves by 0.35, the mean of no model by more than 0.02.
    rounding = np.abs(in_int8 - of_their_values).max()
    quantization = np.abs(of_their_values - plain).mean()
    assert 0 < rounding < 1e-3 < quantization < 0.04


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    full_but([("int8", "segments")], itertools.product(("int8", "bfloat16"), LENGTHS)),
)
def test_a_narrow_cache_moves_scores_a_little(dtype, lengths, x64):
    """Stored as bfloat16, numbers carry 8 bits: about 1 part in 300 each.

    The least differences show that scores are read from what is stored.
    """
    least = {"int8": 1e-5, "bfloat16": 1e-4}[dtype]
    segment_len, mem_len = LENGTHS[lengths]
    model = tiny.make(dtype=DType.FLOAT64)
    weights = prepared(model, segment_len, mem_len, weight_dtype=None)

    in_narrow_cache, cache = scores(weights, segment_len, mem_len, cache_dtype=jnp.dtype(dtype))
    expected, _ = scores(weights, segment_len, mem_len)

    for ring in (*cache.keys, *cache.values):
        stored = getattr(ring, "values", ring)
        assert stored.dtype.name == dtype
    assert least < np.abs(in_narrow_cache - expected).max() < 0.1


def generation_step(model, weight_dtype):
    """The compiled step with which a generator decodes four tokens."""
    lengths = EvalConfig(segment_len=4, mem_len=8, clamp_len=None, weight_dtype=weight_dtype)
    generator = tiny_run.generator(model, lengths)
    cache, known, number = generator.read(np.arange(5), GenerateConfig())
    rows = BlockRows(
        known=known,
        number=number,
        steps=np.full(1, 4, np.int32),
        key=row_key(0)[None],
        stop=np.int32(-1),
    )
    lowered = generator.decode.lower(generator.for_tokens, cache, rows, Sampling(0, 1), count=4)
    return lowered.compile()


def floats_of_sizes(text, sizes):
    """The shapes of floating-point arrays in a program that have so many numbers."""
    shapes = set()
    for shape in re.findall(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]", text):
        size = math.prod(int(n) for n in shape.split(","))
        if size in sizes:
            shapes.add(shape)
    return shapes


@pytest.mark.full
def test_generation_holds_no_wider_copy_of_its_weights():
    """In the compiled step no floating-point array has the shape of a matrix, nor do parts of them
    add up to one.
    """
    model = tiny.make(d_model=64, n_head=2, d_head=32, d_inner=256)
    # Queries, keys and values together, attention's output, and the feed-forward network.
    matrices = {64 * 192, 64 * 64, 64 * 256}

    compiled = generation_step(model, WeightDType.INT8)

    text = compiled.as_text()
    assert "s8[64,256]" in text
    assert floats_of_sizes(text, matrices) == set()
    # The bytes of the largest matrix in int8, a quarter of its bytes in float32.
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 256
    # Without int8 the comparison finds the matrices.
    assert floats_of_sizes(generation_step(model, None).as_text(), matrices)


def test_a_mesh_of_several_devices_is_refused_before_anything_is_compiled():
    mesh = jax.sharding.AbstractMesh((2, 1, 1), (DATA, FSDP, TENSOR))
    config = ExperimentConfig(model=tiny.CONFIG, eval=EvalConfig(weight_dtype=WeightDType.INT8))
    with pytest.raises(UserError, match=r"mesh of 2.*mesh\.data=1"):
        build(config, vocab_size=tiny.V, mesh=mesh)
