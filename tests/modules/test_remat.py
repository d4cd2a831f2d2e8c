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

# Sizes in the proportions of enwik8_12l, all different, so that a size tells the axis.
ROWS = 5
LENGTH = 32
WIDTH = 24
LAYERS = 11
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
    "tiled": Implementation("tiled", tile=Tile(LENGTH, 32)),
    "fused": Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True),
}
# Probabilities [B, H, L, K] in units of [B, L, D], with the three heads above.
PROBABILITIES = 3 * KEYS / WIDTH
# The memory stores the layers' inputs of this segment, and the backward pass needs the same arrays.
# Since version 0.11, JAX stacks them once for both.
UNITS_OF_MEMORY = 1 if jax.__version_info__ < (0, 11) else 0


def with_path(built, path):
    """The model of a run, with an implementation of attention in training."""
    paths = AttentionPaths(training=PATHS[path], cached=PATHS["reference"])
    return built.model.clone(attention=paths)


@functools.cache
def traced_step(path, remat, *, rate, attention_rate=0.0):
    """The jaxpr of a training step, without equations whose results nothing reads.

    It still has kernels that nothing reads, which XLA leaves out.
    """
    built = tiny_run.parts(
        **SIZES,
        model__dtype=DType.BFLOAT16,
        model__remat=remat,
        model__dropout__rate=rate,
        model__dropout__attention=attention_rate,
    )
    model = with_path(built, path)
    step = make_train_step(model, built.optimizer, built.schedule, built.config)
    segments = built.abstract_segments(built.config.train)
    program = jax.make_jaxpr(step)(built.abstract_state, segments)
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return jaxpr


def default_step(path, remat):
    """The jaxpr of a training step: with dropout, except without remat.

    Without remat a dropout may keep its mask, which would count.
    """
    return traced_step(path, remat, rate=0.0 if remat is Remat.NONE else 0.3)


def read_equations(jaxpr):
    """Yields the equations of a program and of all that it calls, if something reads a result."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    read = set(map(id, jaxpr.outvars))
    for equation in jaxpr.eqns:
        read |= set(map(id, equation.invars))

    for equation in jaxpr.eqns:
        if read.isdisjoint(map(id, equation.outvars)):
            continue
        yield equation
        parts = jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)
        for part in filter(is_jaxpr, parts):
            yield from read_equations(part)


def is_jaxpr(leaf):
    return hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")


def layer_loops(jaxpr):
    """The scans over layers: (forward, backward)."""
    scans = []
    for equation in tiny.equations(jaxpr):
        if equation.primitive.name == "scan" and equation.params["length"] == LAYERS:
            scans.append(equation)
    forward, backward = scans
    assert not forward.params["reverse"]
    assert backward.params["reverse"]
    return forward, backward


def is_stacked(of_loop, of_round):
    """Whether a scan slices or stacks this array. It has then an axis more than in each round.

    The parameters of a scan would say so too, but their names depend on the version of JAX.
    """
    return of_loop.aval.ndim == of_round.aval.ndim + 1


def body_of(loop):
    """The program of a round."""
    body = loop.params["jaxpr"]
    return getattr(body, "jaxpr", body)


def stacked_results(loop):
    stacked = []
    for of_loop, of_round in zip(loop.outvars, body_of(loop).outvars, strict=True):
        if is_stacked(of_loop, of_round):
            stacked.append(of_loop)
    return stacked


def constants_of(loop):
    """The arrays that every round reads whole.

    A scan's operands are those, then its carry, then what it slices.
    """
    whole = []
    for of_loop, of_round in zip(loop.invars, body_of(loop).invars, strict=True):
        if not is_stacked(of_loop, of_round):
            whole.append(of_loop)
    carried = len(loop.outvars) - len(stacked_results(loop))
    return whole[: len(whole) - carried]


def stacked_units(jaxpr):
    """The size of the arrays that the scan stacks per layer, except the memory, in units of B L D
    numbers of 16 bits.

    Weights that were cast have no axis of rows, and do not count.
    """
    forward, _ = layer_loops(jaxpr)
    in_bytes = 0
    for variable in stacked_results(forward):
        array = variable.aval
        has_rows = ROWS in array.shape or ROWS * LENGTH in array.shape
        if has_rows:
            in_bytes += array.size * array.dtype.itemsize
    unit = LAYERS * ROWS * LENGTH * WIDTH * 2
    return in_bytes / unit - UNITS_OF_MEMORY


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
            # One array more than of tiles, since queries of contents and of distances are two. The
            # reference keeps probabilities in float32, which are two units, and in bfloat16.
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
    """The units are the arrays that txl_jax/modules/remat.py lists: 26, 13 or 1, and probabilities.

    Numbers per position, such as variances and log sums, make up less than one unit.
    """
    units = stacked_units(default_step(path, remat))

    assert expected <= units < expected + 1, units


def has_size_of_scores(variable):
    return variable.aval.shape[-2:] == (LENGTH, KEYS)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("remat", [Remat.NONE, Remat.DOTS])
def test_no_layer_of_stored_reads_masks_or_constants_of_the_scores_size(remat, dropout):
    """JAX computes before the loop over layers what no layer changes, and each layer reads it."""
    jaxpr = traced_step("stored", remat, rate=0.3, attention_rate=dropout)
    forward, backward = layer_loops(jaxpr)

    for loop in (forward, backward):
        constants = constants_of(loop)
        assert constants
        assert list(filter(has_size_of_scores, constants)) == []

    # The mask is made in the loop.
    masks = []
    for equation in tiny.equations(forward.params["jaxpr"]):
        result = equation.outvars[0]
        if has_size_of_scores(result) and result.aval.dtype == bool:
            masks.append(result)
    assert masks


def forward_passes_of_attention(path, jaxpr):
    """How often the layers compute, forward and backward, what attention needs of its operands."""
    count = 0
    for loop in layer_loops(jaxpr):
        for equation in read_equations(loop.params["jaxpr"]):
            if path == "fused":
                is_kernel = equation.primitive.name == "pallas_call"
                count += is_kernel and "forward" in str(equation.params["name"])
            else:
                # Only the forward pass looks for the highest score of each query.
                count += equation.primitive.name == "reduce_max"
    return count


@pytest.mark.parametrize("path", PATHS)
def test_dots_computes_attention_once_and_full_twice(path):
    """But dots computes the scores of the reference again.

    The reference has no residuals of its own that could be kept, and its gradient needs the scores.
    """
    plain = forward_passes_of_attention(path, default_step(path, Remat.NONE))
    dots = forward_passes_of_attention(path, default_step(path, Remat.DOTS))
    full = forward_passes_of_attention(path, default_step(path, Remat.FULL))

    assert plain > 0
    if path == "reference":
        assert dots == 2 * plain
    else:
        assert dots == plain
    assert full == 2 * plain


def matmuls_with_weights(remat):
    """How many matmuls of a step multiply with an array of a weight's sizes, without a batch.

    Weights have a side of WIDTH or of d_inner, 4 WIDTH. Operands of attention have a batch.
    """
    count = 0
    for equation in tiny.equations(default_step("fused", remat)):
        if equation.primitive.name != "dot_general":
            continue
        _, (batch_axes, _) = equation.params["dimension_numbers"]
        second_shape = equation.invars[1].aval.shape
        has_weight = WIDTH in second_shape or 4 * WIDTH in second_shape
        count += has_weight and not batch_axes
    return count


def test_dots_computes_no_matmul_with_weights_again():
    plain = matmuls_with_weights(Remat.NONE)

    assert matmuls_with_weights(Remat.DOTS) == plain
    assert matmuls_with_weights(Remat.FULL) > plain


def one_step(path, remat):
    """The state and metrics after a training step of two layers with dropout, in float32."""
    built = tiny_run.parts(
        **SIZES | {"model__n_layer": 2, "model__dropout__attention": 0.2, "model__remat": remat}
    )
    model = with_path(built, path)
    step = jax.jit(make_train_step(model, built.optimizer, built.schedule, built.config))
    tokens = np.random.default_rng(0).integers(tiny.V, size=ROWS * LENGTH * 3 + 1)
    segments = training_segments(tokens, batch_size=ROWS, segment_len=LENGTH).segments(0, 1)
    return jax.device_get(step(tiny_run.state(built), built.place(segments)))


@pytest.mark.full
@pytest.mark.parametrize("path", PATHS)
def test_values_and_gradients_are_those_without_remat(path):
    """The loss and all gradients, through the same masks."""
    expected = one_step(path, Remat.NONE)

    tiny_run.assert_close(one_step(path, Remat.DOTS), expected, rtol=1e-4, atol=1e-6)
    tiny_run.assert_close(one_step(path, Remat.FULL), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "expected"), [("cpu", Remat.NONE), ("gpu", Remat.DOTS), ("tpu", Remat.DOTS)]
)
def test_auto_is_none_on_cpus_and_dots_on_accelerators(platform, expected):
    assert for_platform(Remat.AUTO, platform) is expected


def test_a_setting_other_than_auto_holds_on_all_platforms():
    assert for_platform(Remat.FULL, "cpu") is Remat.FULL


def has_checkpoints(model):
    """Whether the gradient of a model checkpoints its layers."""
    variables = {"params": tiny_run.params(model)}
    memory = model.init_memory(batch_size=tiny.B, mem_len=4)

    def loss(variables):
        hidden, _ = model.apply(variables, tiny.text(3), memory)
        return hidden.sum()

    for equation in tiny.equations(jax.make_jaxpr(jax.grad(loss))(variables)):
        if equation.primitive.name in ("remat", "remat2", "checkpoint"):
            return True
    return False


def test_a_model_without_a_run_asks_the_device(monkeypatch):
    """Its config still has `auto`, which a run replaces."""
    model = tiny.make(remat=Remat.AUTO)
    # This process runs on a CPU.
    assert not has_checkpoints(model)

    tpu = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    monkeypatch.setattr(block, "default_device", lambda: tpu)

    assert has_checkpoints(model)
