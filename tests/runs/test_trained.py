"""Tests what is loaded before a first evaluation, also of an ensemble's member.

The checkpoints hold drawn states. Nothing is trained.
"""

import jax
import numpy as np
import pytest

import txl_jax
from support import drawn_run, order, runs, tiny_run
from txl_jax.runs import ensemble as ensemble_job
from txl_jax.runs.build import build_for
from txl_jax.runs.run import Run
from txl_jax.runs.trained import load_parameters, load_state
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.log import METRICS
from txl_jax.training.member_axis import Members

pytestmark = pytest.mark.usefixtures("traces_kept")

STEP = 2
MEMBERS = [{"seed": 1}, {"seed": 2}]
# The running totals of each member, any numbers.
TOTALS = [
    {"nats": 3.0, "tokens": 2.0, "grad_norm": 0.5, "updates": 1},
    {"nats": 5.0, "tokens": 4.0, "grad_norm": 1.5, "updates": 1},
]
# Notes of a checkpoint. "unknown" stands for a note of a later version.
NOTES = {"evaluation_pending": False, "steps": 10, "changes": [], "unknown": 1}


def drawn_state(built, factor):
    """A state without zeros, unlike the state of another factor. Its mean is not its parameters."""
    count = iter(range(1, 1000))  # More numbers than there are arrays.

    # Each array is moved by a number of its own.
    def draw(leaf):
        return (leaf + next(count) * factor).astype(leaf.dtype)

    return jax.tree.map(draw, tiny_run.state(built)).replace(step=np.int32(STEP))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """(config, corpus)."""
    changes = {"average__start_step": 0, "model__n_layer": 1}
    return drawn_run.on_text(tmp_path_factory.mktemp("text"), drawn_run.letters(), **changes)


@pytest.fixture(scope="module")
def built(text):
    config, corpus = text
    return build_for(config, corpus.vocabulary, uses=())


@pytest.fixture(scope="module")
def run(text, built, tmp_path_factory):
    """(workdir, state) of a run that was stopped before its first evaluation."""
    return save(tmp_path_factory.mktemp("run") / "run", text, built)


@pytest.fixture(scope="module")
def ensemble(text, built, tmp_path_factory):
    """(workdir, states of the members) of an ensemble, stopped before its first evaluation."""
    return save(tmp_path_factory.mktemp("ensemble") / "run", text, built, MEMBERS)


def save(folder, text, built, members=()):
    run = runs.record(folder, *text, members)
    names = Members(run.member_names)
    states = [drawn_state(built, number + 1) for number in range(len(names))]
    notes = NOTES | {"running_totals": names.to_json(TOTALS[: len(names)])}
    with Checkpointer(run.latest, keep=1, log=print) as latest:
        latest.save(STEP, jax.device_put(names.stack(states)), notes)
    if members:
        return run, states
    return run, states[0]


def test_before_its_first_evaluation_a_run_is_loaded_with_its_mean(run, text):
    workdir, state = run
    last = jax.tree.leaves(state.params)[0]
    mean = jax.tree.leaves(state.average.params)[0]
    assert np.abs(last - mean).max() > 0.1, "the mean is not the last parameters"
    # Every other mode, and conversions, load it by the same function.
    model = txl_jax.load(workdir.path)
    assert model.step == STEP
    tiny_run.assert_equal(model.params, state.average.params)


def test_a_member_is_loaded_with_its_own_mean(ensemble, built):
    workdir, states = ensemble
    run = Run.read(workdir.path, member=workdir.member_names[1])
    step, params = load_parameters(built, run, log=print)
    assert step == STEP
    tiny_run.assert_equal(params, states[1].average.params)


def test_a_member_that_is_split_off_takes_its_state_along(ensemble, built, tmp_path, monkeypatch):
    workdir, states = ensemble
    name = workdir.member_names[1]
    target = tmp_path / "alone"
    events = order.record(monkeypatch, target)
    # To build it again would take a second.
    monkeypatch.setattr(ensemble_job, "build_for", lambda *arguments, **options: built)
    ensemble_job.split_off(workdir.path, name, target)
    step, state, notes = load_state(built, Run.read(target), log=print)
    assert step == STEP
    tiny_run.assert_equal(state, states[1])
    assert notes == NOTES | {"running_totals": TOTALS[1]}
    renamed = [path for what, path in events if what == "rename"]
    assert METRICS in renamed
    # A split that is killed leaves no run.
    assert renamed.index("config.json") == len(renamed) - 1
