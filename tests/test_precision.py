"""Pins by tracing, path by path, what a bfloat16 run computes in 16 bits. The rest is in at least
float32.

Scores, softmax, layer norms, losses, log probabilities, sums over tokens, gradients of parameters,
averages and the optimizer are wide. Numbers alone do not show it: in a small model a rounding too
much stays within each tolerance.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.attention_arrays import NAMES, draw
from support.cases import full_but
from support.precision import ROUNDED, narrow
from txl_jax import recurrence
from txl_jax.config import DType, Encoding, Network, NormPlace, OptimizerName, WeightDType
from txl_jax.evaluation.sliding_window import Windows, evaluate_windows, make_window_step
from txl_jax.evaluation.streaming import SegmentLosses, evaluate, make_eval_step
from txl_jax.inference import cache as cache_lib
from txl_jax.inference import decode, forward
from txl_jax.inference.decode import BlockRows, Sampling
from txl_jax.inference.prepare import prepare_params
from txl_jax.metrics import Totals
from txl_jax.ops import sampling
from txl_jax.ops.attention import (
    CachedVisibility,
    Implementation,
    Tile,
    Visibility,
    attention,
    cached_attention,
)
from txl_jax.ops.attention.distances import table_length
from txl_jax.ops.attention.problem import REFERENCE
from txl_jax.training import step as step_lib
from txl_jax.training import weight_averaging
from txl_jax.training.optimizer import make_optimizer
from txl_jax.training.progress import RunningTotals
from txl_jax.training.step import UpdateMetrics

BFLOAT16 = jnp.bfloat16


def kernel(name):
    return Implementation("fused", name, Tile(16, 128), interpret=True)


def shapes(tree):
    """The shapes and dtypes of a tree, without shardings."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def bfloat16s(*shape):
    return jax.ShapeDtypeStruct(shape, BFLOAT16)


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# Attention in training. Narrow are the sums q + u and q + v, the products of probabilities with
# values and with the gradient of the output, and the gradients of arrays that are narrow
# themselves.
IMPLEMENTATIONS = {
    "reference": REFERENCE,
    "stored": Implementation("stored"),
    "tiled": Implementation("tiled", tile=Tile(5, 11)),
    "mosaic_roll": kernel("mosaic_roll"),
    "mosaic_gather": kernel("mosaic_gather"),
}
VALUES = {
    "reference": {"add": 2, "dot_general": 1, ROUNDED: 1},
    "stored": {"add": 2, ROUNDED: 6},
    "tiled": {"add": 2, "mul": 2, ROUNDED: 6},
    "mosaic_roll": {ROUNDED: 8},
    "mosaic_gather": {ROUNDED: 8},
}
GRADIENTS = {
    "reference": {"add": 2, "dot_general": 3, "reduce_sum": 4, "add_any": 1, ROUNDED: 6},
    "stored": {"add": 4, ROUNDED: 18},
    "tiled": {"add": 4, "mul": 4, ROUNDED: 27},
    "mosaic_roll": {"reduce_sum": 2, ROUNDED: 25},
    "mosaic_gather": {"reduce_sum": 2, ROUNDED: 25},
}


@pytest.mark.parametrize(
    "name", full_but(["reference", "stored", "tiled", "mosaic_gather"], IMPLEMENTATIONS)
)
def test_attention_adds_scores_in_float32(name):
    implementation = IMPLEMENTATIONS[name]
    visibility = Visibility(valid=jnp.asarray([17, 2]), segment_len=13, mem_len=17)
    # Kernels take no scores of positions, the last of the operands.
    names = NAMES[:-1] if implementation.path == "fused" else NAMES
    arrays = draw(visibility, n_head=2, width=16, names=names, dtype=BFLOAT16)

    def values(arrays):
        return attention(**arrays, visibility=visibility, implementation=implementation)

    def gradients(arrays):
        outputs, pull_back = jax.vjp(values, arrays)
        return pull_back(outputs)

    assert narrow(values, arrays) == VALUES[name]
    assert narrow(gradients, arrays) == GRADIENTS[name]


# Attention over a cache. No sum and no product is narrow: weights are rounded for the product with
# the values, and so is the result. Kernels also round what they read from the ring.
@dataclasses.dataclass(frozen=True)
class OverCache:
    """A case of attention over a cache, and what is narrow in it."""

    implementation: Implementation
    n_query: int
    ring_dtype: str | None
    expected: dict[str, int]


TILED = Implementation("tiled", tile=Tile(6, 16))
FUSED = Implementation("fused", "mosaic_gather", Tile(128, 128), interpret=True)
CACHED = {
    "reference, a token": OverCache(REFERENCE, 1, None, {ROUNDED: 3}),
    "reference": OverCache(REFERENCE, 6, None, {ROUNDED: 3}),
    "reference, a token, int8": OverCache(REFERENCE, 1, "int8", {ROUNDED: 5}),
    "reference, int8": OverCache(REFERENCE, 6, "int8", {ROUNDED: 5}),
    "tiled": OverCache(TILED, 6, None, {ROUNDED: 4}),
    "fused": OverCache(FUSED, 6, None, {ROUNDED: 16}),
}


@pytest.mark.parametrize("case", CACHED.values(), ids=CACHED)
def test_attention_over_a_cache_adds_scores_in_float32(case):
    batch, n_head, capacity, d_head = 2, 4, 40, 5
    n_query = case.n_query
    n_position = table_length(segment_len=n_query, capacity=capacity, clamp_len=20)
    visibility = CachedVisibility(
        valid=jnp.asarray([40, 20]),
        write_index=jnp.asarray(5),
        segment_len=n_query,
        capacity=capacity,
    )
    attend = functools.partial(cached_attention, implementation=case.implementation)

    query = bfloat16s(batch, n_head, n_query, d_head)
    ring_key = bfloat16s(batch, n_head, d_head, capacity)
    ring_value = bfloat16s(batch, n_head, capacity, d_head)
    if case.ring_dtype is not None:
        as_stored = functools.partial(cache_lib.as_cache_dtype, dtype=jnp.dtype(case.ring_dtype))
        ring_key = jax.eval_shape(functools.partial(as_stored, axis=2), ring_key)
        ring_value = jax.eval_shape(functools.partial(as_stored, axis=3), ring_value)
    position_key = bfloat16s(n_head, d_head, n_position)
    position_score = bfloat16s(n_head, n_position)
    if case.implementation.path == "fused":
        position_score = None  # Kernels take none.

    rings = ring_key, ring_value
    position = query, position_key, position_score
    assert narrow(attend, query, query, query, rings, position, visibility) == case.expected


# Inference of two layers. Narrow are the products with matrices, the biases and the residual
# stream, the ReLU (`max`), the scale of the embedding (`mul`), and the number that orders reads and
# writes of the cache (`abs`).
FORWARD = {"mul": 1, "dot_general": 8, "add": 12, "max": 2, "abs": 1, ROUNDED: 10}
INT8_WEIGHTS = {"mul": 1, "add": 12, "max": 2, "abs": 1, ROUNDED: 28}
WITHOUT_BIASES = {"mul": 1, "dot_general": 8, "add": 9, "max": 2, "abs": 1, ROUNDED: 11}


@dataclasses.dataclass(frozen=True)
class Inference:
    """A model and its dtypes in inference, and what is narrow in the forward pass and the loss."""

    forward: dict[str, int]
    loss: dict[str, int] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight_dtype: WeightDType | None = None
    cache_dtype: str | None = None


FLOAT32 = {"dtype": DType.FLOAT32}


def prepared(segment_len, weight_dtype=None, **changes):
    """The shapes of prepared weights."""
    model = tiny.make(**{"dtype": DType.BFLOAT16} | changes)
    lengths = {"segment_len": segment_len, "mem_len": 8, "clamp_len": 5, "window": None}
    prepare = functools.partial(prepare_params, model=model, weight_dtype=weight_dtype, **lengths)
    return jax.eval_shape(lambda: prepare(tiny.variables(model)["params"]))


def empty_cache(weights, segment_len, dtype=None):
    """The shapes of a cache, in the model's dtype if none is passed."""

    def init(weights):
        return forward.init_cache(
            weights,
            batch_size=tiny.B,
            mem_len=8,
            segment_len=segment_len,
            dtype=dtype and jnp.dtype(dtype),
        )

    return jax.eval_shape(init, weights)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Inference(FORWARD), id="post-norm"),
        pytest.param(
            Inference(FORWARD | {ROUNDED: 11}, model={"layer_norm": NormPlace.PRE}),
            id="pre-norm",
            marks=pytest.mark.full,
        ),
        pytest.param(
            Inference(WITHOUT_BIASES, model={"encoding": Encoding.VASWANI}),
            id="sinusoids",
            marks=pytest.mark.full,
        ),
        # Each cluster's embedding is projected, and so is its state in the softmax.
        pytest.param(
            Inference(
                FORWARD | {"dot_general": 11, "add": 14, ROUNDED: 13},
                loss={"dot_general": 3},
                model={"cutoffs": (4, 9), "div_val": 2, "d_embed": 8},
            ),
            id="clusters",
        ),
        pytest.param(Inference(FORWARD | {ROUNDED: 18}, cache_dtype="int8"), id="int8 cache"),
        pytest.param(
            Inference(INT8_WEIGHTS, loss={ROUNDED: 1}, weight_dtype=WeightDType.INT8),
            id="int8 weights",
        ),
        pytest.param(Inference({}, model=FLOAT32), id="float32", marks=pytest.mark.full),
        pytest.param(
            Inference({ROUNDED: 4}, model=FLOAT32, cache_dtype="bfloat16"),
            id="float32, bfloat16 cache",
            marks=pytest.mark.full,
        ),
        pytest.param(
            Inference(
                {ROUNDED: 18},
                loss={ROUNDED: 1},
                model=FLOAT32,
                weight_dtype=WeightDType.INT8,
                cache_dtype="int8",
            ),
            id="float32, int8",
        ),
    ],
)
def test_inference_computes_losses_and_norms_in_float32(case):
    weights = prepared(4, case.weight_dtype, **case.model)
    cache = empty_cache(weights, 4, case.cache_dtype)
    tokens = integers(tiny.B, 4)
    dtype = jnp.dtype(case.model.get("dtype", BFLOAT16))
    hidden = jax.ShapeDtypeStruct((tiny.B, 4, tiny.D), dtype)

    assert narrow(forward.forward, weights, tokens, cache) == case.forward
    assert narrow(forward.nll, weights, hidden, tokens) == case.loss


def test_int8_is_summed_in_int32():
    """Rows are split in two of int8.

    Sums in int8 or int16 would overflow. Sums in float32 would lose their last bits.
    """
    weights = prepared(4, WeightDType.INT8)
    cache = empty_cache(weights, 4, "int8")
    program = jax.make_jaxpr(forward.forward)(weights, integers(tiny.B, 4), cache)
    dtypes_of_sums = []
    for equation in tiny.equations(program):
        is_product = equation.primitive.name == "dot_general"
        if is_product and equation.invars[0].aval.dtype == jnp.int8:
            dtypes_of_sums.append(equation.outvars[0].aval.dtype.name)
    # In each of two layers four matrices, position keys, and keys and values of the ring.
    assert dtypes_of_sums == ["int32"] * 2 * 7


LIMITS = {
    "plain": {"temperature": 1.0, "top_k": None, "top_p": 1.0},
    "greedy": {"temperature": 0.0, "top_k": None, "top_p": 1.0},
    "cold": {"temperature": 0.7, "top_k": None, "top_p": 1.0},
    "all": {"temperature": 0.7, "top_k": 5, "top_p": 0.8},
}


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (4, 9)}], ids=["softmax", "clusters"])
def test_tokens_are_drawn_and_scored_in_float32(changes):
    """Logits, temperature, log probabilities, the sum of top-p and the noise of the draw: from
    narrow hidden states.
    """
    weights = prepared(1, **changes)
    hidden = bfloat16s(tiny.B, tiny.D)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), tiny.B))

    for name, limits in LIMITS.items():
        sample = functools.partial(sampling.sample, **limits)
        assert narrow(sample, keys, hidden, weights.clusters) == {}, name

    def sample_rows(keys, hidden, clusters, temperature, top_p):
        return sampling.sample_rows(keys, hidden, clusters, temperature=temperature, top_p=top_p)

    limits_of_rows = floats(tiny.B), floats(tiny.B)
    assert narrow(sample_rows, keys, hidden, weights.clusters, *limits_of_rows) == {}

    score = functools.partial(decode.score, top=3)
    assert narrow(score, weights, hidden, integers(tiny.B)) == {}
    scores = jax.eval_shape(score, weights, hidden, integers(tiny.B))
    assert scores.nats.dtype == jnp.float32
    assert scores.top_logprobs.dtype == jnp.float32


def test_a_step_of_generation_adds_nothing_in_16_bits():
    """A block of steps, with an index for each row as in the server, is the forward pass and what
    draws and scores.
    """
    weights = prepared(1)
    cache = empty_cache(weights, 1).replace(write_index=integers(tiny.B))
    keys = jax.ShapeDtypeStruct((tiny.B, 2), jnp.uint32)
    scored = jax.ShapeDtypeStruct((tiny.B,), jnp.bool)
    rows = BlockRows(
        known=integers(tiny.B, 2),
        number=integers(tiny.B),
        steps=integers(tiny.B),
        key=keys,
        stop=integers(),
        scored=scored,
    )

    def block(weights, cache, rows, temperature, top_p):
        return decode.decode_block(
            weights, cache, rows, Sampling(temperature, top_p), count=2, top=3
        )

    assert narrow(block, weights, cache, rows, floats(tiny.B), floats(tiny.B)) == FORWARD


# Evaluation


NARROW_IN_EVALUATION = {
    Network.TRANSFORMER_XL: FORWARD,
    Network.LSTM: {"mul": 7, "dot_general": 4, "add": 12, "logistic": 6, "tanh": 4, ROUNDED: 15},
    Network.QRNN: {"mul": 1, "dot_general": 2, "add": 2, ROUNDED: 11},
}


@pytest.mark.parametrize("network", full_but([Network.TRANSFORMER_XL], list(Network)))
def test_evaluation_computes_losses_in_float32(network):
    """A temperature divides the hidden states (`div`), which are narrow, and the biases, which are
    wide.
    """
    made = tiny_run.parts(
        model__dtype=DType.BFLOAT16, model__network=network, eval__temperature=1.3
    )
    step = make_eval_step(made.model, made.config.eval)
    params = shapes(made.abstract_state.params)
    weights = jax.eval_shape(made.prepare_params, params)
    memory = jax.eval_shape(made.init_memory, weights)
    segments = shapes(made.abstract_segments(made.config.eval))
    _, scores = jax.eval_shape(step, weights, memory, segments)
    assert {leaf.dtype for leaf in scores} == {jnp.dtype(jnp.float32)}
    assert narrow(step, weights, memory, segments) == NARROW_IN_EVALUATION[network] | {"div": 1}

    window = make_window_step(made.model, clamp_len=None)
    assert jax.eval_shape(window, params, integers(2, 9), integers(2, 3)).dtype == jnp.float32


MANY = 2.0**24  # The next whole number that float32 has is MANY + 2.


def test_losses_are_summed_in_double_precision():
    # A sum in float32 would be off.
    tenths = np.full(1 << 20, 0.1, np.float32)
    assert Totals.of(tenths).nats == float(np.float32(0.1)) * (1 << 20)

    # In float32 each addition of 1 would leave MANY as it is.
    nats = np.asarray([[MANY, 1.0, 1.0, 1.0]], np.float32)
    assert Totals.of(nats) == Totals(MANY + 3, 4)

    # Positions of the targets. The last target is padding, and its loss does not count.
    scored = np.asarray([[1, 2, 3, 0]])
    batches = [Windows(scored, scored, scored)] * 3
    totals = evaluate_windows(lambda params, windows, targets: nats, None, batches)
    assert totals == Totals(3 * (MANY + 2), 9)


def test_totals_of_segments_are_summed_in_double_precision():
    """A call's sums over its segments, and the sums over all calls. Counts of tokens too."""
    reader = tiny_run.text()
    sums = np.asarray([MANY, 1.0, 1.0, 1.0], np.float32)
    calls = math.ceil(reader.n_segments / 4)

    def step(weights, memory, segments):
        return memory, SegmentLosses(sums, sums, np.zeros(0))

    totals = evaluate(
        step, None, None, reader, segments_per_call=4, place=lambda segments: segments
    )
    assert totals == Totals(calls * (MANY + 3), calls * (MANY + 3))


def test_running_totals_of_training_are_summed_in_double_precision():
    running = RunningTotals()
    sums = np.asarray([MANY, 1.0, 1.0, 1.0], np.float32)
    for _ in range(2):
        running.add(UpdateMetrics(nats=sums, tokens=sums, grad_norm=sums, learning_rate=sums))
    total = 2 * (MANY + 3)
    assert running == RunningTotals(nats=total, tokens=total, grad_norm=total, updates=8)


# Updates

DECAYED = {"optimizer__weight_decay": 0.1}
AVERAGED = {"model__dtype": DType.BFLOAT16, "average__start_step": 0, "average__ema_decay": 0.9}
DIVIDED = {"train__grad_accum_steps": 3, "optimizer__l2": 0.1}


@pytest.mark.parametrize(
    "name", full_but([OptimizerName.ADAMW, OptimizerName.LAMB_NVIDIA], list(OptimizerName))
)
def test_the_optimizers_state_and_arithmetic_are_float32(name):
    """And the average of the parameters."""
    changes = DECAYED if name is OptimizerName.ADAMW else {}
    made = tiny_run.parts(**AVERAGED, **changes, optimizer__name=name)
    state = shapes(made.abstract_state)
    leaves = jax.tree.leaves((state.params, state.opt_state, state.average))
    assert {leaf.dtype.name for leaf in leaves} == {"float32", "int32"}
    assert state.memory.hidden.dtype == BFLOAT16

    update = make_optimizer(made.config).update
    assert narrow(update, state.params, state.opt_state, state.params) == {}
    add = functools.partial(weight_averaging.add, config=made.config.average)
    assert narrow(add, state.average, state.params, state.step) == {}


def test_an_update_computes_in_16_bits_only_what_the_gradient_does():
    """Not the sums over microbatches, the norm of the gradient, clipping, moments and averages."""
    made = tiny_run.parts(**AVERAGED, **DIVIDED)
    state = shapes(made.abstract_state)
    segments = shapes(made.abstract_segments(made.config.train))
    segment = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), segments)
    key = jax.eval_shape(lambda: jax.random.key(0))
    loss = step_lib._make_loss(made.model, made.config, in_evaluation=False)
    arguments = state.params, state.memory, segment, key, floats()
    in_loss = narrow(loss, *arguments)
    in_gradient = narrow(jax.grad(loss, has_aux=True), *arguments)

    step = step_lib.make_train_step(
        made.model, make_optimizer(made.config), made.schedule, made.config
    )
    assert narrow(step, state, segments) == in_gradient
    _, metrics = jax.eval_shape(step, state, segments)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(metrics)} == {"float32"}
    # Products with matrices and with probabilities, the residual stream, biases, the ReLU, dropout
    # (`div`).
    assert set(in_loss) == {"dot_general", "add", "max", "mul", "div", ROUNDED}
    assert set(in_gradient) == set(in_loss) | {"add_any", "reduce_sum"}


def test_penalties_are_computed_in_float32():
    """Of outputs in bfloat16."""
    penalty = functools.partial(step_lib.activation_penalty, activation=0.2, temporal=0.1)
    assert narrow(penalty, bfloat16s(2, 5, 3)) == {}


def test_norms_and_biases_stay_float32_at_inference():
    """Of a bfloat16 model. Matrices are cast once, before the first token."""
    model = tiny.make(dtype=DType.BFLOAT16, layer_norm=NormPlace.PRE, d_embed=8)
    params = jax.eval_shape(lambda: tiny.variables(model)["params"])
    prepare = functools.partial(
        prepare_params, model=model, segment_len=2, mem_len=3, clamp_len=None
    )

    prepared = jax.eval_shape(prepare, params)

    final_norm = prepared.embed_and_norm["final_norm"]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(final_norm)} == {"float32"}
    dtypes = collections.defaultdict(set)
    for leaf in jax.tree.leaves(prepared.embed_and_norm):
        dtypes[leaf.ndim].add(leaf.dtype.name)
    assert dtypes == {1: {"float32"}, 2: {"bfloat16"}}


def test_summed_losses_of_a_segment_are_wide():
    assert narrow(recurrence.weighted_sum, floats(3, 7), floats(3, 7)) == {}
