"""Tests that losses, states, memories and gradients match the original Transformer-XL.

Every implementation of attention is compared with the recorded values: whole scores and tiles in
float64, to 1e-9, and kernels, interpreted, in float32. A difference here means that the mathematics
of the model changed. Read tests/golden/README.md first.
"""

import contextlib
import itertools
import json
import os
import pathlib

import flax.linen as nn
import jax
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
assert FILES, f"no .npz file in {FOLDER}"

TOLERANCE = {np.float64: 1e-9, np.float32: 2e-5}  # Relative to the largest entry of each tensor.
# Whole scores and tiles, in float64. The tiles are smaller than the segments, and do not divide
# them.
EXACT = {
    "reference": Implementation("reference"),
    "tiled": Implementation("tiled", tile=Tile(3, 5)),
    "stored": Implementation("stored"),
}
KERNELS = {"tpu": Implementation("fused", "mosaic_roll", Tile(16, 128), interpret=True)}
IMPLEMENTATIONS = EXACT | KERNELS
# The runs that the default tests compute by each path. With the reference they compute all.
QUICK = {
    "tiled": ("s06_same_length-empty", "s08_clamp-empty", "s20_odd_heads-empty"),
    "stored": ("s06_same_length-empty", "s17_shaw-empty"),
    "tpu": ("s06_same_length-empty", "s20_odd_heads-empty"),
}
ENCODINGS = {0: Encoding.RELATIVE, 1: Encoding.SHAW, 2: Encoding.VASWANI, 3: Encoding.AL_RFOU}
# Settings with the same name and meaning in the original and here.
SAME_SETTINGS = (
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


def settings_of(arrays) -> dict:
    """The settings of a recorded run, by the original's names."""
    return json.loads(str(arrays["config_json"]))


def has_kernels(golden: dict) -> bool:
    """Whether the kernels compute a run: they have only the relative encoding."""
    return ENCODINGS[golden["attn_type"]] is Encoding.RELATIVE and golden["ext_len"] == 0


def runs_with_paths():
    """Yields every run with each path that computes it.

    Runs that are not among the quick ones of their path are nightly.
    """
    for file in FILES:
        golden = settings_of(np.load(file))
        paths = IMPLEMENTATIONS if has_kernels(golden) else EXACT
        for start, path in itertools.product(golden["initial_memory"], paths):
            name = f"{file.stem}-{start}"
            marks = ()
            if path in QUICK and name not in QUICK[path]:
                marks = pytest.mark.nightly(part="cases")
            yield pytest.param(file, start, path, id=f"{name}-{path}", marks=marks)


@pytest.mark.parametrize(("file", "start", "path"), list(runs_with_paths()))
def test_golden(file, start, path):
    """Every segment of a recorded run, and the gradients of one segment, are the original's."""
    arrays = dict(np.load(file))
    golden = settings_of(arrays)
    if golden["ext_len"] > 0:
        pytest.skip(f"ext_len {golden['ext_len']}: no published run uses an extended context")
    is_first_start = start == golden["initial_memory"][0]
    prefix = "" if is_first_start else f"{start}/"

    with enable_x64(path in EXACT):
        model, params = load(arrays, golden, start, path)
        library = Format(golden["library"])
        assert original.aliases(model.config, library) == golden["aliases"]

        for k, segment in enumerate(run_segments(params, arrays, golden, model)):
            check_segment(segment, k, arrays, golden, prefix)
            if k == golden["grad_segment"]:
                gradients = original.from_flax(segment["gradients"], model.config, format=library)
                check_gradients(gradients, arrays, golden, prefix)


def load(arrays, golden: dict, start: str, path: str):
    """The model of a recorded run by an implementation of attention, and its parameters."""
    dtype = DType.FLOAT64 if path in EXACT else DType.FLOAT32
    config = config_of(golden, start, dtype)
    params = foreign.to_flax(
        under(arrays, "param/") | under(arrays, "buffer/"),
        config,
        vocab_size=golden["n_token"],
        format=Format(golden["library"]),
    )
    implementation = IMPLEMENTATIONS[path]
    model = TransformerXL(
        config, golden["n_token"], attention=AttentionPaths(implementation, implementation)
    )
    return model, jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)


def config_of(golden: dict, start: str, dtype: DType) -> ModelConfig:
    num_positions = None
    if ENCODINGS[golden["attn_type"]].is_learned:
        num_positions = golden["built_tgt_len"] + golden["built_ext_len"] + golden["built_mem_len"]

    model = ModelConfig(
        **{name: golden[name] for name in SAME_SETTINGS},
        layer_norm=NormPlace.PRE if golden["pre_lnorm"] else NormPlace.POST,
        encoding=ENCODINGS[golden["attn_type"]],
        num_positions=num_positions,
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
    """The clamp of a recorded run in this project's count.

    The original's tables of Shaw have distances 0 up to one less than with sinusoids.
    """
    if golden["clamp_len"] <= 0:
        return None
    if ENCODINGS[golden["attn_type"]] is Encoding.SHAW:
        return golden["clamp_len"] - 1
    return golden["clamp_len"]


def run_segments(params, arrays, golden: dict, model: TransformerXL):
    """Yields nll, hidden and memory after each segment, and the gradients of one segment's mean
    nll.

    Where we leave the original's absolute positions on purpose (tests/golden/README.md, oddities),
    adapters do here as it does, so that all segments and the gradients can be compared.
    """
    config = model.config
    is_absolute = not encoding_of(config).generates_by_token
    clamp = clamp_len(golden)

    def mean_nll(params, tokens, targets, memory):
        variables = {"params": params}
        adapter = contextlib.nullcontext()
        if is_absolute:
            memory = with_more_positions(memory, params, config, tokens.shape[1], clamp)
            if config.layer_norm is NormPlace.PRE:
                adapter = queries_before_the_norm()
        with adapter:
            hidden, memory = model.apply(
                variables,
                tokens,
                memory,
                clamp_len=clamp,
                same_length=golden["same_length"],
                deterministic=True,
            )
        nll = model.apply(variables, hidden, targets, method=model.nll)
        return nll.mean(), {"nll": nll, "hidden": hidden, "memory": memory}

    read = jax.jit(mean_nll)
    learn = jax.jit(jax.value_and_grad(mean_nll, has_aux=True))
    lengths = golden["seg_lens"]
    memory = model.init_memory(batch_size=golden["bsz"], mem_len=golden["mem_len"])
    for k, length in enumerate(lengths):
        tokens = arrays[f"seg{k}/input"].T
        targets = arrays[f"seg{k}/target"].T
        # Segments as long as the one with gradients share its program. For others the gradient
        # would be compiled in vain.
        if length == lengths[golden["grad_segment"]]:
            (_, segment), gradients = learn(params, tokens, targets, memory)
            segment["gradients"] = jax.device_get(gradients)
        else:
            _, segment = read(params, tokens, targets, memory)
        memory = segment["memory"]
        yield segment


def with_more_positions(
    memory: Memory, params, config: ModelConfig, segment_len: int, clamp_len: int
) -> Memory:
    """Adds positions to the stored inputs (of the first layer, or of all), where the original keeps
    the positions of earlier segments.
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
    """Computes queries from a layer's inputs before the norm, and keys and values from the normed
    inputs.
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


def check_segment(segment: dict, k: int, arrays, golden: dict, prefix: str) -> None:
    """Compares losses, hidden states and memory. The original has time before rows."""
    nll = np.asarray(segment["nll"]).T
    hidden = np.asarray(segment["hidden"]).swapaxes(0, 1)
    assert_close(nll, arrays[f"{prefix}seg{k}/nll"], f"nll of segment {k}")
    assert_close(hidden, arrays[f"{prefix}seg{k}/hidden"], f"hidden states of segment {k}")

    memory = segment["memory"]
    if golden["mem_len"] == 0:
        assert memory.hidden.size == 0
        return
    expected = arrays[f"{prefix}seg{k}/mems"][: golden["n_layer"]].swapaxes(1, 2)
    n_filled = expected.shape[2]
    filled = np.asarray(memory.hidden)[:, :, memory.mem_len - n_filled :]
    np.testing.assert_array_equal(memory.valid, np.full(golden["bsz"], n_filled))
    assert_close(filled, expected, f"memory after segment {k}")


def check_gradients(gradients: dict, arrays, golden: dict, prefix: str) -> None:
    """Compares the gradient of each of the original's tensors, and what it keeps in buffers."""
    expected = under(arrays, f"{prefix}grad/")
    # A tensor that has two names has its gradient under the first.
    assert expected.keys() == under(arrays, "param/").keys() - golden["aliases"].keys()
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, f"gradient of {name}")

    # The frequencies of the sinusoids, which only rounding may change.
    for name, value in under(arrays, "buffer/").items():
        rtol = 1e-15 if gradients[name].dtype == np.float64 else 1e-6
        np.testing.assert_allclose(gradients[name], value, rtol=rtol, err_msg=name)


def assert_close(values, expected: np.ndarray, name: str) -> None:
    values = np.asarray(values)
    assert expected.dtype == np.float64, name
    assert values.shape == expected.shape, name
    worst = np.abs(values - expected).max()
    largest = np.abs(expected).max()
    limit = TOLERANCE[values.dtype.type] * largest
    assert worst <= limit, f"{name}: off by {worst:.2e}, largest entry {largest:.2e}"


def under(arrays, prefix: str) -> dict:
    """The arrays whose names start with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): value
        for name, value in arrays.items()
        if name.startswith(prefix)
    }
