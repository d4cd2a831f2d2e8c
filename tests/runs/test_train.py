"""Tests the training job: its parts, signals, samples, a bucket, refusals, a finished run, more or
fewer steps.
"""

import itertools
import json
import math
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

import txl_jax
from support import runs, tiny, tiny_model, tiny_run
from support.runs import numbers, stop_after
from txl_jax import flops
from txl_jax.config import config_tree
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.runs import score_splits, validation
from txl_jax.runs.build import Compilation, build
from txl_jax.runs.checkpoints import RunCheckpoints
from txl_jax.runs.generate import generate_text, make_sampler
from txl_jax.runs.run import Run
from txl_jax.runs.run_tables import read_runs
from txl_jax.runs.time_budget import steps_in
from txl_jax.runs.trained import load_parameters
from txl_jax.runs.trainer import run_updates
from txl_jax.runtime import stop
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.training.hooks import Hook
from txl_jax.training.member_axis import Members
from txl_jax.training.optimizer import learning_rate
from txl_jax.training.step import make_train_step

pytestmark = pytest.mark.usefixtures("traces_kept")

STEPS = 24


def test_the_steps_of_a_time_are_those_that_a_clock_shows(config, corpus, monkeypatch):
    """The first call takes a minute; then S updates take 3 s a call.

    Evaluations cost what their FLOPs do.
    """
    now = 0
    seconds = itertools.chain([60], itertools.repeat(3))

    def finish_call(metrics):
        nonlocal now
        now += next(seconds)

    monkeypatch.setattr(jax, "block_until_ready", finish_call)
    fitting = steps_in(1000, config, corpus, clock=lambda: now)
    steps, each = fitting.steps, fitting.update_seconds
    assert (
        each == 3 / config.train.segments_per_call and steps % config.train.segments_per_call == 0
    )
    sizes = {"vocab_size": 256}
    update, scored = (
        flops.of_step(config, **sizes, n_device=1),
        flops.of_inference(config.model, config.eval, **sizes),
    )
    token = each * scored / update.flops
    valid, test = (
        token * len(split) for split in (corpus.valid[: config.eval.valid_tokens], corpus.test)
    )
    spent = steps * each + (steps / config.train.eval_every + 1) * valid + test
    assert 1000 - 3 - valid <= spent <= 1000
    # How long a hundred steps would take, for a note if fewer fit.
    advised = 100 * (each + valid / config.train.eval_every) + valid + test
    assert (fitting.advised_steps, fitting.advised_minutes) == (100, math.ceil(advised / 60))
    with pytest.raises(UserError, match=r"\bminutes\b"):
        steps_in(test, config, corpus, clock=lambda: now)


class Killed(BaseException):
    """Ends a run as a kill does: nothing catches it."""


def kill_after(step):
    def kill(context):
        if context.step == step:
            raise Killed

    return Hook(2, kill)


def saved_steps(monkeypatch):
    """Returns the list to which the step of each checkpoint is added."""
    saved = []
    save = RunCheckpoints.save

    def save_and_add(checkpoints, step, *rest):
        saved.append(step)
        save(checkpoints, step, *rest)

    monkeypatch.setattr(RunCheckpoints, "save", save_and_add)
    return saved


def test_before_maintenance_a_run_saves_and_goes_on(
    run_once, config, corpus, tmp_path, monkeypatch
):
    """At the next progress line, of step 4; the other steps are those of
    `train.checkpoint_every`.
    """
    whole, outcome = run_once
    saved = saved_steps(monkeypatch)
    for name in ("_save_requested", "_watching"):
        monkeypatch.setattr(stop, name, threading.Event())
    stop._watching.set()
    maintain = Hook(
        2, lambda context: stop.request_save("maintenance") if context.step == 2 else None
    )
    assert runs.train(config, corpus, tmp_path, hooks=[maintain]).results == outcome.results
    assert numbers(tmp_path) == numbers(whole) and saved == [4, 6, 12, 18, 24]
    assert "note      checkpoint saved at step 4," in (tmp_path / "log.txt").read_text()


@pytest.mark.full
def test_a_run_in_a_bucket_is_that_in_a_folder(run_once, config, corpus, bucket):
    """An error ends it between two checkpoints; it resumes, and is scored once more."""
    (local, outcome), remote = run_once, Run(bucket / "run")
    with pytest.raises(Killed):
        runs.train(config, corpus, remote, hooks=[kill_after(16)])  # The last checkpoint is of 12.
    assert read_metrics(remote.path)[-1]["step"] == 16  # Written again, and not twice.
    assert runs.train(config, corpus, remote).results == outcome.results
    assert numbers(remote) == numbers(local)


@pytest.fixture
def default_handlers():
    """Python's own handlers, which test runners may have changed."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield defaults
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_to_a_script_saves_the_run_and_then_ends_the_script(
    run_once, config, tmp_path, default_handlers
):
    def start(number, step):
        send = Hook(
            2, lambda context: os.kill(os.getpid(), number) if context.step == step else None
        )
        return txl_jax.train(config, tmp_path / "run", hooks=[send], cache_dir=str(tmp_path))

    def assert_saved(step):
        assert runs.state_of(tmp_path / "run")[0] == step
        assert {number: signal.getsignal(number) for number in default_handlers} == default_handlers

    with pytest.raises(KeyboardInterrupt):
        start(signal.SIGINT, 2)
    assert_saved(2)
    with pytest.raises(SystemExit) as ended:
        start(signal.SIGTERM, 6)  # Between two progress lines, and after averaging has begun.
    assert ended.value.code == 143
    assert_saved(6)
    arrived = []
    signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    assert start(signal.SIGTERM, 10) == run_once[1], "the script's own handler keeps its signal"
    assert arrived == [signal.SIGTERM] and numbers(tmp_path / "run") == numbers(run_once[0])


def test_samples_are_written_at_evaluations_and_change_nothing_else(
    run_once, config, corpus, tmp_path, capsys, monkeypatch
):
    """The first start is stopped in the middle of the first evaluation: the next one repeats it,
    and samples.
    """
    values = {
        "train.sample_every": 8,
        "generate.length": 20,
        "generate.samples": 2,
        "generate.prompt": "one ",
    }
    sampling, folder = config_tree.replace(config, values), tmp_path / "run"
    assert not runs.train(sampling, corpus, folder, stop_requested=stop_after(5)).finished
    assert os.listdir(folder / "samples") == []
    saved = saved_steps(monkeypatch)
    outcome = runs.train(sampling, corpus, folder)
    assert saved == [8, 12, 18, 24], "a kill before step 12 repeats no evaluation"
    assert numbers(folder) == numbers(run_once[0]) and outcome == run_once[1]
    tiny_run.assert_equal(*(runs.state_of(run)[1] for run in (folder, run_once[0])))
    assert sorted(os.listdir(folder / "samples")) == [f"step-{step}.txt" for step in (16, 24, 8)]
    printed = capsys.readouterr().out.splitlines()
    generate_text(sampling, Run.read(folder))
    best = (folder / "samples" / f"step-{outcome.results['best_valid']['step']}.txt").read_bytes()
    assert best == (folder / "sample-seed0.txt").read_bytes() and best.startswith(b"one ")
    assert all(score_splits.printable(line) in printed for line in best.splitlines())
    logged = runs.log_lines(folder / "log.txt")
    # On one device, in log.txt alone.
    for begins in ("command  ", "versions ", "attention", "remat "):
        assert sum(line.startswith(begins) for line in logged) == 2 and begins not in "".join(
            printed
        )


def test_a_run_that_diverges_ends_with_results_that_json_can_hold(config, corpus, tmp_path):
    """A loss above 709 nats has no perplexity in float64."""
    wild = {
        "optimizer.learning_rate": 1e3,
        "optimizer.warmup_steps": 0,
        "train.steps": 4,
        "train.eval_every": 4,
    }
    changed = config_tree.replace(config, wild)
    assert runs.train(changed, corpus, tmp_path).finished
    score_splits.evaluate_splits(changed, corpus, Run.read(tmp_path))
    results, again = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("results", "evaluation")
    )
    for found in (results["best_valid"], results["test"], again["test"]):
        assert found["loss"] > 709 and found["perplexity"] is None and "loss" in found["note"]


def test_a_workdir_that_cannot_be_made_and_a_text_too_short_for_the_batch_are_refused(
    config, corpus, tmp_path
):
    (tmp_path / "file").write_text("")
    large = config_tree.replace(config, {"train.batch_size": 2000})
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.*--workdir"):
        runs.train(config, corpus, tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"train\.batch_size"):
        runs.train(large, corpus, tmp_path / "run")
    silent = config_tree.replace(config, {"train.sample_every": 8, "model.network": "lstm"})
    with pytest.raises(UserError, match=r"model\.network.*lstm"):
        runs.train(silent, corpus, tmp_path / "run")
    assert os.listdir(tmp_path) == ["file"]


# A run that has finished


@pytest.mark.full
def test_results_that_are_damaged_of_an_earlier_end_or_of_other_lengths_are_made_again(
    finished, config, corpus
):
    """A run that goes on from an end leaves its results behind, if it is killed before the test
    scores.
    """
    workdir, outcome = finished
    before, path = numbers(workdir), Path(workdir.path, "results.json")
    earlier = json.dumps(outcome.results | {"steps": STEPS - 8, "test": {"loss": 0.0}}).encode()
    for content in (earlier, b"", b'{"steps": 24, "eval": 7}', b"\xff"):
        path.write_bytes(content)
        assert runs.train(config, corpus, workdir) == outcome
        assert json.loads(path.read_text()) == outcome.results and numbers(workdir) == before
    again = runs.train(config_tree.replace(config, {"eval.mem_len": 3}), corpus, workdir).results
    assert (
        again["eval"]["mem_len"] == 3 and again["test"]["loss"] != outcome.results["test"]["loss"]
    )


def test_results_count_after_their_steps_and_at_their_evaluation_settings(finished, config, corpus):
    """So do the best parameters and the losses that patience compares."""
    workdir, outcome = finished

    def validation_of(config):
        built = SimpleNamespace(config=config, members=Members())
        checkpoints = SimpleNamespace(best=[Checkpointer(workdir.best, keep=1, log=print)])
        log = mock.Mock()
        return validation.Validation(built, corpus, workdir, checkpoints, log, lambda: False)

    same = validation_of(config)
    assert same.results_after(STEPS) == outcome.results and same.results_after(STEPS - 8) is None
    same.read_losses()
    records = read_metrics(workdir.path)
    recorded = [record["loss"] for record in records if record["kind"] == "valid"]
    assert same.losses == [recorded] and len(recorded) == 3
    other = validation_of(config_tree.replace(config, {"eval.mem_len": 3}))
    assert other.results_after(STEPS) is None
    other.read_losses()
    assert other.losses == [[]]
    for content in (b"", b'{"steps": 24, "eval": 7}', b"\xff"):
        Path(workdir.path, "results.json").write_bytes(content)
        assert same.results_after(STEPS) is None


def test_a_test_score_without_results_is_recorded_again(finished, config, corpus, monkeypatch):
    """As after a kill between the record and results.json, and once: the log drops the record."""
    workdir, _ = finished
    opened = []

    def open_log(log, step, *, redone, **options):
        opened.append((step, redone))
        raise Killed

    monkeypatch.setattr(RunLog, "open", open_log)
    for _ in range(2):
        with pytest.raises(Killed):
            runs.train(config, corpus, workdir)
        Path(workdir.path, "results.json").unlink(missing_ok=True)
    assert opened == [(STEPS, set()), (STEPS, {"test"})]


def test_a_finished_run_is_neither_compiled_nor_scored_again(
    finished, config, corpus, capsys, monkeypatch
):
    workdir, outcome = finished
    before = Path(workdir.path, "metrics.jsonl").read_bytes()
    monkeypatch.setattr(validation, "score_with_line", pytest.fail)
    monkeypatch.setattr(Compilation, "of", pytest.fail)
    assert runs.train(config, corpus, workdir) == outcome
    assert Path(workdir.path, "metrics.jsonl").read_bytes() == before
    assert re.search(r"(?m)^finished\b", capsys.readouterr().out)


@pytest.mark.full
def test_a_damaged_best_checkpoint_costs_only_the_best(finished, config, corpus, capsys):
    workdir, _ = finished
    Path(workdir.path, "results.json").unlink()
    for path in Path(workdir.best).rglob("*"):
        if path.is_file() and path.name != "digests.json":
            path.write_bytes(path.read_bytes()[:-1] + b"#")
    outcome = runs.train(config, corpus, workdir)
    assert outcome.finished and outcome.results["best_valid"] is None
    assert workdir.best in capsys.readouterr().out
    assert generate_text(config, workdir)


def test_the_best_parameters_are_loaded_where_later_ones_exist(finished, config, corpus):
    (workdir, _), parts = finished, build(config, vocab_size=corpus.vocabulary.size)
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 7, leaf.dtype), parts.abstract_state.params
    )
    with Checkpointer(workdir.best, keep=1, log=print) as best:
        best.save(STEPS - 18, {"params": params}, {})
    step, found = load_parameters(parts, workdir, log=print)
    assert step == STEPS - 18 and all((leaf == 7).all() for leaf in jax.tree.leaves(found))


def test_the_mean_of_the_newest_checkpoints_is_scored(finished, config, corpus):
    workdir, _ = finished
    parts, averaged, more = (
        build(
            config_tree.replace(config, {"eval.average_checkpoints": count}),
            vocab_size=corpus.vocabulary.size,
        )
        for count in (None, 2, 3)
    )
    each = []
    with Checkpointer(workdir.latest, keep=2, log=print) as latest:
        for before in (None, STEPS):
            step, state, _ = latest.restore(parts.abstract_state, before=before)
            each.append(state.scored_params)
    assert step == STEPS - 6
    logged = []
    step, found = load_parameters(averaged, workdir, log=logged.append)
    assert step == STEPS and [re.findall(r"\d+", line) for line in logged] == [
        [str(STEPS - 6), str(STEPS)]
    ]
    for a, b, mean in zip(*map(jax.tree.leaves, (*each, found)), strict=True):
        np.testing.assert_allclose(mean, (np.asarray(a) + np.asarray(b)) / 2, rtol=1e-6)
    with pytest.raises(ValueError, match=r"average_checkpoints\D*\b2\b.*\bgot 3\b"):
        load_parameters(more, workdir, log=logged.append)


# The parts of a run


def test_the_training_program_does_not_grow_with_the_layers():
    def lowered_size(n_layer):
        made = tiny_run.parts(model__n_layer=n_layer)
        step = make_train_step(made.model, made.optimizer, made.schedule, made.config)
        return len(
            jax.jit(step).lower(made.abstract_state, tiny_run.text().segments(0, 1)).as_text()
        )

    assert lowered_size(24) <= 1.01 * lowered_size(2)  # One per cent for longer numbers.


def test_a_second_sample_compiles_nothing(caplog):
    made = tiny_run.parts()
    sample, params = (
        make_sampler(made.config, tiny_model.VOCABULARY),
        jax.device_put(tiny_run.params(made.model)),
    )
    first, negative = sample(made, params, lambda: False), jax.tree.map(jax.numpy.negative, params)
    caplog.clear()
    with jax.log_compiles():
        assert sample(made, negative, lambda: False) != first
    assert not [line for line in caplog.messages if line.startswith("Compiling")]


def test_cutoffs_that_do_not_fit_the_vocabulary_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"model\.cutoffs\D*\b5,13\b\D*\b13\b"):
        tiny_run.parts(model__cutoffs=(5, 13))


def loop(steps, hooks, events, *, bad_call=None):
    """Runs the loop in calls of two updates, without a model, and adds what happens to `events`."""

    def add(first_step, metrics):
        if first_step == bad_call:
            raise NonFiniteError(f"call {first_step}")
        events.append(f"metrics {first_step}")

    def hook(name, every):
        return Hook(every, lambda context: events.append(f"{name} {context.step}"))

    progress, due = mock.Mock(add=add), [hook(*each) for each in hooks.items()]

    def train_step(state, segments):
        return state, events.append("call")

    run_updates(0, train_step, lambda done: done, range(0, steps, 2), due, progress, lambda: False)
    return progress


def test_metrics_come_one_call_late_or_before_a_hook_and_a_bad_number_stops_the_run_before_it():
    events = []
    progress = loop(10, {"eval": 4, "save": 6}, events)
    assert progress.exclude.call_count == 5 and progress.waited.call_count == 6, (
        "the time of hooks, and for segments"
    )
    first = "call, call, metrics 0, metrics 2, eval 4, call, metrics 4, save 6"
    assert (
        ", ".join(events) == f"{first}, call, metrics 6, eval 8, call, metrics 8, eval 10, save 10"
    )
    events = []
    with pytest.raises(NonFiniteError, match="call 2"):
        loop(8, {"save": 2}, events, bad_call=2)
    assert events == ["call", "metrics 0", "save 2", "call"]
    with pytest.raises(NonFiniteError):  # Also in the last call, and without hooks.
        loop(4, {}, [], bad_call=2)


# More steps, or fewer


MORE = 36


@pytest.fixture(scope="module")
def longer(run_once, config, corpus, tmp_path_factory):
    """(folder, outcome) of the finished run, which then got more steps and was not disturbed."""
    folder = tmp_path_factory.mktemp("longer") / "run"
    shutil.copytree(run_once[0].path, folder)
    return folder, runs.train(tiny.changed(config, train__steps=MORE), corpus, folder)


def test_a_finished_run_trains_on_by_the_schedule_of_the_new_total(run_once, longer, config):
    folder, outcome = longer
    assert outcome.finished and outcome.step == outcome.results["steps"] == MORE
    grown = {"step": STEPS, "name": "train.steps", "old": STEPS, "new": MORE}
    assert outcome.results["changes"] == [grown] and "changes" not in run_once[1].results
    assert json.loads((folder / "results.json").read_text()) == outcome.results
    before, after = numbers(run_once[0]), numbers(folder)
    assert after[: len(before)] == before, "the test scores of the earlier end stay"
    assert [record["step"] for record in after if record["kind"] == "test"] == [STEPS, MORE]
    rate = learning_rate(tiny.changed(config, train__steps=MORE))
    rates = {each["step"]: each["learning_rate"] for each in after if each["kind"] == "train"}
    assert rates[STEPS] < 1e-3 < rates[STEPS + 4] == pytest.approx(float(rate(STEPS + 3)))
    peak = config.optimizer.learning_rate
    [note] = [
        line for line in (folder / "log.txt").read_text().splitlines() if "% of its peak" in line
    ]
    assert f"{float(rate(STEPS)) / peak:.1%} of its peak, not 0.0%" in note


def test_it_equals_a_run_with_the_same_change_that_is_killed_and_stopped(
    longer, finished, config, corpus
):
    (folder, outcome), (workdir, _) = longer, finished
    more = tiny.changed(config, train__steps=MORE)
    # Before its first checkpoint: the record has the change, and the checkpoint not.
    with pytest.raises(Killed):
        runs.train(more, corpus, workdir, hooks=[kill_after(STEPS + 2)])
    assert Run.read(workdir.path).config.train.steps == MORE
    [row] = read_runs([workdir.path])
    assert row.results is None and "of 36 training steps" in row.row([])["state"], (
        "the results are of the earlier end"
    )
    assert not runs.train(more, corpus, workdir, stop_requested=stop_after(4)).finished
    assert runs.train(more, corpus, workdir) == outcome
    assert numbers(workdir) == numbers(folder)
    tiny_run.assert_equal(*(runs.state_of(run)[1] for run in (workdir, folder)))


def test_a_run_that_was_stopped_gets_fewer_steps_and_not_less_than_are_done(
    config, corpus, tmp_path
):
    assert not runs.train(config, corpus, tmp_path, stop_requested=stop_after(3)).finished
    done = runs.state_of(tmp_path)[0]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=rf"train\.steps was 24 and is now {done - 2}, fewer than the {done} "
    ):
        runs.train(tiny.changed(config, train__steps=done - 2), corpus, tmp_path)
    assert {path: path.read_bytes() for path in files} == files
    outcome = runs.train(tiny.changed(config, train__steps=done + 2), corpus, tmp_path)
    change = {"step": done, "name": "train.steps", "old": STEPS, "new": done + 2}
    assert outcome.results["steps"] == done + 2 and outcome.results["changes"] == [change]
