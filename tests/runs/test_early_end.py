"""Tests what validation decides during a run: when it ends early, and when weight averaging begins.

All runs here are one program. Its weight average begins only where a test sets a patience for it,
so that the losses of different runs can be compared bit for bit.
"""

import json

import jax
import numpy as np
import pytest

from support import runs, tiny, tiny_run
from txl_jax.config import config_tree
from txl_jax.runtime.log import read_metrics
from txl_jax.training.hooks import Hook

STEPS = 16
EVERY = 2  # Training steps between evaluations.
NEVER = 10**6  # A patience that no run uses up.


@pytest.fixture(scope="module")
def base(config, corpus, traces_kept):
    """(config, corpus) of a run with so high a rate that its loss goes up and down."""
    changes = {
        "model.n_layer": 1,
        "optimizer.learning_rate": 0.115,
        "optimizer.warmup_steps": 0,
        "train.batch_size": 4,
        "train.segments_per_call": 1,
        "train.steps": STEPS,
        "train.log_every": STEPS,
        "train.eval_every": EVERY,
        "train.checkpoint_every": STEPS,
        "average.start_step": None,
        "average.ema_decay": None,
        "average.nt_asgd_patience": NEVER,
    }
    return config_tree.replace(config, changes), corpus


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """The validation losses of the run without patience."""
    _, losses = run(base, tmp_path_factory.mktemp("whole"))
    return losses


@pytest.fixture(scope="module")
def averaged(base, tmp_path_factory):
    """(directory, validation losses) of the run whose mean begins when validation says so."""
    folder = tmp_path_factory.mktemp("averaged")
    _, losses = run(base, folder, average__nt_asgd_patience=1)
    return folder, losses


def run(base, folder, *, stop_requested=lambda: False, hooks=(), **changes):
    """Trains to an end or a stop. Returns the outcome and all validation losses so far."""
    config, corpus = base
    config = tiny.changed(config, **changes)
    outcome = runs.train(config, corpus, folder, stop_requested=stop_requested, hooks=hooks)
    return outcome, validation_losses(folder)


def validation_losses(folder):
    return [record["loss"] for record in read_metrics(folder) if record["kind"] == "valid"]


def stop_at(evaluation):
    """A hook that requests a stop at an evaluation, counted from 1."""

    def stop(context):
        if context.step == evaluation * EVERY:
            context.request_stop()

    return Hook(EVERY, stop)


class KilledError(Exception):
    """Ends a run like a kill: no checkpoint is written."""


def kill_at(evaluation):
    """A hook that ends the run at an evaluation like a kill."""

    def kill(context):
        if context.step == evaluation * EVERY:
            raise KilledError

    return Hook(EVERY, kill)


def first_evaluation(losses, is_due):
    """Returns the first evaluation, from 1, at which the losses so far are due."""
    for evaluation in range(1, len(losses) + 1):
        if is_due(losses[:evaluation]):
            return evaluation
    pytest.fail(f"it is never due for these losses, choose another rate: {losses}")


def out_of_patience(losses, patience=2):
    """Whether the last `patience` losses are all no better than the best before them."""
    return len(losses) > patience and min(losses[-patience:]) >= min(losses[:-patience])


def mean_is_due(losses):
    """Whether the last loss is worse than the best, not counting the loss right before it.

    This is the criterion for a patience of 1.
    """
    return len(losses) > 2 and losses[-1] > min(losses[:-2])


def test_a_run_ends_when_its_patience_does(base, whole, tmp_path):
    """A run that was stopped in between has not lost count, and with more patience it continues."""
    last = first_evaluation(whole, out_of_patience)
    assert last < len(whole), "it would have ended anyway"

    stopped, losses = run(base, tmp_path, hooks=[stop_at(last - 1)], train__patience=2)
    assert not stopped.finished
    assert losses == whole[: last - 1]

    outcome, losses = run(base, tmp_path, train__patience=2)
    assert outcome.finished
    assert outcome.step == last * EVERY
    assert losses == whole[:last]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["steps"] == last * EVERY
    assert results["best_valid"]["loss"] == min(losses)

    longer, losses = run(base, tmp_path, train__patience=None)
    assert longer.step == STEPS
    assert losses == whole


def test_evaluations_that_are_made_again_after_a_kill_count_once(base, whole, tmp_path):
    """The log has their losses already, from before the kill."""
    last = first_evaluation(whole, out_of_patience)
    assert last > 3, "with fewer losses before the kill, counting them twice would change nothing"

    with pytest.raises(KilledError):
        run(base, tmp_path, hooks=[kill_at(last - 1)], train__patience=2)
    assert validation_losses(tmp_path) == whole[: last - 1]

    outcome, losses = run(base, tmp_path, train__patience=2)
    assert outcome.finished
    assert outcome.step == last * EVERY
    assert losses == whole[:last]


def test_the_mean_begins_when_validation_stops_improving(base, whole, tmp_path):
    """A run that is stopped right after the mean has begun continues with the same mean."""
    due = first_evaluation(whole, mean_is_due)
    assert due * EVERY < STEPS

    hooks = [stop_at(due + 1)]
    stopped, losses = run(base, tmp_path, hooks=hooks, average__nt_asgd_patience=1)
    assert not stopped.finished
    assert len(losses) == due + 1
    outcome, losses = run(base, tmp_path, average__nt_asgd_patience=1)

    assert losses[:due] == whole[:due], "before it begins, the mean is the parameters"
    assert losses[due + 1 :] != whole[due + 1 :]
    assert outcome.results["best_valid"]["loss"] == min(losses)
    _, state, _ = runs.state_of(tmp_path)
    assert int(state.average.begun) == due * EVERY
    assert state.scored_params is state.average.params
    mean = jax.tree.leaves(state.average.params)[0]
    last = jax.tree.leaves(state.params)[0]
    assert np.abs(mean - last).max() > 1e-3, "the mean is of several updates"


def test_the_mean_begins_in_an_evaluation_that_a_stop_cut_short(base, averaged, tmp_path):
    """The resumed run repeats the evaluation, and the mean begins as in a run that was never
    stopped.
    """
    undisturbed, expected_losses = averaged
    due = first_evaluation(expected_losses, mean_is_due)
    questions = []

    def note_last_update(context):
        if context.step == due * EVERY - 1:
            questions.append("the update before the evaluation is done")

    def stop_requested():
        if not questions:
            return False
        questions.append("asked")
        # The first question comes before the next update, the others while the validation split
        # is scored.
        return len(questions) > 2

    stopped, _ = run(
        base,
        tmp_path,
        average__nt_asgd_patience=1,
        stop_requested=stop_requested,
        hooks=[Hook(1, note_last_update)],
    )
    assert not stopped.finished
    assert stopped.step == due * EVERY
    _, state, notes = runs.state_of(tmp_path)
    assert notes["evaluation_pending"]
    assert int(state.average.begun) > STEPS, "it has not begun"

    outcome, losses = run(base, tmp_path, average__nt_asgd_patience=1)
    assert outcome.finished
    assert losses == expected_losses
    _, resumed_state, _ = runs.state_of(tmp_path)
    _, expected_state, _ = runs.state_of(undisturbed)
    assert int(resumed_state.average.begun) == due * EVERY
    tiny_run.assert_equal(resumed_state, expected_state)


@pytest.mark.full
def test_losses_of_other_settings_are_not_compared(base, tmp_path):
    """At another temperature losses are worse than before. Compared with the earlier ones, they
    would end a run whose patience is a single evaluation at once.
    """
    stopped, before = run(base, tmp_path, hooks=[stop_at(3)])
    assert not stopped.finished
    assert len(before) == 3

    outcome, losses = run(base, tmp_path, eval__temperature=10.0, train__patience=1)

    after = losses[len(before) :]
    assert after[0] > min(before), "choose a temperature that scores worse"
    assert outcome.finished
    assert len(after) > 1
    # It has ended at the first loss that is no better than the others at this temperature, or with
    # the last step.
    for evaluation in range(1, len(after)):
        assert not out_of_patience(after[:evaluation], patience=1), evaluation
    assert out_of_patience(after, patience=1) or outcome.step == STEPS
