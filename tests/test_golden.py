"""Tests the model against the original's reference values: losses, hidden states, memories,
gradients.

With every implementation of attention: whole scores and tiles in float64, to 1e-9; kernels,
interpreted, in float32. A difference here means that the mathematics of the model changed. Read
tests/golden/README.md first.
"""

import contextlib
import itertools
import json
import os
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import foreign
from support.tiny import enable_x64
from txl_jax.config import (
    CompatConfig,
    DropoutConfig,
    DType,
    Encoding,
    MemoryStart,
    ModelConfig,
    NormPlace,
    ShawTerms,
)
from txl_jax.interop import original
from txl_jax.interop.original import Format
from txl_jax.memory import Memory
from txl_jax.modules.attention import Attention
from txl_jax.modules.block import Block
from txl_jax.modules.positions import encoding_of
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import AttentionPaths, Implementation, Tile
from txl_jax.ops.attention.distances import key_distances, sinusoids

FOLDER = pathlib.Path(os.environ.get("TXL_GOLDEN_DIR") or pathlib.Path(__file__).parent / "golden")
FILES = sorted(FOLDER.glob("*.npz"))
LENGTHS = ("tgt_len", "ext_len", "mem_len")
TOLERANCE = {np.float64: 1e-9, np.float32: 2e-5}  # Of the largest entry of each tensor.
# Tiles that are smaller than the segments, and do not divide them.
EXACT = {
    "reference": Implementation("reference"),
    "tiled": Implementation("tiled", tile=Tile(3, 5)),
}
EXACT["stored"] = Implementation("stored")
KERNELS = {"tpu": Implementation("fused", "mosaic_roll", Tile(16, 128), interpret=True)}
# Cases by path that the default tests compute besides all of the reference.
QUICK = {
    "tiled": ("s06_same_length-empty", "s08_clamp-empty", "s20_odd_heads-empty"),
    "stored": ("s06_same_length-empty", "s17_shaw-empty"),
    "tpu": ("s06_same_length-empty", "s20_odd_heads-empty"),
}
ENCODINGS = {0: Encoding.RELATIVE, 1: Encoding.SHAW, 2: Encoding.VASWANI, 3: Encoding.AL_RFOU}


def runs_with_paths():
    """Every run with each path, of kernels those with relative encodings.

    All but the quick ones are nightly.
    """
    for file in FILES:
        golden = json.loads(str(np.load(file)["config_json"]))
        by_kernels = ENCODINGS[golden["attn_type"]] is Encoding.RELATIVE and not golden["ext_len"]
        for start, path in itertools.product(
            golden["initial_memory"], EXACT | KERNELS if by_kernels else EXACT
        ):
            name = f"{file.stem}-{start}"
            marks = (
                ()
                if path not in QUICK or name in QUICK[path]
                else pytest.mark.nightly(part="cases")
            )
            yield pytest.param(file, start, path, id=f"{name}-{path}", marks=marks)


assert FILES, f"no .npz file in {FOLDER}"


@pytest.mark.parametrize(("file", "start", "path"), list(runs_with_paths()))
def test_golden(file, start, path):
    """Every segment of a run, and the gradients of one."""
    arrays = dict(np.load(file))
    golden = json.loads(str(arrays["config_json"]))
    if golden["ext_len"] > 0:
        pytest.skip(f"ext_len {golden['ext_len']}: no published run uses an extended context")
    prefix, format = (
        "" if start == golden["initial_memory"][0] else f"{start}/",
        Format(golden["library"]),
    )
    with enable_x64(path in EXACT):
        model, params = load(arrays, golden, start, path)
        assert original.aliases(model.config, format) == golden["aliases"]
        for k, found in enumerate(run_segments(params, arrays, golden, model)):
            check_segment(found, k, arrays, golden, prefix)
            if k == golden["grad_segment"]:
                gradients = original.from_flax(found["gradients"], model.config, format=format)
                expected = under(arrays, f"{prefix}grad/")
                assert expected.keys() == set(under(arrays, "param/")) - set(
                    original.aliases(model.config, format)
                )
                for name, value in expected.items():
                    assert_close(gradients[name], value, f"gradient of {name}")
                for name, value in under(arrays, "buffer/").items():
                    exact = gradients[name].dtype == np.float64
                    np.testing.assert_allclose(
                        gradients[name], value, rtol=1e-15 if exact else 1e-6
                    )


def load(arrays, golden, start, path):
    implementation, dtype = (
        (EXACT | KERNELS)[path],
        DType.FLOAT64 if path in EXACT else DType.FLOAT32,
    )
    config, tensors = (
        config_of(golden, start, dtype),
        under(arrays, "param/") | under(arrays, "buffer/"),
    )
    params = foreign.to_flax(
        tensors, config, vocab_size=golden["n_token"], format=Format(golden["library"])
    )
    model = TransformerXL(
        config, golden["n_token"], attention=AttentionPaths(implementation, implementation)
    )
    return model, jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)


def config_of(golden: dict, start: str, dtype: DType) -> ModelConfig:
    same = (
        "n_layer",
        "d_model",
        "n_head",
        "d_head",
        "d_inner",
        "d_embed",
        "div_val",
        "tie_weight",
        "untie_r",
    )
    model = ModelConfig(
        **{name: golden[name] for name in same},
        layer_norm=NormPlace.PRE if golden["pre_lnorm"] else NormPlace.POST,
        encoding=ENCODINGS[golden["attn_type"]],
        num_positions=sum(golden[f"built_{name}"] for name in LENGTHS)
        if golden["attn_type"] in (1, 3)
        else None,
        cutoffs=tuple(golden["cutoffs"]),
        tie_projs=tuple(golden["tie_projs"]),
        dropout=DropoutConfig(rate=0.0),
        dtype=dtype,
        compat=CompatConfig(
            memory_start=MemoryStart.ZEROS if start == "zeros" else MemoryStart.MASKED,
            layer_norm_eps=golden["layer_norm_eps"],
            shaw_terms=ShawTerms.ORIGINAL,
            final_norm=False,
        ),
    )
    model.validate()
    return model


def clamp_len(golden: dict) -> int | None:
    """The clamp here: the original's tables of Shaw have distances 0 up to one less than with
    sinusoids.
    """
    return golden["clamp_len"] - (golden["attn_type"] == 1) if golden["clamp_len"] > 0 else None


def run_segments(params, arrays, golden, model):
    """Yields nll, hidden, memory after, and gradients of the mean nll, segment after segment.

    Where we leave the original's absolute positions on purpose (tests/golden/README.md, oddities),
    adapters do here as it does, so that all segments and the gradients can be compared.
    """
    config = model.config
    absolute = not encoding_of(config).generates_by_token
    lengths = {
        "clamp_len": clamp_len(golden),
        "same_length": golden["same_length"],
        "deterministic": True,
    }

    def mean_nll(params, tokens, targets, memory):
        variables = {"params": params}
        if absolute:
            memory = with_more_positions(
                memory, params, config, tokens.shape[1], lengths["clamp_len"]
            )
        before_the_norm = absolute and config.layer_norm is NormPlace.PRE
        with queries_before_the_norm() if before_the_norm else contextlib.nullcontext():
            hidden, memory = model.apply(variables, tokens, memory, **lengths)
        nll = model.apply(variables, hidden, targets, method=model.nll)
        return nll.mean(), {"nll": nll, "hidden": hidden, "memory": memory}

    step = jax.jit(jax.value_and_grad(mean_nll, has_aux=True))
    memory = model.init_memory(batch_size=golden["bsz"], mem_len=golden["mem_len"])
    for k in range(len(golden["seg_lens"])):
        tokens, targets = (jnp.asarray(arrays[f"seg{k}/{name}"].T) for name in ("input", "target"))
        (_, found), gradients = step(params, tokens, targets, memory)
        memory = found["memory"]
        yield found | {"gradients": gradients}


def with_more_positions(
    memory: Memory, params, config: ModelConfig, segment_len: int, clamp_len: int
) -> Memory:
    """Positions added to the stored inputs (of the first layer, or of all), where those of earlier
    segments stay.
    """
    _, _, mem_len, d_model = memory.hidden.shape
    distances = key_distances(mem_len + segment_len, clamp_len=config.clamp(clamp_len))[:mem_len]
    if config.encoding is Encoding.AL_RFOU:
        vectors = params["stack"]["layers"]["positions"]["vector"][:, distances]
        return memory.replace(hidden=memory.hidden + vectors[:, None])
    codes = sinusoids(distances, d_model, memory.hidden.dtype)
    return memory.replace(hidden=memory.hidden.at[0].add(codes[None]))


@contextlib.contextmanager
def queries_before_the_norm():
    """Queries come from a layer's inputs as they are, where keys and values come from normed
    ones.
    """
    inputs = None

    def interceptor(call, args, kwargs, context):
        nonlocal inputs
        if context.method_name == "__call__" and isinstance(context.module, Block):
            inputs = args[0]
        if context.method_name == "__call__" and isinstance(context.module, Attention):
            args = (inputs, *args[1:])
        return call(*args, **kwargs)

    with nn.intercept_methods(interceptor):
        yield


def check_segment(found: dict, k: int, arrays: dict, golden: dict, prefix: str) -> None:
    assert_close(found["nll"].T, arrays[f"{prefix}seg{k}/nll"], f"nll of segment {k}")
    assert_close(
        found["hidden"].swapaxes(0, 1),
        arrays[f"{prefix}seg{k}/hidden"],
        f"hidden states of segment {k}",
    )
    memory = found["memory"]
    if golden["mem_len"] == 0:
        assert memory.hidden.size == 0
        return
    expected = arrays[f"{prefix}seg{k}/mems"][: golden["n_layer"]].swapaxes(1, 2)
    n_filled = expected.shape[2]
    np.testing.assert_array_equal(memory.valid, np.full(golden["bsz"], n_filled))
    assert_close(
        memory.hidden[:, :, memory.mem_len - n_filled :], expected, f"memory after segment {k}"
    )


def assert_close(found, expected: np.ndarray, what: str) -> None:
    found = np.asarray(found)
    assert expected.dtype == np.float64, what
    assert found.shape == expected.shape, what
    worst, largest = np.abs(found - expected).max(), np.abs(expected).max()
    limit = TOLERANCE[found.dtype.type] * largest
    assert worst <= limit, f"{what}: off by {worst:.2e}, largest entry {largest:.2e}"


def under(arrays: dict, prefix: str) -> dict:
    return {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }
