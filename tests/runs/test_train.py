"""Tests a training run: its parts, signals, samples, a bucket, mistakes, its end, and other
numbers of steps.
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


def test_the_steps_of_a_time_are_those_that_a_clock_shows(config, corpus, monkeypatch, capsys):
    """The first call takes a minute, which does not count, and every further call of S updates 3 s.

    Evaluations take the time of their FLOPs.
    """
    now = 0
    seconds = itertools.chain([60], itertools.repeat(3))

    def finish_call(metrics):
        nonlocal now
        now += next(seconds)

    monkeypatch.setattr(jax, "block_until_ready", finish_call)

    fitting = steps_in(1000, config, corpus, clock=lambda: now)

    # The end of the compilation, which may take minutes, is told.
    assert f"compiled in {fitting.compilation.seconds:.1f} s" in capsys.readouterr().out
    update_seconds = 3 / config.train.segments_per_call
    assert fitting.update_seconds == update_seconds
    assert fitting.steps % config.train.segments_per_call == 0

    update = flops.of_step(config, vocab_size=256, n_device=1).flops
    token = flops.of_inference(config.model, config.eval, vocab_size=256)
    token_seconds = update_seconds * token / update
    valid = token_seconds * len(corpus.valid[: config.eval.valid_tokens])
    test = token_seconds * len(corpus.test)
    evaluations = fitting.steps / config.train.eval_every + 1
    spent = fitting.steps * update_seconds + evaluations * valid + test
    # Less is left than another call and its evaluation would take.
    assert 1000 - 3 - valid <= spent <= 1000

    # How long a hundred steps would take, for a note if fewer fit.
    advised = 100 * (update_seconds + valid / config.train.eval_every) + valid + test
    assert fitting.advised_steps == 100
    assert fitting.advised_minutes == math.ceil(advised / 60)

    # If there is only the time to score the test split, no step fits.
    with pytest.raises(UserError, match=r"\bminutes\b"):
        steps_in(test, config, corpus, clock=lambda: now)


class Killed(BaseException):
    """Ends a run as a kill does: nothing catches it."""


def kill_after(step):
    def kill(context):
        if context.step == step:
            raise Killed

    return Hook(2, kill)


def assert_same_state(run, expected):
    """The latest checkpoints of two runs must be equal bit for bit."""
    _, state, _ = runs.state_of(run)
    _, expected_state, _ = runs.state_of(expected)
    tiny_run.assert_equal(state, expected_state)


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
    # This process waits for notices of maintenance, for this test only.
    for name in ("_save_requested", "_watching"):
        monkeypatch.setattr(stop, name, threading.Event())
    stop._watching.set()

    def request_save(context):
        if context.step == 2:
            stop.request_save("maintenance")

    results = runs.train(config, corpus, tmp_path, hooks=[Hook(2, request_save)]).results

    assert results == outcome.results
    assert numbers(tmp_path) == numbers(whole)
    assert saved == [4, 6, 12, 18, 24]
    assert "note      checkpoint saved at step 4," in (tmp_path / "log.txt").read_text()


@pytest.mark.full
def test_a_run_in_a_bucket_has_the_numbers_of_a_run_in_a_directory(
    run_once, config, corpus, bucket
):
    """An error ends it between two checkpoints. It resumes, and is scored once more."""
    local, outcome = run_once
    remote = Run(bucket / "run")

    # The last checkpoint before it is of step 12.
    with pytest.raises(Killed):
        runs.train(config, corpus, remote, hooks=[kill_after(16)])
    assert read_metrics(remote.path)[-1]["step"] == 16

    assert runs.train(config, corpus, remote).results == outcome.results
    # The records of steps 13 to 16 are written again, and not twice.
    assert numbers(remote) == numbers(local)


@pytest.fixture
def default_handlers():
    """Python's own handlers, which test runners may have changed."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {}
    for number, handler in defaults.items():
        before[number] = signal.signal(number, handler)
    yield defaults
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_to_a_script_saves_the_run_and_then_ends_the_script(
    run_once, config, tmp_path, default_handlers
):
    folder = tmp_path / "run"

    def start(number, step):
        """Starts the run, and sends this process a signal after a step."""

        def send(context):
            if context.step == step:
                os.kill(os.getpid(), number)

        return txl_jax.train(config, folder, hooks=[Hook(2, send)], cache_dir=str(tmp_path))

    def assert_saved(step):
        saved_step, _, _ = runs.state_of(folder)
        assert saved_step == step
        for number, handler in default_handlers.items():
            assert signal.getsignal(number) == handler, number

    with pytest.raises(KeyboardInterrupt):
        start(signal.SIGINT, 2)
    assert_saved(2)

    # Between two progress lines, and after averaging has begun.
    with pytest.raises(SystemExit) as ended:
        start(signal.SIGTERM, 6)
    assert ended.value.code == 128 + signal.SIGTERM, "as a shell reports it"
    assert_saved(6)

    # The last start ends, since the script has a handler of its own.
    whole, outcome = run_once
    arrived = []
    signal.signal(signal.SIGTERM, lambda number, frame: arrived.append(number))
    assert start(signal.SIGTERM, 10) == outcome, "the script's own handler keeps its signal"
    assert arrived == [signal.SIGTERM]
    assert numbers(folder) == numbers(whole)


def test_samples_are_written_at_evaluations_and_change_nothing_else(
    run_once, config, corpus, tmp_path, capsys, monkeypatch
):
    """The first start is stopped in the middle of the first evaluation. The next one repeats the
    evaluation, and then samples.
    """
    whole, expected_outcome = run_once
    folder = tmp_path / "run"
    values = {
        "train.sample_every": 8,
        "generate.length": 20,
        "generate.samples": 2,
        "generate.prompt": "one ",
    }
    sampling = config_tree.replace(config, values)

    assert not runs.train(sampling, corpus, folder, stop_requested=stop_after(5)).finished
    assert os.listdir(folder / "samples") == []
    saved = saved_steps(monkeypatch)
    outcome = runs.train(sampling, corpus, folder)

    # Step 8 is no multiple of checkpoint_every: the repeated evaluation is saved at once.
    assert saved == [8, 12, 18, 24], "a kill before step 12 repeats no evaluation"
    assert numbers(folder) == numbers(whole)
    assert outcome == expected_outcome
    assert_same_state(folder, whole)

    assert set(os.listdir(folder / "samples")) == {"step-8.txt", "step-16.txt", "step-24.txt"}
    printed = capsys.readouterr().out.splitlines()
    generate_text(sampling, Run.read(folder))
    best_step = outcome.results["best_valid"]["step"]
    best = (folder / "samples" / f"step-{best_step}.txt").read_bytes()
    assert best == (folder / "sample-seed0.txt").read_bytes()
    assert best.startswith(b"one ")
    for line in best.splitlines():
        assert score_splits.printable(line) in printed

    # On one device these lines are only in log.txt, once for each start.
    logged = runs.log_lines(folder / "log.txt")
    for begins in ("command  ", "versions ", "attention", "remat "):
        assert sum(line.startswith(begins) for line in logged) == 2, begins
        assert begins not in "".join(printed)


def test_a_run_that_diverges_ends_with_results_that_json_can_hold(config, corpus, tmp_path):
    """A loss above 709 nats has no perplexity in float64, whose largest number is exp(709.8)."""
    short = tiny.changed(config, train__steps=6, train__eval_every=6)

    # Weights that are 300 times as large give finite losses, but huge ones.
    def enlarge(leaf):
        return jax.device_put(300 * np.asarray(leaf), leaf.sharding)

    def diverge(context):
        if context.step == 2:
            params = jax.tree.map(enlarge, context.state.params)
            return context.state.replace(params=params)
        return None

    assert runs.train(short, corpus, tmp_path, hooks=[Hook(2, diverge)]).finished
    score_splits.evaluate_splits(short, corpus, Run.read(tmp_path))

    results = json.loads((tmp_path / "results.json").read_text())
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    for scores in (results["best_valid"], results["test"], evaluation["test"]):
        assert scores["loss"] > 709
        assert scores["perplexity"] is None
        assert "loss" in scores["note"]


def test_mistakes_are_errors_before_anything_is_written(config, corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{re.escape(str(tmp_path))}.*--workdir"):
        runs.train(config, corpus, tmp_path / "file" / "run")

    # 2,520 bytes are too few for a segment of 9 in each of 2,000 rows.
    large = config_tree.replace(config, {"train.batch_size": 2000})
    with pytest.raises(UserError, match=r"train\.batch_size"):
        runs.train(large, corpus, tmp_path / "run")

    without_samples = config_tree.replace(
        config, {"train.sample_every": 8, "model.network": "lstm"}
    )
    with pytest.raises(UserError, match=r"model\.network.*lstm"):
        runs.train(without_samples, corpus, tmp_path / "run")
    assert os.listdir(tmp_path) == ["file"]


# A run that has finished


@pytest.mark.full
def test_results_that_are_corrupted_of_an_earlier_end_or_of_other_lengths_are_made_again(
    finished, config, corpus
):
    """A run that continues after its end leaves its results behind, if it is killed before the test
    split is scored.
    """
    workdir, outcome = finished
    before = numbers(workdir)
    path = Path(workdir.path, "results.json")
    earlier = outcome.results | {"steps": STEPS - 8, "test": {"loss": 0.0}}

    # Of an earlier end, empty, with no settings of evaluation, and not JSON.
    for content in (json.dumps(earlier).encode(), b"", b'{"steps": 24, "eval": 7}', b"\xff"):
        path.write_bytes(content)
        assert runs.train(config, corpus, workdir) == outcome, content
        assert json.loads(path.read_text()) == outcome.results, content
        assert numbers(workdir) == before, content

    shorter = config_tree.replace(config, {"eval.mem_len": 3})
    again = runs.train(shorter, corpus, workdir).results
    assert again["eval"]["mem_len"] == 3
    assert again["test"]["loss"] != outcome.results["test"]["loss"]


def test_results_count_after_their_steps_and_at_their_evaluation_settings(finished, config, corpus):
    """So do the best parameters and the losses that patience compares."""
    workdir, outcome = finished

    def validation_of(config):
        """The part of a run that evaluates. Of the others, only these attributes are asked for."""
        built = SimpleNamespace(config=config, members=Members())
        checkpoints = SimpleNamespace(best=[Checkpointer(workdir.best, keep=1, log=print)])
        log = mock.Mock()
        return validation.Validation(built, corpus, workdir, checkpoints, log, lambda: False)

    same = validation_of(config)
    assert same.results_after(STEPS) == outcome.results
    assert same.results_after(STEPS - 8) is None
    same.read_losses()
    records = read_metrics(workdir.path)
    recorded = [record["loss"] for record in records if record["kind"] == "valid"]
    assert same.losses == [recorded]
    assert len(recorded) == 3, "one loss for each evaluation"

    other = validation_of(config_tree.replace(config, {"eval.mem_len": 3}))
    assert other.results_after(STEPS) is None
    other.read_losses()
    assert other.losses == [[]]

    for content in (b"", b'{"steps": 24, "eval": 7}', b"\xff"):
        Path(workdir.path, "results.json").write_bytes(content)
        assert same.results_after(STEPS) is None, content


def test_a_test_score_without_results_is_recorded_again(finished, config, corpus, monkeypatch):
    """As after a kill between the record and results.json, and once: the log drops the record."""
    workdir, _ = finished
    opened = []

    # `redone` has the kinds of records that the log drops at the step from which the run resumes.
    def open_log(log, step, *, redone, **options):
        opened.append((step, redone))
        raise Killed

    monkeypatch.setattr(RunLog, "open", open_log)
    # The first start has the results, the second has not.
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
def test_a_corrupted_best_checkpoint_costs_only_the_best(finished, config, corpus, capsys):
    workdir, _ = finished
    Path(workdir.path, "results.json").unlink()
    for path in Path(workdir.best).rglob("*"):
        if path.is_file() and path.name != "digests.json":
            path.write_bytes(path.read_bytes()[:-1] + b"#")

    outcome = runs.train(config, corpus, workdir)

    assert outcome.finished
    assert outcome.results["best_valid"] is None
    assert workdir.best in capsys.readouterr().out
    # Other modes use the latest parameters instead.
    assert generate_text(config, workdir)


def test_the_best_parameters_are_loaded_where_later_ones_exist(finished, config, corpus):
    workdir, _ = finished
    built = build(config, vocab_size=corpus.vocabulary.size)

    def sevens(leaf):
        return np.full(leaf.shape, 7, leaf.dtype)

    # The best parameters are of an early step now. The latest checkpoints stay those of the end.
    early_step = STEPS - 18
    earlier = jax.tree.map(sevens, built.abstract_state.params)
    with Checkpointer(workdir.best, keep=1, log=print) as best:
        best.save(early_step, {"params": earlier}, {})

    step, params = load_parameters(built, workdir, log=print)

    assert step == early_step
    tiny_run.assert_equal(jax.device_get(params), earlier)


def test_the_mean_of_the_latest_checkpoints_is_scored(finished, config, corpus):
    workdir, _ = finished

    def build_to_average(count):
        averaging = config_tree.replace(config, {"eval.average_checkpoints": count})
        return build(averaging, vocab_size=corpus.vocabulary.size)

    abstract_state = build_to_average(None).abstract_state
    with Checkpointer(workdir.latest, keep=2, log=print) as latest:
        last_step, last, _ = latest.restore(abstract_state)
        earlier_step, earlier, _ = latest.restore(abstract_state, before=STEPS)
    assert (earlier_step, last_step) == (STEPS - 6, STEPS)

    logged = []
    step, params = load_parameters(build_to_average(2), workdir, log=logged.append)

    assert step == STEPS
    [line] = logged
    assert re.findall(r"\d+", line) == [str(STEPS - 6), str(STEPS)]

    def mean(a, b):
        return (np.asarray(a) + np.asarray(b)) / 2

    expected = jax.tree.map(mean, earlier.scored_params, last.scored_params)
    tiny_run.assert_close(params, expected, rtol=1e-6)

    # Only two are kept.
    with pytest.raises(ValueError, match=r"average_checkpoints\D*\b2\b.*\bgot 3\b"):
        load_parameters(build_to_average(3), workdir, log=logged.append)


# The parts of a run


def test_the_training_program_does_not_grow_with_the_layers():
    def lowered_size(n_layer):
        built = tiny_run.parts(model__n_layer=n_layer)
        step = make_train_step(built.model, built.optimizer, built.schedule, built.config)
        lowered = jax.jit(step).lower(built.abstract_state, tiny_run.text().segments(0, 1))
        return len(lowered.as_text())

    # Layers are a loop. One per cent is for numbers of more digits in the text.
    assert lowered_size(24) <= 1.01 * lowered_size(2)


def test_a_second_sample_compiles_nothing(caplog):
    built = tiny_run.parts()
    sample = make_sampler(built.config, tiny_model.VOCABULARY)
    host_params = tiny_run.params(built.model)
    params = jax.device_put(host_params)
    negative_params = jax.device_put(jax.tree.map(np.negative, host_params))
    first = sample(built, params, lambda: False)
    caplog.clear()

    with jax.log_compiles():
        second = sample(built, negative_params, lambda: False)

    assert second != first
    assert not [line for line in caplog.messages if line.startswith("Compiling")]


def test_the_error_for_cutoffs_beyond_the_vocabulary_has_both_numbers():
    with pytest.raises(ValueError, match=r"model\.cutoffs\D*\b13\b\D*\b5,13\b"):
        tiny_run.parts(model__cutoffs=(5, 13))


def run_loop(steps, hook_intervals, events, *, bad_call=None):
    """Runs the loop in calls of two updates, without a model, and adds what happens to `events`.

    `hook_intervals` has the interval of each hook by its name. The metrics of `bad_call` are not
    finite.
    """

    def add(first_step, metrics):
        if first_step == bad_call:
            raise NonFiniteError(f"call {first_step}")
        events.append(f"metrics {first_step}")

    def hook(name, every):
        return Hook(every, lambda context: events.append(f"{name} {context.step}"))

    def train_step(state, segments):
        return state, events.append("call")

    progress = mock.Mock(add=add)
    hooks = [hook(name, every) for name, every in hook_intervals.items()]
    calls = range(0, steps, 2)
    run_updates(0, train_step, lambda done: done, calls, hooks, progress, lambda: False)
    return progress


def test_metrics_come_one_call_late_or_right_before_a_hook():
    """So that no hook saves or evaluates a state whose numbers are not known to be finite."""
    events = []

    progress = run_loop(10, {"eval": 4, "save": 6}, events)

    assert events == [
        *("call", "call", "metrics 0", "metrics 2", "eval 4"),
        *("call", "metrics 4", "save 6"),
        *("call", "metrics 6", "eval 8"),
        *("call", "metrics 8", "eval 10", "save 10"),
    ]
    # The time of each of the five hooks is not counted as the time of updates. The waits for
    # segments are counted: five, and one for the end of the calls.
    assert progress.exclude.call_count == 5
    assert progress.waited.call_count == 6


def test_a_number_that_is_not_finite_ends_the_run_before_a_hook():
    events = []
    with pytest.raises(NonFiniteError, match="call 2"):
        run_loop(8, {"save": 2}, events, bad_call=2)
    assert events == ["call", "metrics 0", "save 2", "call"]

    # Also in the last call, and without hooks.
    with pytest.raises(NonFiniteError):
        run_loop(4, {}, [], bad_call=2)


# More steps, or fewer


MORE = 36


@pytest.fixture(scope="module")
def longer(run_once, config, corpus, tmp_path_factory):
    """(folder, outcome) of the finished run, which then got more steps and was not disturbed."""
    folder = tmp_path_factory.mktemp("longer") / "run"
    shutil.copytree(run_once[0].path, folder)
    return folder, runs.train(tiny.changed(config, train__steps=MORE), corpus, folder)


def test_a_finished_run_trains_on_by_the_schedule_of_the_new_total(run_once, longer, config):
    whole, earlier_outcome = run_once
    folder, outcome = longer
    assert outcome.finished
    assert outcome.step == outcome.results["steps"] == MORE
    change = {"step": STEPS, "name": "train.steps", "old": STEPS, "new": MORE}
    assert outcome.results["changes"] == [change]
    assert "changes" not in earlier_outcome.results
    assert json.loads((folder / "results.json").read_text()) == outcome.results

    before = numbers(whole)
    after = numbers(folder)
    assert after[: len(before)] == before, "the test scores of the earlier end stay"
    assert [record["step"] for record in after if record["kind"] == "test"] == [STEPS, MORE]

    expected_rate = learning_rate(tiny.changed(config, train__steps=MORE))
    rates = {}
    for record in after:
        if record["kind"] == "train":
            rates[record["step"]] = record["learning_rate"]
    # At the earlier end the rate was near 0. By the schedule of 36 steps it is higher.
    assert rates[STEPS] < 1e-3 < rates[STEPS + 4]
    assert rates[STEPS + 4] == pytest.approx(float(expected_rate(STEPS + 3)))

    share = float(expected_rate(STEPS)) / config.optimizer.learning_rate
    logged = runs.log_lines(folder / "log.txt")
    [note] = [line for line in logged if "rate after step" in line]
    assert re.findall(r"[\d.]+%", note) == ["0.0%", f"{share:.1%}"]


def test_it_equals_a_run_with_the_same_change_that_is_killed_and_stopped(
    longer, finished, config, corpus
):
    folder, outcome = longer
    workdir, _ = finished
    more = tiny.changed(config, train__steps=MORE)

    # Killed before its first checkpoint, the run has the change in its record, and not in a
    # checkpoint.
    with pytest.raises(Killed):
        runs.train(more, corpus, workdir, hooks=[kill_after(STEPS + 2)])
    assert Run.read(workdir.path).config.train.steps == MORE
    [row] = read_runs([workdir.path])
    assert row.results is None, "the results are of the earlier end"
    assert "of 36 training steps" in row.row([])["state"]

    assert not runs.train(more, corpus, workdir, stop_requested=stop_after(4)).finished
    assert runs.train(more, corpus, workdir) == outcome
    assert numbers(workdir) == numbers(folder)
    assert_same_state(workdir, folder)


def test_a_run_that_was_stopped_gets_fewer_steps_and_not_less_than_are_done(
    config, corpus, tmp_path
):
    assert not runs.train(config, corpus, tmp_path, stop_requested=stop_after(3)).finished
    done, _, _ = runs.state_of(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    fewer = rf"train\.steps was 24 and is now {done - 2}, fewer than the {done} "
    with pytest.raises(UserError, match=fewer):
        runs.train(tiny.changed(config, train__steps=done - 2), corpus, tmp_path)
    for path, content in before.items():
        assert path.read_bytes() == content, path

    outcome = runs.train(tiny.changed(config, train__steps=done + 2), corpus, tmp_path)
    change = {"step": done, "name": "train.steps", "old": STEPS, "new": done + 2}
    assert outcome.results["steps"] == done + 2
    assert outcome.results["changes"] == [change]

    # A second change is added to the first one.
    outcome = runs.train(tiny.changed(config, train__steps=done + 4), corpus, tmp_path)
    second = {"step": done + 2, "name": "train.steps", "old": done + 2, "new": done + 4}
    assert outcome.results["changes"] == [change, second]
