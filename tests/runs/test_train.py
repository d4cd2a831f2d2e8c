"""Tests the training job: stop and resume, kills, a run in a bucket, non-finite losses, what is refused."""

import json
import os
import re
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from support import runs, tiny_run
from support.metadata_server import MetadataServer
from support.runs import StopAfter, numbers
from txl_jax.config import config_tree
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.runs import score, validation
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.run import Run
from txl_jax.runtime import stop
from txl_jax.runtime.log import read_metrics
from txl_jax.training.hooks import Hook

STEPS = 24


class Killed(BaseException):
    """Ends a run as a kill does: nothing catches it."""


def test_a_run_leaves_results_metrics_and_checkpoints(finished, config, corpus):
    workdir, outcome = finished
    assert outcome.finished and outcome.step == STEPS
    assert json.loads(Path(workdir.path, "results.json").read_text()) == outcome.results
    assert outcome.results["test"]["tokens"] == len(corpus.test) - 1
    records = read_metrics(workdir.path)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(4, STEPS + 1, 4))
    valid = [r for r in records if r["kind"] == "valid"]
    assert [r["step"] for r in valid] == [8, 16, 24]
    assert outcome.results["best_valid"]["loss"] == min(r["loss"] for r in valid)
    assert runs.state_of(workdir)[0] == STEPS
    assert valid[-1]["loss"] < np.log(256)  # It learned something.


def test_a_stopped_run_goes_on_exactly(finished, config, corpus, tmp_path):
    """The fifth question is asked in the middle of the first evaluation, which the next start repeats."""
    whole, _ = finished
    workdir = Run(tmp_path / "pieces")
    assert not runs.train(config, corpus, workdir, stop_requested=StopAfter(5)).finished
    assert "valid" not in {record["kind"] for record in numbers(workdir)}
    assert not runs.train(config, corpus, workdir, stop_requested=StopAfter(4)).finished
    assert runs.train(config, corpus, workdir).finished
    assert numbers(workdir) == numbers(whole)
    tiny_run.assert_equal(*(runs.state_of(run)[1] for run in (workdir, whole)))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "fails"), [("valid", (RunCheckpoints, "save")), ("test", (validation, "write_json"))])
def test_what_was_recorded_before_a_kill_is_recorded_once(finished, config, corpus, tmp_path, monkeypatch, kind, fails):
    """A kill between a record and the file that marks it as done."""
    whole, _ = finished
    workdir = Run(tmp_path / "pieces")
    asked = StopAfter(5)  # In the first evaluation, which then has to be repeated.
    assert not runs.train(config, corpus, workdir, stop_requested=asked).finished
    with monkeypatch.context() as patch:
        patch.setattr(*fails, mock.Mock(side_effect=Killed))
        with pytest.raises(Killed):
            runs.train(config, corpus, workdir)
    assert [record["kind"] for record in read_metrics(workdir.path)][-1] == kind
    runs.train(config, corpus, workdir)
    assert numbers(workdir) == numbers(whole)


def test_before_maintenance_a_run_saves_and_goes_on(finished, config, corpus, tmp_path, monkeypatch):
    """At the next progress line, of step 4; the other steps are those of `train.checkpoint_every`."""
    (whole, outcome), workdir, saved = finished, Run(tmp_path / "run"), []
    save = RunCheckpoints.save
    monkeypatch.setattr(RunCheckpoints, "save", lambda own, step, *rest: saved.append(step) or save(own, step, *rest))
    for name in ("_save_requested", "_watching"):
        monkeypatch.setattr(stop, name, threading.Event())

    def maintain(context):
        if context.step == 2:
            server.change("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")
            assert stop._save_requested.wait(20)

    with MetadataServer(maintenance_event="NONE", preempted="FALSE") as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        stop.act_on_notices()
        assert runs.train(config, corpus, workdir, hooks=[Hook(2, maintain)]).results == outcome.results
    assert numbers(workdir) == numbers(whole) and saved == [4, 6, 12, 18, 24]
    assert "note      checkpoint of step 4," in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.full
def test_a_run_in_a_bucket_is_that_in_a_folder(finished, config, corpus, bucket):
    """An error ends it between two checkpoints; it resumes, and is scored once more."""
    (local, outcome), remote = finished, Run(bucket / "run")

    def kill(context):
        if context.step == 16:  # The last checkpoint is of 12.
            raise Killed

    with pytest.raises(Killed):
        runs.train(config, corpus, remote, hooks=[Hook(4, kill)])
    assert read_metrics(remote.path)[-1]["step"] == 16  # Written again, and not twice.
    assert runs.train(config, corpus, remote).results == outcome.results
    assert numbers(remote) == numbers(local)


def test_a_workdir_that_cannot_be_made_is_one_sentence(config, corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.*--workdir"):
        runs.train(config, corpus, Run(tmp_path / "file" / "run"))


@pytest.mark.full
def test_a_non_finite_loss_stops_and_keeps_the_last_good_checkpoint(config, corpus, tmp_path):
    workdir = Run(tmp_path / "run")
    runs.train(config, corpus, workdir, stop_requested=StopAfter(3))
    steps = sorted(os.listdir(workdir.latest))
    # The same run, but with a rate that blows up; the workdir records that it was started so.
    wild = config_tree.replace(config, {"optimizer.learning_rate": 1e30})
    Path(workdir.path, "config.json").unlink()
    runs.record(workdir.path, wild, corpus)
    with pytest.raises(NonFiniteError) as error:
        runs.train(wild, corpus, workdir)
    assert re.search(r"(?<![\w.])6(?![\w.])", str(error.value)), "the step of the checkpoint"
    assert sorted(os.listdir(workdir.latest)) == steps


def test_a_run_that_diverges_ends_with_results_that_json_can_hold(config, corpus, tmp_path):
    """A loss above 709 nats has no perplexity in float64."""
    wild = {"optimizer.learning_rate": 1e3, "optimizer.warmup_steps": 0, "train.steps": 4, "train.eval_every": 4}
    workdir = Run(tmp_path / "run")
    changed = config_tree.replace(config, wild)
    assert runs.train(changed, corpus, workdir).finished
    score.evaluate_splits(changed, corpus, Run.read(workdir.path))
    results, again = (json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("results", "evaluation"))
    for found in (results["best_valid"], results["test"], again["test"]):
        assert found["loss"] > 709 and found["perplexity"] is None and "loss" in found["note"]


def test_a_text_too_short_for_the_batch_is_refused_before_anything_is_written(config, corpus, tmp_path):
    workdir = Run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"train\.batch_size"):
        runs.train(config_tree.replace(config, {"train.batch_size": 2000}), corpus, workdir)
    assert not Path(workdir.path).exists()
