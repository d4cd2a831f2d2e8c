"""Tests of what a layer keeps for its backward pass, read from the jaxpr of a training step."""

import functools
import types

import jax
import numpy as np
import pytest
from jax.interpreters import partial_eval

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import DType, Remat
from txl_jax.data.segments import training_segments
from txl_jax.modules import block
from txl_jax.modules.remat import for_platform
from txl_jax.ops.attention import AttentionPaths, Implementation, Tile
from txl_jax.training.step import make_train_step

# Sizes in the proportions of enwik8_12l, of which an axis tells what it is.
ROWS, LENGTH, WIDTH, LAYERS = 5, 32, 24, 11
SIZES = {
    "model__n_layer": LAYERS,
    "model__d_model": WIDTH,
    "model__n_head": 3,
    "model__d_head": 8,
    "model__d_inner": 4 * WIDTH,
    "train__batch_size": ROWS,
    "train__segment_len": LENGTH,
    "train__mem_len": LENGTH,
}
KEYS = 2 * LENGTH
PATHS = {
    "reference": Implementation("reference"),
    "stored": Implementation("stored"),
    "tiled": Implementation("tiled", tile=Tile(16, 32)),
    "fused": Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True),
}
# Probabilities [B, H, L, K] in units of [B, L, D].
PROBABILITIES = 3 * KEYS / WIDTH


def traced_step(path, **changes):
    """The jaxpr of a training step, without equations whose results nothing reads.

    It still has kernels that nothing reads, which XLA leaves out.
    """
    built = tiny_run.parts(**{**SIZES, "model__dtype": DType.BFLOAT16, **changes})
    implementations = AttentionPaths(training=PATHS[path], cached=PATHS["reference"])
    model = built.model.clone(attention=implementations)
    step = make_train_step(model, built.optimizer, built.schedule, built.config)
    segments = built.abstract_segments(built.config.train)
    program = jax.make_jaxpr(step)(built.abstract_state, segments)
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return jaxpr


@functools.cache
def cached_step(path, remat):
    # Without remat a dropout may keep its mask.
    rate = 0.0 if remat is Remat.NONE else 0.3
    return traced_step(path, model__remat=remat, model__dropout__rate=rate)


def read_equations(jaxpr):
    """Yields the equations of a program and of all that it calls, if something reads a result."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    read = set(map(id, jaxpr.outvars))
    for equation in jaxpr.eqns:
        read |= set(map(id, equation.invars))
    for equation in jaxpr.eqns:
        if not read & set(map(id, equation.outvars)):
            continue
        yield equation
        parts = jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)
        for part in filter(is_jaxpr, parts):
            yield from read_equations(part)


def is_jaxpr(leaf):
    return hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")


def layer_loops(jaxpr):
    """The scans over layers: (forward, backward)."""
    scans = [each for each in tiny.equations(jaxpr) if each.primitive.name == "scan"]
    forward, backward = [each for each in scans if each.params["length"] == LAYERS]
    assert not forward.params["reverse"] and backward.params["reverse"]
    return forward, backward


def stacked_units(jaxpr):
    """What the scan stacks per layer besides the memory, in units of B L D numbers of 16 bits.

    Weights that were cast have no axis of rows, and do not count.
    """
    forward, _ = layer_loops(jaxpr)
    stacked = [variable.aval for variable in forward.outvars[forward.params["num_carry"] :]]
    of_rows = [array for array in stacked if {ROWS, ROWS * LENGTH} & set(array.shape)]
    in_bytes = sum(array.size * array.dtype.itemsize for array in of_rows)
    unit = LAYERS * ROWS * LENGTH * WIDTH * 2
    memory = 1  # The rows that the memory stores for this segment.
    return in_bytes / unit - memory


@pytest.mark.parametrize(
    ("path", "remat", "expected"),
    full_but(
        [
            ("reference", Remat.DOTS, 13),
            ("stored", Remat.NONE, 27 + PROBABILITIES),
            ("stored", Remat.DOTS, 13 + PROBABILITIES),
            ("fused", Remat.DOTS, 13),
        ],
        [
            # The queries of contents and of distances, and attention's output in two orders.
            ("reference", Remat.NONE, 27 + 3 * PROBABILITIES),
            ("stored", Remat.NONE, 27 + PROBABILITIES),
            ("tiled", Remat.NONE, 26),
            ("fused", Remat.NONE, 26),
            ("reference", Remat.DOTS, 13),
            ("stored", Remat.DOTS, 13 + PROBABILITIES),
            ("tiled", Remat.DOTS, 13),
            ("fused", Remat.DOTS, 13),
            ("stored", Remat.FULL, 1),
            ("fused", Remat.FULL, 1),
        ],
    ),
)
def test_what_the_scan_stacks_for_each_layer(path, remat, expected):
    """Besides these there are numbers per position, such as variances and the log sums."""
    found = stacked_units(cached_step(path, remat))
    assert expected <= found < expected + 1, found


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("remat", [Remat.NONE, Remat.DOTS])
def test_no_layer_of_stored_reads_masks_or_constants_of_the_scores_size(remat, dropout):
    """JAX computes before the loop over layers what no layer changes, and each layer reads it."""
    jaxpr = traced_step("stored", model__remat=remat, model__dropout__attention=dropout)
    for loop in layer_loops(jaxpr):
        n_const = loop.params["num_consts"]
        shapes = [variable.aval.shape for variable in loop.invars[:n_const]]
        assert [shape for shape in shapes if shape[-2:] == (LENGTH, KEYS)] == []
    # The mask is made in the loop.
    forward, _ = layer_loops(jaxpr)
    made = [each.outvars[0].aval for each in tiny.equations(forward.params["jaxpr"])]
    assert any(array.shape[-2:] == (LENGTH, KEYS) and array.dtype == bool for array in made)


def forward_passes_of_attention(path, jaxpr):
    """How often the layers compute, forward and backward, what attention needs of its operands."""
    found = []
    for loop in layer_loops(jaxpr):
        found.extend(read_equations(loop.params["jaxpr"]))
    if path == "fused":
        kernels = [each for each in found if each.primitive.name == "pallas_call"]
        return sum("forward" in str(each.params["name"]) for each in kernels)
    # Only the forward pass looks for the highest score of each query.
    return sum(each.primitive.name == "reduce_max" for each in found)


@pytest.mark.parametrize("path", PATHS)
def test_dots_computes_attention_once_and_full_twice(path):
    """The reference has no residuals of its own, so its scores are computed again with dots too."""
    again = 2 if path == "reference" else 1
    counts = {
        remat: forward_passes_of_attention(path, cached_step(path, remat))
        for remat in (Remat.NONE, Remat.DOTS, Remat.FULL)
    }
    once = counts[Remat.NONE]
    assert once > 0
    assert counts == {Remat.NONE: once, Remat.DOTS: again * once, Remat.FULL: 2 * once}


def test_dots_computes_no_matmul_with_weights_again():
    def matmuls(remat):
        found = tiny.equations(cached_step("fused", remat))
        dots = [each for each in found if each.primitive.name == "dot_general"]
        return sum(
            not each.params["dimension_numbers"][1][0]
            and {WIDTH, 4 * WIDTH} & set(each.invars[1].aval.shape) != set()
            for each in dots
        )

    assert matmuls(Remat.DOTS) == matmuls(Remat.NONE) < matmuls(Remat.FULL)


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
def test_values_and_gradients_are_those_without_remat(path):
    """In float32: the loss and all gradients of a step with dropout, through the same masks."""
    sizes = SIZES | {"model__n_layer": 2, "model__dropout__attention": 0.2}
    found = {}
    for remat in (Remat.NONE, Remat.DOTS, Remat.FULL):
        built = tiny_run.parts(**sizes, model__remat=remat)
        implementations = AttentionPaths(training=PATHS[path], cached=PATHS["reference"])
        model = built.model.clone(attention=implementations)
        step = jax.jit(make_train_step(model, built.optimizer, built.schedule, built.config))
        tokens = np.random.default_rng(0).integers(tiny.V, size=ROWS * LENGTH * 3 + 1)
        segments = training_segments(tokens, batch_size=ROWS, segment_len=LENGTH).segments(0, 1)
        found[remat] = jax.device_get(step(tiny_run.state(built), built.place(segments)))
    for remat in (Remat.DOTS, Remat.FULL):
        tiny_run.assert_close(found[remat], found[Remat.NONE], rtol=1e-4, atol=1e-6)


def test_auto_is_none_on_cpus_and_dots_on_accelerators():
    platforms = ("cpu", "gpu", "tpu")
    meant = [for_platform(Remat.AUTO, platform) for platform in platforms]
    assert meant == [Remat.NONE, Remat.DOTS, Remat.DOTS]
    assert for_platform(Remat.FULL, "cpu") is Remat.FULL


def test_a_model_without_a_run_asks_the_device(monkeypatch):
    """Its config has `auto` still, which a run replaces."""
    model = tiny.make(remat=Remat.AUTO)
    variables = tiny.variables(model)
    memory = model.init_memory(batch_size=tiny.B, mem_len=4)

    def checkpointed_layers():
        gradient = jax.grad(lambda v: model.apply(v, tiny.text(3), memory)[0].sum())
        found = tiny.equations(jax.make_jaxpr(gradient)(variables))
        return sum(each.primitive.name in ("remat", "remat2", "checkpoint") for each in found)

    assert checkpointed_layers() == 0
    tpu = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    monkeypatch.setattr(block, "default_device", lambda: tpu)
    assert checkpointed_layers() > 0
