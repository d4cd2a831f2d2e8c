"""Tests what validation decides while a run goes on: when it ends early, and when the mean of the
weights begins.
"""

import json

import jax
import numpy as np
import pytest

from support import runs, tiny, tiny_run
from support.runs import stop_after
from txl_jax.config import config_tree
from txl_jax.runtime.log import read_metrics
from txl_jax.training.hooks import Hook

EVERY = 3


@pytest.fixture(scope="module")
def given(config, corpus, usual_emitters):
    """(config, corpus): a run with so high a rate that its loss goes up and down."""
    changes = {
        "model.n_layer": 1,
        "optimizer.learning_rate": 0.1,
        "optimizer.warmup_steps": 0,
        "train.batch_size": 4,
    }
    changes |= {"train.segments_per_call": 1, "train.steps": 60, "train.log_every": 60}
    changes |= {"train.eval_every": EVERY, "train.checkpoint_every": 30}
    # The tests below start the mean by validation losses instead.
    changes |= {"average.start_step": None, "average.ema_decay": None}
    return config_tree.replace(config, changes), corpus


def run(given, folder, *, stop_requested=lambda: False, stop_at=None, **changes):
    """Trains to an end, or to evaluation `stop_at` (from 1): the outcome and validation losses."""
    config, corpus = given

    def stop(context):
        if context.step == stop_at * EVERY:
            context.request_stop()

    changed = tiny.changed(config, **changes)
    hooks = [] if stop_at is None else [Hook(EVERY, stop)]
    outcome = runs.train(changed, corpus, folder, stop_requested=stop_requested, hooks=hooks)
    return outcome, [r["loss"] for r in read_metrics(folder) if r["kind"] == "valid"]


def first(due, losses):
    """The first evaluation, from 1, after which `due` of the losses so far."""
    return next(n for n in range(1, len(losses) + 1) if due(losses[:n]))


def never_better(losses, patience):
    return len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


class KilledError(Exception):
    """Ends a run like a kill: no checkpoint is written."""


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    return run(given, tmp_path_factory.mktemp("whole"))[1]


def test_a_run_ends_when_its_patience_does(given, whole, tmp_path):
    """A run that was stopped meanwhile has not lost count."""
    last = first(lambda so_far: never_better(so_far, 2), whole)
    assert last < len(whole), "the losses of this run fall all the time; choose a higher rate"
    stopped, found = run(given, tmp_path, stop_at=last - 1, train__patience=2)
    assert not stopped.finished and found == whole[: last - 1]
    outcome, found = run(given, tmp_path, train__patience=2)
    assert outcome.finished and outcome.step == last * EVERY and found == whole[:last]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["steps"] == last * EVERY and results["best_valid"]["loss"] == min(found)
    # Given more patience it goes on.
    longer, found = run(given, tmp_path, train__patience=None)
    assert longer.step == 60 and found == whole


def test_evaluations_that_are_made_again_after_a_kill_count_once(given, whole, tmp_path):
    """The log has their losses already, from before the kill."""
    last = first(lambda so_far: never_better(so_far, 2), whole)
    config, corpus = given
    patient = tiny.changed(config, train__patience=2)

    def kill(context):
        if context.step == (last - 1) * EVERY:
            raise KilledError

    with pytest.raises(KilledError):
        runs.train(patient, corpus, tmp_path, hooks=[Hook(EVERY, kill)])
    recorded = [record["loss"] for record in read_metrics(tmp_path) if record["kind"] == "valid"]
    assert recorded == whole[: last - 1] and last > 3
    outcome, found = run(given, tmp_path, train__patience=2)
    assert outcome.finished and outcome.step == last * EVERY and found == whole[:last]


def test_the_mean_begins_when_validation_stops_improving(given, tmp_path):
    """A run that is stopped right after goes on with the same mean."""
    # The same program, in which the mean never begins: its numbers are equal bit for bit, however
    # it is compiled.
    whole = run(given, tmp_path / "never", average__nt_asgd_patience=10**6)[1]
    due = first(lambda so_far: len(so_far) > 2 and so_far[-1] > min(so_far[:-2]), whole)
    stopped, found = run(given, tmp_path / "begins", stop_at=due + 1, average__nt_asgd_patience=1)
    assert not stopped.finished and len(found) == due + 1
    outcome, found = run(given, tmp_path / "begins", average__nt_asgd_patience=1)
    _, state, _ = runs.state_of(tmp_path / "begins")
    assert int(state.average.begun) == due * EVERY < 60
    assert found[:due] == whole[:due], "before it begins, the mean is the parameters"
    assert found[due + 1 :] != whole[due + 1 :]
    mean, last = (jax.tree.leaves(tree)[0] for tree in (state.average.params, state.params))
    assert np.abs(mean - last).max() > 1e-3
    assert outcome.results["best_valid"]["loss"] == min(found)
    assert state.scored_params is state.average.params


def test_the_mean_begins_in_an_evaluation_that_a_stop_cut_short(given, tmp_path):
    """The resumed run repeats the evaluation, and the mean begins as in a run that was never
    stopped.
    """
    config, corpus = given
    averaged = tiny.changed(config, average__nt_asgd_patience=1)
    _, losses = run((averaged, corpus), tmp_path / "whole")
    due = first(lambda so_far: len(so_far) > 2 and so_far[-1] > min(so_far[:-2]), losses)
    questions = []

    def count(context):
        if context.step == due * EVERY - 1:
            questions.append("the update before the evaluation is done")

    def stop_requested():
        if not questions:
            return False
        questions.append("asked")
        # The first question comes before the next update, the others while the validation text is
        # scored.
        return len(questions) > 2

    hooks = [Hook(1, count)]
    stopped = runs.train(
        averaged, corpus, tmp_path / "cut", stop_requested=stop_requested, hooks=hooks
    )
    assert not stopped.finished and stopped.step == due * EVERY
    _, state, notes = runs.state_of(tmp_path / "cut")
    assert notes["evaluation_pending"]
    assert int(state.average.begun) > config.train.steps, "it has not begun"

    outcome, found = run((averaged, corpus), tmp_path / "cut")
    assert found == losses
    resumed, undisturbed = (runs.state_of(tmp_path / name)[1] for name in ("cut", "whole"))
    assert int(resumed.average.begun) == int(undisturbed.average.begun) == due * EVERY
    tiny_run.assert_equal(resumed, undisturbed)
    assert outcome.finished


@pytest.mark.full
def test_losses_of_other_settings_are_not_compared(given, tmp_path):
    """Scored at another temperature they are worse than before, and so would end a run of little
    patience at once.
    """
    stopped, before = run(given, tmp_path, stop_requested=stop_after(31))
    assert not stopped.finished and len(before) >= 2
    outcome, found = run(given, tmp_path, eval__temperature=10.0, train__patience=1)
    after = found[len(before) :]
    assert after[0] > min(before), "choose a temperature that scores worse"
    ends = next((n for n in range(1, len(after) + 1) if never_better(after[:n], 1)), len(after))
    assert len(after) == ends > 1 and outcome.finished
