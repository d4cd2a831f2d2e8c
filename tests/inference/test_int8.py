"""Tests inference with int8 weights and an int8 KV cache against the same numbers in float64."""

import itertools
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
LENGTHS = {"segments": (4, 10), "one token": (1, 6)}


def prepared(model, segment_len, mem_len, weight_dtype=WeightDType.INT8):
    lengths = {"segment_len": segment_len, "mem_len": mem_len, "weight_dtype": weight_dtype}
    return tiny.prepared(model, tiny.variables(model), same_length=True, **lengths)


def dequantized(params):
    """The same parameters as arrays of float64."""

    def dense(leaf):
        if isinstance(leaf, Int8Table):
            return leaf.columns.dequantize(jnp.float64).T
        return leaf.dequantize(jnp.float64) if isinstance(leaf, Int8) else leaf

    return jax.tree.map(dense, params, is_leaf=lambda leaf: isinstance(leaf, Int8 | Int8Table))


def scores(weights, segment_len, mem_len, *, cache_dtype=None):
    """Nats [B, 8 L] of a text, and the last cache."""
    sizes = {"batch_size": tiny.B, "mem_len": mem_len, "segment_len": segment_len}
    cache = forward.init_cache(weights, dtype=cache_dtype, **sizes)
    read = lambda *of: tiny.read_cached(weights, *of)[1:]  # noqa: E731
    return tiny.over_segments(read, cache, tiny.text(8 * segment_len + 1), segment_len)


@pytest.mark.parametrize(
    ("name", "lengths"), nightly_but([("adaptive", "segments")], itertools.product(MODELS, LENGTHS))
)
def test_int8_weights_give_the_numbers_of_their_values_in_float64(name, lengths, x64):
    model, lengths = tiny.make(dtype=DType.FLOAT64, **MODELS[name]), LENGTHS[lengths]
    weights = prepared(model, *lengths)
    tables = [
        each for of in weights.clusters for each in (of.table, of.projection) if each is not None
    ]
    assert sum(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(weights)) == 5 * len(
        weights.layers
    ) + len(tables)
    found, _ = scores(weights, *lengths)
    expected, _ = scores(dequantized(weights), *lengths)
    plain, _ = scores(prepared(model, *lengths, weight_dtype=None), *lengths)
    # Nats. A token of some of these models moves by 0.35, the mean of none by more than 0.02.
    rounding, quantization = np.abs(found - expected).max(), np.abs(expected - plain).mean()
    assert 0 < rounding < 1e-3 < quantization < 0.04


@pytest.mark.parametrize(
    ("dtype", "lengths"),
    full_but([("int8", "segments")], itertools.product(("int8", "bfloat16"), LENGTHS)),
)
def test_a_narrow_cache_moves_scores_a_little(dtype, lengths, x64):
    """Stored as bfloat16, numbers carry 8 bits: about 1 part in 300 each."""
    model, lengths = tiny.make(dtype=DType.FLOAT64), LENGTHS[lengths]
    weights = prepared(model, *lengths, weight_dtype=None)
    found, memory = scores(weights, *lengths, cache_dtype=jnp.dtype(dtype))
    expected, _ = scores(weights, *lengths)
    rings = [getattr(ring, "values", ring) for ring in (*memory.keys, *memory.values)]
    assert {ring.dtype.name for ring in rings} == {dtype}
    assert {"int8": 1e-5, "bfloat16": 1e-4}[dtype] < np.abs(found - expected).max() < 0.1


@pytest.mark.full
def test_generation_holds_no_wider_copy_of_its_weights():
    """In the compiled step no floating-point array has the shape of a matrix, nor do parts of them
    add up to one.
    """
    model = tiny.make(d_model=64, n_head=2, d_head=32, d_inner=256)
    sizes = {64 * 192, 64 * 64, 64 * 256}

    def step(**weight_dtype):
        lengths = EvalConfig(segment_len=4, mem_len=8, clamp_len=None, **weight_dtype)
        generator = tiny_run.generator(model, lengths)
        cache, given, number = generator.read(np.arange(5), GenerateConfig())
        rows = BlockRows(given, number, np.full(1, 4, np.int32), row_key(0)[None], np.int32(-1))
        return generator.decode.lower(
            generator.for_tokens, cache, rows, Sampling(0, 1), count=4
        ).compile()

    def wide(text):
        shapes = re.findall(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]", text)
        return {shape for shape in shapes if np.prod([int(n) for n in shape.split(",")]) in sizes}

    compiled = step(weight_dtype=WeightDType.INT8)
    assert "s8[64,256]" in compiled.as_text() and not wide(compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 256
    assert wide(step().as_text())


def test_a_mesh_of_several_devices_is_refused_before_anything_is_compiled():
    mesh = jax.sharding.AbstractMesh((2, 1, 1), (DATA, FSDP, TENSOR))
    config = ExperimentConfig(model=tiny.CONFIG, eval=EvalConfig(weight_dtype=WeightDType.INT8))
    with pytest.raises(UserError, match=r"mesh of 2.*mesh\.data=1"):
        build(config, vocab_size=tiny.V, mesh=mesh)
