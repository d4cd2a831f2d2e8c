"""Tests dynamic evaluation against a loop in Python: score a segment, then one step downhill.

The loop is written apart from the product. It cuts the text itself, and has the mean loss and the
three rules in NumPy. With the product it shares only the model's forward pass.
"""

import functools
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
# With one row 7 segments, the last one with padding. With three rows 3.
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


def config_of(network: str, rule: DynamicConfig, *, rows: int = 1, **changes: Any):
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
    config = tiny.changed(config, train__loss=LossPart.HALF, train__segment_len=4)
    return tiny.changed(config, **NETWORKS[network], **changes)


@functools.cache
def model_of(network: str, rule: str, rows: int = 1, **changes: Any) -> DynamicModel:
    config = config_of(network, RULES[rule], rows=rows, **changes)
    built = build(dynamic.training_config(config), vocab_size=tiny.V, uses=["training"])
    params = jax.tree.map(jnp.asarray, tiny_run.params(built.model))
    statistics = jax.tree.map(jnp.asarray, squares_like(params)) if rule == "rms" else None
    return DynamicModel(built_with_rule(built), params, statistics)


def squares_like(params: Any) -> Any:
    """Statistics for the rule RMS: some 0, as of a rare word, and some large."""
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: rng.exponential(size=leaf.shape) * (leaf > -0.5), params)


class Learned(NamedTuple):
    """What the loop computes."""

    nats: list[float]  # Of each segment.
    tokens: list[int]  # Of each segment.
    params: Any


def loop(model: DynamicModel, text: np.ndarray, *, updates_first: bool = False) -> Learned:
    """Scores and learns a text in plain Python."""
    module: Any = model.built.model
    lengths = model.built.config.eval
    rows = lengths.batch_size
    row_len = -(-(len(text) - 1) // rows)

    gradient = jax.jit(jax.grad(mean_loss_of(module, lengths), has_aux=True))
    params = trained = jax.tree.map(np.asarray, model.params)
    moment = jax.tree.map(np.zeros_like, params)
    memory = module.init_memory(batch_size=rows, mem_len=lengths.mem_len)
    nats, tokens = [], []
    for first in range(0, row_len, L):
        inputs = np.zeros((rows, L), np.int32)
        targets = np.zeros((rows, L), np.int32)
        mask = np.zeros((rows, L), bool)
        for row in range(rows):
            for column in range(L):
                place = row * row_len + first + column
                if first + column < row_len and place + 1 < len(text):
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
    rate, decay, epsilon = settings.learning_rate, settings.decay, settings.epsilon
    grads = jax.tree.map(np.asarray, grads)
    if settings.rule == "sgd":
        return (
            jax.tree.map(lambda p, g, p0: p - rate * g + decay * (p0 - p), params, grads, trained),
            moment,
        )
    if settings.rule == "rms":
        roots = jax.tree.map(np.sqrt, statistics)
        strengths = roots
    else:
        moment = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, moment, grads)
        roots = jax.tree.map(lambda v: np.sqrt(v / (1 - 0.999**count)), moment)
        mean = np.concatenate([root.ravel() for root in jax.tree.leaves(roots)]).mean()
        strengths = jax.tree.map(lambda root: root / mean, roots)
    params = jax.tree.map(
        lambda p, g, root, strength, p0: (
            p - rate * g / (root + epsilon) + np.minimum(decay * strength, 1) * (p0 - p)
        ),
        params,
        grads,
        roots,
        strengths,
        trained,
    )
    return params, moment


def learned(model: DynamicModel, text: np.ndarray) -> Learned:
    """The same by the product, with a segment of padding at the end."""
    rows = model.built.config.eval.batch_size
    warmup_tokens = model.built.config.eval.warmup_tokens
    reader = evaluation_segments(text, batch_size=rows, segment_len=L, warmup_tokens=warmup_tokens)
    segments = reader.segments(0, reader.n_segments + 1)
    state, losses = model.step(None, model.start(), model.built.place(segments))
    nats, tokens = losses.nats.tolist(), losses.tokens.tolist()
    assert (nats.pop(), tokens.pop()) == (0, 0)
    return Learned(nats, tokens, state.params)


def difference(a: Learned, b: Learned) -> float:
    """The largest difference of a loss or a parameter."""
    assert a.tokens == b.tokens
    params = jax.tree.map(lambda x, y: np.abs(x - y).max(), a.params, b.params)
    return max(np.abs(np.subtract(a.nats, b.nats)).max(), *jax.tree.leaves(params))


CASES = [(network, rule, rows) for network in NETWORKS for rule in RULES for rows in (1, 3)]
QUICK = [
    ("transformer-xl", "sgd", 1),
    ("transformer-xl", "rms", 3),
    ("adaptive softmax", "rmsprop", 3),
    ("lstm", "rmsprop", 1),
]


@pytest.mark.parametrize(("network", "rule", "rows"), full_but(QUICK, CASES))
def test_each_segment_is_scored_and_then_learned_as_in_a_plain_loop(network, rule, rows):
    model = model_of(network, rule, rows)

    found = learned(model, TEXT)

    expected = loop(model, TEXT)
    assert difference(found, expected) < 1e-9
    # The comparison sees whether the update comes before the score.
    assert difference(found, loop(model, TEXT, updates_first=True)) > 1e-3


def test_at_rate_zero_the_scores_are_the_static_ones():
    rule = DynamicConfig(rule=DynamicRule.RMSPROP, learning_rate=0.0)
    config = config_of("transformer-xl", rule, rows=2)
    built = build(dynamic.training_config(config), vocab_size=tiny.V, uses=["training"])
    params = jax.tree.map(jnp.asarray, tiny_run.params(built.model))
    model = DynamicModel(built_with_rule(built), params)
    nats = np.zeros(len(TEXT))
    static_nats = np.zeros(len(TEXT))

    totals = model.score(TEXT, name="text", log=print, token_nats=nats)

    static_built = build(config, vocab_size=tiny.V, uses=["evaluation"])
    static = score(static_built, params, TEXT, name="text", log=print, token_nats=static_nats)
    np.testing.assert_allclose(nats, static_nats, rtol=0, atol=1e-9)
    assert totals.tokens == static.tokens == len(TEXT) - 1
    assert abs(totals.nats - static.nats) < 1e-9


def test_a_score_begins_with_the_trained_parameters_and_leaves_them_as_they_are():
    model = model_of("transformer-xl", "rmsprop")
    before = jax.tree.map(np.array, model.params)

    first = model.score(TEXT, name="text", log=print)
    again = model.score(TEXT, name="text", log=print)

    assert first == again
    assert first.nats == pytest.approx(sum(loop(model, TEXT).nats), rel=1e-9)
    jax.tree.map(np.testing.assert_array_equal, model.params, before)


def test_the_loss_that_is_learned_has_the_temperature():
    model = model_of("transformer-xl", "sgd", eval__temperature=1.7)

    found = learned(model, TEXT)

    assert difference(found, loop(model, TEXT)) < 1e-9


def test_warmup_tokens_fill_the_memory_and_are_not_learned():
    # Another row scores them, later: what was learned from them would be known there.
    model = model_of("transformer-xl", "sgd", 2, eval__warmup_tokens=2 * L)
    text = TEXT[: 1 + 2 * 3 * L]

    found = learned(model, text)

    # The second row is two segments ahead of its own text. Nothing but the first row's text is
    # learned while it reads them.
    assert found.tokens == [L, L, 2 * L, L, L]
    alone = learned(model_of("transformer-xl", "sgd"), text[: 1 + 2 * L])
    np.testing.assert_allclose(found.nats[:2], alone.nats, rtol=1e-9)


def test_a_loss_that_is_not_finite_ends_with_segment_and_rate():
    rule = DynamicConfig(rule=DynamicRule.SGD, learning_rate=1e30)
    config = config_of("transformer-xl", rule, model__dtype=DType.FLOAT32)
    built = build(dynamic.training_config(config), vocab_size=tiny.V, uses=["training"])
    params = jax.tree.map(jnp.asarray, tiny_run.params(built.model))

    with pytest.raises(NonFiniteError, match=r"(?s)segment 1 .*1e\+30"):
        DynamicModel(built_with_rule(built), params).score(TEXT, name="text", log=print)


def test_a_request_to_stop_logs_what_was_scored():
    model = model_of("transformer-xl", "sgd")
    text = np.tile(TEXT, 20)
    lines: list[str] = []

    with pytest.raises(Interrupted):
        model.score(text, name="text", log=lines.append, stop_requested=lambda: True)

    scored = learned_nats(model, text[: 1 + 8 * L])
    assert f"{scored / (8 * L) / np.log(2):.4f}" in lines[-1]


def learned_nats(model: DynamicModel, text: np.ndarray) -> float:
    return sum(learned(model, text).nats)


def test_rows_of_one_segment_learn_nothing_and_a_note_says_so():
    model = model_of("transformer-xl", "sgd", 3)
    lines: list[str] = []

    model.score(TEXT[: 1 + 3 * L], name="text", log=lines.append)
    assert len(lines) == 1 and "--eval.batch_size" in lines[0]

    model.score(TEXT[: 1 + 3 * L + 1], name="text", log=lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("setting", "value", "others"),
    [
        ("stride", 2, {"mem_len": 0, "same_length": False}),
        # Of all that is wrong with a stride here, the rule comes first.
        ("stride", 2, {"mem_len": 7, "same_length": True}),
        ("weight_dtype", "int8", {}),
        ("cache_dtype", "bfloat16", {}),
    ],
)
def test_what_learning_cannot_do_is_refused_by_name(setting, value, others):
    config = EvalConfig(dynamic=RULES["sgd"], **{setting: value}, **others)

    with pytest.raises(UserError, match=rf"eval\.{setting}.*eval\.dynamic\.rule=sgd"):
        config.validate()


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 0.1},
        {"decay": 0.1},
        {"shared": True},
        {"rule": "sgd", "epsilon": 0.1},
        {"rule": "rmsprop", "statistics_segments": 5},
        {"rule": "rms", "learning_rate": -0.1},
        {"rule": "rms", "epsilon": 0.0},
    ],
)
def test_settings_without_effect_or_out_of_range_are_refused(settings):
    with pytest.raises(UserError, match=r"eval\.dynamic\."):
        EvalConfig(dynamic=DynamicConfig(**settings)).validate()
