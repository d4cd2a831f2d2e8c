"""Tests ensembles: each member is the run that it would be by itself.

How it resumes: tests/faults/test_kills.py.
"""

import operator

import jax
import jax.numpy as jnp
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
RATE, DROPOUT = "optimizer.learning_rate", "model.dropout.rate"
# A rate that is 0 in one and not in another; the others at rates of their own throughout.
MEMBERS = [{"seed": 3}, {DROPOUT: 0.0, "seed": 4, RATE: 0.02}, {DROPOUT: 0.5}]
NAMES = ["seed=3", "seed=4+learning_rate=0.02+dropout.rate=0.0", "dropout.rate=0.5"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(config, corpus)."""
    changes = {
        "model__dropout__attention": 0.2,
        "model__dropout__embedding": 0.1,
        "average__start_step": 6,
    }
    changes |= {"train__steps": STEPS, "train__segments_per_call": 2, "train__checkpoint_every": 2}
    changes |= {"train__log_every": 4, "train__eval_every": 4}
    return drawn_run.on_text(tmp_path_factory.mktemp("text"), drawn_run.letters(), **changes)


def run(base, folder, chosen=MEMBERS, **others):
    return runs.train(*base, Run(folder), members=chosen, **others)


def records(path, member=None):
    """The records of a run, or those of one member, without what the clock decides."""
    return [each for each in runs.numbers(path) if each.pop("member", None) == member]


@pytest.mark.full
def test_each_is_the_run_that_it_would_be_alone(base, tmp_path, x64):
    """Shown by the member that differs most."""
    base = config_tree.replace(base[0], {"model.dtype": DType.FLOAT64}), base[1]
    outcome = run(base, tmp_path / "all")
    assert outcome.finished and outcome.step == STEPS and list(outcome.results["members"]) == NAMES
    name, lone = NAMES[1], tmp_path / "lone"
    alone = runs.train(ensemble.member_configs(base[0], MEMBERS)[name], base[1], lone)
    found, expected = records(tmp_path / "all", name), records(lone)
    for one, other in zip(found, expected, strict=True):
        assert one.pop("kind") == other.pop("kind") and one == pytest.approx(other, rel=1e-6)
    own = outcome.results["members"][name]
    assert own["test"]["loss"] == pytest.approx(alone.results["test"]["loss"], rel=1e-9)
    assert own["best_valid"]["step"] == alone.results["best_valid"]["step"]
    both = Run(tmp_path / "all", member=name), lone
    own_state, lone_state = (runs.state_of(each)[1] for each in both)
    tiny_run.assert_close(own_state, lone_state, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "n_compared"),
    [(DType.FLOAT64, 1e-9, 1), pytest.param(DType.BFLOAT16, 2e-2, 2, marks=pytest.mark.full)],
)
def test_a_step_of_all_members_is_the_step_of_each_alone(dtype, tolerance, n_compared, x64):
    """Seeds, rates of dropout and learning rates of its own; in bfloat16 a traced rate must widen
    nothing.
    """
    rates = ("model.dropout.embedding", "model.dropout.qkv", DROPOUT)
    config = config_tree.replace(
        tiny_run.CONFIG, {"model.dtype": dtype, "model.dropout.attention": 0.2}
    )
    configs = [
        config_tree.replace(config, {"seed": 3} | dict.fromkeys(rates, 0.0)),
        config_tree.replace(config, {"seed": 4, RATE: 0.02} | dict.fromkeys(rates, 0.3)),
    ]
    made, segments = build(config, vocab_size=tiny.V), tiny_run.text().segments(0, 1)
    state, step = tiny_run.state(made), jax.jit(make_ensemble_step(made.model, config))
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (state, segments))
    after, found = step(ScheduleLengths.of(config), Variation.of(config, configs), *both)
    assert abs(found.nats[0] - found.nats[1]) > 1e-3 * found.nats[0]
    for i, own in list(enumerate(configs))[-n_compared:]:
        alone = build(own, vocab_size=tiny.V)
        lone_step = jax.jit(make_train_step(alone.model, alone.optimizer, alone.schedule, own))
        expected_after, expected = lone_step(state, segments)
        # In bfloat16 the same roundings, up to the order of sums.
        np.testing.assert_allclose(found.nats[i], expected.nats, rtol=min(2e-3, tolerance))
        np.testing.assert_allclose(found.grad_norm[i], expected.grad_norm, rtol=tolerance)
        if dtype is DType.FLOAT64:
            params = jax.tree.map(operator.itemgetter(i), after.params)
            tiny_run.assert_close(params, expected_after.params, rtol=1e-6, atol=1e-9)


def test_mistakes_are_refused(base, tmp_path):
    for chosen, changes, pattern in (
        ([{"seed": 1}, {"seed": 1}], {}, "seed=1; seed=1"),
        ([{"seed": 1}, {"model.n_layer": 3}], {}, r"model\.n_layer\b.*model\.dropout"),
        ([{"seed": 1}, {DROPOUT: 1.5}], {}, r"model\.dropout.*\b1\.5\b"),
        ([{"seed": 1}, {"seed": 2}], {"train.patience": 2}, r"train\.patience\D*\b2\b"),
    ):
        with pytest.raises(UserError, match=pattern):
            run((config_tree.replace(base[0], changes), base[1]), tmp_path, chosen)
        assert not list(tmp_path.iterdir())
