"""Tests ensembles: each member is the run that it would be on its own.

How it resumes: tests/faults/test_kills.py.
"""

import operator

import jax
import numpy as np
import pytest

from support import drawn_run, runs, tiny, tiny_run
from txl_jax.config import DType, config_tree
from txl_jax.errors import UserError
from txl_jax.runs import ensemble
from txl_jax.runs.build import build
from txl_jax.runs.run import Run
from txl_jax.training.member_axis import Variation, make_ensemble_step
from txl_jax.training.optimizer import ScheduleLengths
from txl_jax.training.step import make_train_step

STEPS = 12
RATE = "optimizer.learning_rate"
DROPOUT = "model.dropout.rate"
# Members differ in each kind of setting in which they can: seed, learning rate and a dropout rate,
# which is 0 in one member only. The rates of `base` for attention and embedding are the same in all
# members, and never the same as this one.
MEMBERS = [{"seed": 3}, {DROPOUT: 0.0, "seed": 4, RATE: 0.02}, {DROPOUT: 0.5}]
NAMES = ["seed=3", "seed=4+learning_rate=0.02+dropout.rate=0.0", "dropout.rate=0.5"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(config, corpus), from which the members differ."""
    changes = {
        "model__dropout__attention": 0.2,
        "model__dropout__embedding": 0.1,
        "average__start_step": 6,
        "train__steps": STEPS,
        "train__segments_per_call": 2,
        "train__checkpoint_every": 2,
        "train__log_every": 4,
        "train__eval_every": 4,
    }
    return drawn_run.on_text(tmp_path_factory.mktemp("text"), drawn_run.letters(), **changes)


def run(base, folder, members=MEMBERS):
    return runs.train(*base, Run(folder), members=members)


def records(path, member=None):
    """The records of a run, or the records of one member, without what the clock decides."""
    selected = []
    for record in runs.numbers(path):
        if record.pop("member", None) == member:
            selected.append(record)
    return selected


@pytest.mark.full
def test_each_is_the_run_that_it_would_be_alone(base, tmp_path, x64):
    """Shown by the member that differs most."""
    config, corpus = base
    config = config_tree.replace(config, {"model.dtype": DType.FLOAT64})
    name = NAMES[1]

    outcome = run((config, corpus), tmp_path / "all")
    alone = runs.train(ensemble.member_configs(config, MEMBERS)[name], corpus, tmp_path / "alone")

    assert outcome.finished
    assert outcome.step == STEPS
    assert list(outcome.results["members"]) == NAMES
    member_records = records(tmp_path / "all", name)
    for record, expected in zip(member_records, records(tmp_path / "alone"), strict=True):
        assert record.pop("kind") == expected.pop("kind")
        assert record == pytest.approx(expected, rel=1e-6)
    scores = outcome.results["members"][name]
    assert scores["test"]["loss"] == pytest.approx(alone.results["test"]["loss"], rel=1e-9)
    assert scores["best_valid"]["step"] == alone.results["best_valid"]["step"]
    _, state, _ = runs.state_of(Run(tmp_path / "all", member=name))
    _, expected_state, _ = runs.state_of(tmp_path / "alone")
    tiny_run.assert_close(state, expected_state, rtol=1e-6, atol=1e-9)


# `n_compared` members, from the last one, are compared with a run by itself, which takes a
# compilation each.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "n_compared"),
    [(DType.FLOAT64, 1e-9, 1), pytest.param(DType.BFLOAT16, 2e-2, 2, marks=pytest.mark.full)],
    ids=["float64", "bfloat16"],
)
def test_a_step_of_all_members_is_the_step_of_each_alone(dtype, tolerance, n_compared, x64):
    """Members differ in seed, rates of dropout and learning rate.

    In bfloat16 the rates, which are traced arrays, must not make activations float32. The losses
    would show it, which then would have other roundings than a run with constant rates.
    """
    config = config_tree.replace(
        tiny_run.CONFIG, {"model.dtype": dtype, "model.dropout.attention": 0.2}
    )
    rates = ("model.dropout.embedding", "model.dropout.qkv", DROPOUT)
    configs = [
        config_tree.replace(config, {"seed": 3} | dict.fromkeys(rates, 0.0)),
        config_tree.replace(config, {"seed": 4, RATE: 0.02} | dict.fromkeys(rates, 0.3)),
    ]
    built = build(config, vocab_size=tiny.V)
    state = tiny_run.state(built)
    segments = tiny_run.text().segments(0, 1)

    def twice(leaf):
        return np.stack([leaf, leaf])

    step = jax.jit(make_ensemble_step(built.model, config))
    lengths = ScheduleLengths.of(config)
    variation = Variation.of(config, configs)
    after, metrics = jax.device_get(
        step(lengths, variation, jax.tree.map(twice, state), jax.tree.map(twice, segments))
    )

    assert abs(metrics.nats[0] - metrics.nats[1]) > 1e-3 * metrics.nats[0], "the members differ"
    for member in range(len(configs) - n_compared, len(configs)):
        member_config = configs[member]
        alone = build(member_config, vocab_size=tiny.V)
        lone_step = make_train_step(alone.model, alone.optimizer, alone.schedule, member_config)
        expected_after, expected = jax.device_get(jax.jit(lone_step)(state, segments))
        # In bfloat16 losses have the same roundings, up to the order of sums.
        np.testing.assert_allclose(
            metrics.nats[member], expected.nats, rtol=min(2e-3, tolerance), err_msg=f"{member}"
        )
        np.testing.assert_allclose(
            metrics.grad_norm[member], expected.grad_norm, rtol=tolerance, err_msg=f"{member}"
        )
        if dtype is DType.FLOAT64:
            params = jax.tree.map(operator.itemgetter(member), after.params)
            tiny_run.assert_close(params, expected_after.params, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("members", "changes", "message"),
    [
        ([{"seed": 1}, {"seed": 1}], {}, "seed=1; seed=1"),
        ([{"seed": 1}, {"model.n_layer": 3}], {}, r"model\.n_layer\b.*model\.dropout"),
        ([{"seed": 1}, {DROPOUT: 1.5}], {}, r"model\.dropout.*\b1\.5\b"),
        ([{"seed": 1}, {"seed": 2}], {"train.patience": 2}, r"train\.patience\D*\b2\b"),
    ],
    ids=["equal members", "another size", "a rate above 1", "patience"],
)
def test_mistakes_in_the_members_are_errors(base, tmp_path, members, changes, message):
    config, corpus = base
    with pytest.raises(UserError, match=message):
        run((config_tree.replace(config, changes), corpus), tmp_path, members)
    assert list(tmp_path.iterdir()) == []
