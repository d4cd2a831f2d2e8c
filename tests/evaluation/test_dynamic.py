"""Tests dynamic evaluation against a loop in Python: score a segment, then one step downhill.

The loop is written apart from the product. It cuts the text itself, and has the mean loss and the
three rules in NumPy. With the product it shares only the model's forward pass.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from support.plain_loss import mean_loss_of
from txl_jax.config import (
    DropoutConfig,
    DType,
    DynamicConfig,
    DynamicRule,
    EvalConfig,
    ExperimentConfig,
    LossPart,
    Network,
    RegularizationConfig,
)
from txl_jax.data.segments import evaluation_segments
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.evaluation import dynamic
from txl_jax.runs.build import build
from txl_jax.runs.dynamic import DynamicModel, built_with_rule
from txl_jax.runs.score import score
from txl_jax.runs.scoring_progress import Interrupted

L = 5
M = 7
# Segments of a call in `DynamicModel.score`. `learned` takes as many, and shares its compiled
# program.
SEGMENTS_PER_CALL = 8
# 33 targets are 7 segments of one row, or 3 segments of three rows. The last one has padding.
TEXT = np.random.default_rng(3).integers(tiny.V, size=34)
RULES = {
    "sgd": DynamicConfig(rule=DynamicRule.SGD, learning_rate=0.3, decay=0.02),
    "rms": DynamicConfig(rule=DynamicRule.RMS, learning_rate=0.02, decay=0.1, epsilon=0.1),
    "rmsprop": DynamicConfig(rule=DynamicRule.RMSPROP, learning_rate=0.01, decay=0.1, epsilon=1e-6),
}
NETWORKS: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "adaptive softmax": {"model__cutoffs": (4, 9), "model__div_val": 2},
    "lstm": {"model__network": Network.LSTM},
    "qrnn": {"model__network": Network.QRNN},
}

pytestmark = pytest.mark.usefixtures("x64")


def config_of(
    network: str, rule: DynamicConfig, *, rows: int = 1, **changes: Any
) -> ExperimentConfig:
    """A config whose training has all that must not reach a dynamic evaluation."""
    config = ExperimentConfig(
        model=tiny.model_config(dtype=DType.FLOAT64, dropout=DropoutConfig(rate=0.4)),
        regularization=RegularizationConfig(activation_l2=0.1, temporal_l2=0.1),
        eval=EvalConfig(
            batch_size=rows,
            segment_len=L,
            mem_len=M,
            clamp_len=6,
            same_length=network not in ("lstm", "qrnn"),
            dynamic=rule,
        ),
    )
    # Half of the targets, and another length than L, as further settings of training only.
    config = tiny.changed(config, train__loss=LossPart.HALF, train__segment_len=4)
    return tiny.changed(config, **NETWORKS[network], **changes)


@functools.cache
def model_of(network: str, rule: str, rows: int = 1, **changes: Any) -> DynamicModel:
    config = config_of(network, RULES[rule], rows=rows, **changes)
    model = built_to_learn(config)
    if rule == "rms":
        statistics = jax.tree.map(jnp.asarray, squares_like(model.params))
        return dataclasses.replace(model, statistics=statistics)
    return model


def built_to_learn(config: ExperimentConfig) -> DynamicModel:
    """A model with drawn parameters that learns by the rule of this config."""
    built = build(dynamic.training_config(config), vocab_size=tiny.V, uses=["training"])
    params = jax.tree.map(jnp.asarray, tiny_run.params(built.model))
    return DynamicModel(built_with_rule(built), params)


def squares_like(params: Any) -> Any:
    """Drawn statistics for the rule RMS: some 0, as of a rare word, and some large."""
    rng = np.random.default_rng(5)

    def draw(leaf: Any) -> np.ndarray:
        is_frequent = np.asarray(leaf) > -0.5
        return rng.exponential(size=leaf.shape) * is_frequent

    return jax.tree.map(draw, params)


class Learned(NamedTuple):
    """The losses of a text that a model learns from, and its parameters after it."""

    nats: list[float]  # Of each segment.
    tokens: list[int]  # Of each segment.
    params: Any


@functools.cache
def gradient_of(module: Any, lengths: EvalConfig) -> Any:
    """The compiled gradient of a segment's mean loss, which all rules share."""
    return jax.jit(jax.grad(mean_loss_of(module, lengths), has_aux=True))


def loop(model: DynamicModel, text: np.ndarray, *, updates_first: bool = False) -> Learned:
    """Scores and learns a text in plain Python."""
    module: Any = model.built.model
    lengths = model.built.config.eval
    rows = lengths.batch_size
    row_len = -(-(len(text) - 1) // rows)

    # Without the rule in the key of the cache, all rules share a compiled gradient.
    gradient = gradient_of(module, dataclasses.replace(lengths, dynamic=DynamicConfig()))
    params = trained = jax.tree.map(np.asarray, model.params)
    moment = jax.tree.map(np.zeros_like, params)
    memory = module.init_memory(batch_size=rows, mem_len=lengths.mem_len)
    nats = []
    tokens = []
    for first in range(0, row_len, L):
        inputs = np.zeros((rows, L), np.int32)
        targets = np.zeros((rows, L), np.int32)
        mask = np.zeros((rows, L), bool)
        for row in range(rows):
            for column in range(L):
                place = row * row_len + first + column
                is_in_row = first + column < row_len
                if is_in_row and place + 1 < len(text):
                    inputs[row, column] = text[place]
                    targets[row, column] = text[place + 1]
                    mask[row, column] = True

        grads, (segment_nats, new_memory) = gradient(params, memory, inputs, targets, mask)
        params, moment = updated(
            model.settings, params, trained, grads, moment, model.statistics, len(nats) + 1
        )
        if updates_first:
            _, (segment_nats, _) = gradient(params, memory, inputs, targets, mask)
        memory = new_memory
        nats.append(float(segment_nats))
        tokens.append(int(mask.sum()))
    return Learned(nats, tokens, params)


def updated(settings, params, trained, grads, moment, statistics, count) -> tuple[Any, Any]:
    """Returns the parameters and the moving average of squares after one update."""
    rate = settings.learning_rate
    decay = settings.decay
    epsilon = settings.epsilon
    grads = jax.tree.map(np.asarray, grads)

    def downhill(p, g, p0):
        return p - rate * g + decay * (p0 - p)

    def downhill_by_roots(p, g, p0, root, strength):
        pull = np.minimum(decay * strength, 1)
        return p - rate * g / (root + epsilon) + pull * (p0 - p)

    if settings.rule == "sgd":
        return jax.tree.map(downhill, params, grads, trained), moment

    if settings.rule == "rms":
        roots = jax.tree.map(np.sqrt, statistics)
        strengths = roots
    else:
        # RMSprop's mean of squares has the decay 0.999, and is corrected for its start at 0.
        moment = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, moment, grads)
        roots = jax.tree.map(lambda v: np.sqrt(v / (1 - 0.999**count)), moment)
        mean = np.concatenate([root.ravel() for root in jax.tree.leaves(roots)]).mean()
        strengths = jax.tree.map(lambda root: root / mean, roots)
    params = jax.tree.map(downhill_by_roots, params, grads, trained, roots, strengths)
    return params, moment


def learned(model: DynamicModel, text: np.ndarray, *, warmup_tokens: int = 0) -> Learned:
    """The same by the product, with at least one segment of padding at the end."""
    rows = model.built.config.eval.batch_size
    reader = evaluation_segments(text, batch_size=rows, segment_len=L, warmup_tokens=warmup_tokens)
    n_segment = reader.n_segments
    state = model.start()
    nats: list[float] = []
    tokens: list[int] = []
    while len(nats) <= n_segment:
        segments = reader.segments(len(nats), SEGMENTS_PER_CALL)
        state, losses = model.step(None, state, model.built.place(segments))
        nats += losses.nats.tolist()
        tokens += losses.tokens.tolist()
    assert not any(nats[n_segment:])
    assert not any(tokens[n_segment:])
    return Learned(nats[:n_segment], tokens[:n_segment], jax.device_get(state.params))


def difference(a: Learned, b: Learned) -> float:
    """The largest difference of a loss or a parameter."""
    assert a.tokens == b.tokens
    params = jax.tree.map(lambda x, y: np.abs(x - y).max(), a.params, b.params)
    return max(np.abs(np.subtract(a.nats, b.nats)).max(), *jax.tree.leaves(params))


CASES = list(itertools.product(NETWORKS, RULES, (1, 3)))
QUICK = [
    ("transformer-xl", "sgd", 1),
    ("transformer-xl", "rms", 3),
    ("adaptive softmax", "rmsprop", 3),
    ("lstm", "rmsprop", 1),
]


@pytest.mark.parametrize(("network", "rule", "rows"), full_but(QUICK, CASES))
def test_each_segment_is_scored_and_then_learned_as_in_a_plain_loop(network, rule, rows):
    model = model_of(network, rule, rows)

    scored = learned(model, TEXT)

    assert difference(scored, loop(model, TEXT)) < 1e-9
    # The comparison above would fail if the update came before the score.
    assert difference(scored, loop(model, TEXT, updates_first=True)) > 1e-3


def test_at_rate_zero_the_scores_are_the_static_ones():
    rule = DynamicConfig(rule=DynamicRule.RMSPROP, learning_rate=0.0)
    config = config_of("transformer-xl", rule, rows=2)
    model = built_to_learn(config)
    nats = np.zeros(len(TEXT))
    static_nats = np.zeros(len(TEXT))

    totals = model.score(TEXT, name="text", log=print, token_nats=nats)

    static_built = build(config, vocab_size=tiny.V, uses=["evaluation"])
    static = score(static_built, model.params, TEXT, name="text", log=print, token_nats=static_nats)
    np.testing.assert_allclose(nats, static_nats, rtol=0, atol=1e-9)
    assert totals.tokens == static.tokens == len(TEXT) - 1
    assert abs(totals.nats - static.nats) < 1e-9


def test_a_score_begins_with_the_trained_parameters_and_leaves_them_as_they_are():
    # A rule with a state, which begins anew too.
    model = model_of("adaptive softmax", "rmsprop", 3)
    before = jax.tree.map(np.array, model.params)

    first = model.score(TEXT, name="text", log=print)
    again = model.score(TEXT, name="text", log=print)

    assert first == again
    assert first.nats == pytest.approx(sum(loop(model, TEXT).nats), rel=1e-9)
    jax.tree.map(np.testing.assert_array_equal, model.params, before)


def test_the_loss_that_is_learned_has_the_temperature():
    """As the loss of the loop, which reads `eval.temperature` too."""
    model = model_of("transformer-xl", "sgd", eval__temperature=1.7)

    scored = learned(model, TEXT)

    assert difference(scored, loop(model, TEXT)) < 1e-9


def test_warmup_tokens_fill_the_memory_and_are_not_learned():
    # Another row scores them, later: what was learned from them would be known there.
    model = model_of("transformer-xl", "rms", 3)
    text = np.tile(TEXT, 2)[: 1 + 3 * 3 * L]

    scored = learned(model, text, warmup_tokens=2 * L)

    # The second and third row begin two segments before their own text, and score nothing in them.
    # So only the first row is learned in the first two segments. Its text ends after the third.
    assert scored.tokens == [L, L, 3 * L, 2 * L, 2 * L]
    first_row = loop(model_of("transformer-xl", "rms"), text[: 1 + 2 * L])
    np.testing.assert_allclose(scored.nats[:2], first_row.nats, rtol=1e-9)


def test_a_loss_that_is_not_finite_ends_with_segment_and_rate():
    rule = DynamicConfig(rule=DynamicRule.SGD, learning_rate=1e30)
    model = built_to_learn(config_of("transformer-xl", rule, model__dtype=DType.FLOAT32))

    with pytest.raises(NonFiniteError, match=r"(?s)segment 1 .*1e\+30"):
        model.score(TEXT, name="text", log=print)


def test_a_request_to_stop_logs_what_was_scored():
    model = model_of("transformer-xl", "sgd")
    text = np.tile(TEXT, 20)
    lines: list[str] = []

    with pytest.raises(Interrupted):
        model.score(text, name="text", log=lines.append, stop_requested=lambda: True)

    n_scored = SEGMENTS_PER_CALL * L
    nats = sum(learned(model, text[: 1 + n_scored]).nats)
    assert f"{nats / n_scored / np.log(2):.4f}" in lines[-1]


def test_rows_of_one_segment_learn_nothing_and_a_note_says_so():
    model = model_of("transformer-xl", "rms", 3)
    lines: list[str] = []

    model.score(TEXT[: 1 + 3 * L], name="text", log=lines.append)
    (note,) = lines
    assert "--eval.batch_size" in note

    # With one more token, rows have a second segment. No note is added.
    model.score(TEXT[: 1 + 3 * L + 1], name="text", log=lines.append)
    assert lines == [note]


@pytest.mark.parametrize(
    ("setting", "value", "others"),
    [
        ("stride", 2, {"mem_len": 0, "same_length": False}),
        # A stride does not allow this memory either, but the error is the rule's.
        ("stride", 2, {"mem_len": 7, "same_length": True}),
        ("weight_dtype", "int8", {}),
        ("cache_dtype", "bfloat16", {}),
    ],
    ids=["stride", "stride and memory", "weight dtype", "cache dtype"],
)
def test_what_learning_cannot_do_is_refused_by_name(setting, value, others):
    config = EvalConfig(dynamic=RULES["sgd"], **{setting: value}, **others)

    with pytest.raises(UserError, match=rf"eval\.{setting}.*eval\.dynamic\.rule=sgd"):
        config.validate()


@pytest.mark.parametrize(
    "settings",
    [
        # Without a rule, nothing is learned.
        {"learning_rate": 0.1},
        {"decay": 0.1},
        {"shared": True},
        # Settings of other rules.
        {"rule": "sgd", "epsilon": 0.1},
        {"rule": "rmsprop", "statistics_segments": 5},
        # Out of range.
        {"rule": "rms", "learning_rate": -0.1},
        {"rule": "rms", "epsilon": 0.0},
    ],
    ids=str,
)
def test_settings_without_effect_or_out_of_range_are_refused(settings):
    with pytest.raises(UserError, match=r"eval\.dynamic\."):
        EvalConfig(dynamic=DynamicConfig(**settings)).validate()
