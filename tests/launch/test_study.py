"""Tests studies: workers that share a queue, die, are stopped, and take over from each other;
made-up trainings.
"""

import collections
import concurrent.futures
import csv
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import optuna
import pytest

from launch import study, sweep, sweep_file
from support import ON_PATH, ROOT, calls, processes, sweep_worker
from support.sweep_worker import FILE, check_each_trained_once, folders, starts
from support.waiting import wait_until
from txl_jax.errors import UserError

GRID = FILE + "[grid]\nseed = [1, 2]\noptimizer.learning_rate = [1e-3, 2e-3]\n"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def made_up(monkeypatch):
    sweep_worker.install(monkeypatch.setattr)


def run(out, content, *words):
    """Runs a sweep in this process; returns its exit code."""
    (out.parent / "sweep.toml").write_text(content)
    return sweep.main(["sweep", str(out.parent / "sweep.toml"), f"--out={out}", *words])


def start(out, content, *words, **variables):
    """Starts a worker in a process of its own."""
    (out.parent / "sweep.toml").write_text(content)
    command = [
        sys.executable,
        "-m",
        "support.sweep_worker",
        str(out.parent / "sweep.toml"),
        f"--out={out}",
        *words,
    ]
    environment = os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu"} | variables
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


def trials(out):
    return sweep_worker.trials(f"sqlite:///{out}/study.db")


def states(out):
    return dict(collections.Counter(trial.state.name for trial in trials(out)))


def results(out):
    """The rows of results.csv."""
    with open(out / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("made_up")
def test_every_run_of_a_grid_is_trained_once_and_its_loss_is_its_value(out, capsys, monkeypatch):
    monkeypatch.setattr(study, "_FEWEST_FOR_IMPORTANCES", 4)
    assert run(out, GRID, "--jobs=2") == 0
    check_each_trained_once(out, 4)
    found = {trial.user_attrs["run"]: trial.value for trial in trials(out)}
    expected = {
        (seed, rate): seed + 10 * rate + 1 / 20 for seed in (1, 2) for rate in (0.001, 0.002)
    }
    assert found == pytest.approx(
        {f"seed={s}+learning_rate={r}": value for (s, r), value in expected.items()}
    )
    assert trials(out)[0].intermediate_values[20] == trials(out)[0].value
    printed = capsys.readouterr().out
    assert re.search(r"(?m)^best +seed=1\+learning_rate=0\.001: .*\b1\.06", printed)
    assert re.search(
        r"(?m)^next +python -m experiments\.\w+ --workdir=\S*/seed=1\+learning_rate=0\.001 ",
        printed,
    )
    assert (
        re.search(r"(?m)^matters +\d+% seed$", printed)
        and "| 0.002 | ppl " in printed
        and "| 2 |" in printed
    )
    assert len(results(out)) == 4
    assert run(out, GRID) == 0 and states(out) == {"COMPLETE": 4}, (
        "the same command finds nothing to do"
    )
    shutil.rmtree(out / "seed=2+learning_rate=0.001")
    assert run(out, GRID) == 0 and [starts(folder) for folder in folders(out)] == [[0]] * 4, (
        "a folder was removed"
    )


def test_the_database_is_in_the_directory_whatever_its_name(tmp_path):
    """A URL of SQLite ends at a question mark, and Optuna fills in what is between braces."""
    out = tmp_path / "a?b#c 50% {x}"
    out.mkdir()
    (tmp_path / "sweep.toml").write_text(FILE + "[grid]\nseed = [1]\n")
    made = sweep_file.Sweep(tmp_path / "sweep.toml", str(out))
    assert study.Worker(made, study.database_in(str(out)), [None])._queue()
    assert (out / "study.db").stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, "sweep.toml"]
    for url in ("sqlite://", "sqlite:///:memory:", f"sqlite:///{out}/study.db"):
        with pytest.raises(UserError, match="--storage must be"):
            study.database(url)


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_failed_runs_are_named_and_tried_again_by_the_next_command(out, capsys):
    content = FILE + "[grid]\nseed = [1, 99]\n"
    for times in (1, 2):
        assert run(out, content) == 1
        assert capsys.readouterr().out.count("| failed: error: no |") == 1
        assert starts(out / "seed=99") == [0] * times and starts(out / "seed=1") == [0]
        assert (out / "seed=99" / "sweep.log").read_text() == "error: no\n" * times


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_a_changed_file_keeps_the_runs_that_have_finished(out):
    assert run(out, FILE + "[grid]\nseed = [1]\n") == 0
    assert run(out, FILE + "[grid]\nseed = [1, 2]\n") == 0
    assert [starts(folder) for folder in folders(out)] == [[0], [0]]


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_gpus_are_shared_out(out):
    assert run(out, GRID, "--gpus=4,7") == 0
    given = [(folder / "starts").read_text().split()[1] for folder in folders(out)]
    assert set(given) == {"4", "7"} and len(given) == 4


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, {"constant_liar": True, "seed": None, "n_startup_trials": 10}),
        ({"seed": 3}, {"constant_liar": True, "seed": 3}),
        (
            {"constant_liar": False, "n_startup_trials": 4},
            {"constant_liar": False, "seed": None, "n_startup_trials": 4},
        ),
    ],
)
def test_arguments_of_a_sampler_win_over_the_usual_ones(monkeypatch, table, expected):
    found = {}
    calls.keep(monkeypatch, found, optuna.samplers, "TPESampler")
    sweep_file.make_from_table("sampler", {"name": "TPESampler"} | table)
    assert {name: found[f"TPESampler.{name}"] for name in expected} == expected


def test_arguments_of_a_pruner_arrive(monkeypatch):
    found = {}
    calls.keep(monkeypatch, found, optuna.pruners, "MedianPruner")
    sweep_file.make_from_table(
        "pruner", {"name": "MedianPruner", "n_startup_trials": 3, "n_warmup_steps": 7}
    )
    expected = {"n_startup_trials": 3, "n_warmup_steps": 7}
    assert {name: found[f"MedianPruner.{name}"] for name in expected} == expected


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_a_sampler_draws_by_the_results_and_a_pruner_stops_runs(out, monkeypatch):
    """Learning rates above the best are pruned, and are saved; a pruned run is not started
    again.
    """
    monkeypatch.setenv("STEP_SECONDS", "0.1")
    content = FILE + (
        "[random]\nsamples = 12\noptimizer.learning_rate = { log = [1e-3, 0.1] }\n"
        "[grid]\nmodel.n_layer = [2, 3]\n"
        '[sampler]\nname = "TPESampler"\nseed = 1\nn_startup_trials = 4\n'
        '[pruner]\nname = "MedianPruner"\nn_startup_trials = 3\nn_warmup_steps = 5\n'
    )
    assert run(out, content, "--jobs=3") == 0
    counted = states(out)
    assert sum(counted.values()) == len(list(out.glob("*/starts"))) == 12 and counted["PRUNED"] > 0
    assert sum("pruned" in row["state"] for row in results(out)) == counted["PRUNED"]
    pruned = next(
        out / trial.user_attrs["run"] for trial in trials(out) if trial.state.name == "PRUNED"
    )
    assert 5 <= int((pruned / "step").read_text()) < 20
    assert run(out, content) == 0 and starts(pruned) == [0]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--storage=postgresql://me:secret@host/db", "PGPASSWORD"),
        ("--storage=mysql://me@host/db", "postgresql://"),
        ("--storage=mysql", "postgresql://"),
        ("--storage=sqlite:////proc/study.db", "/proc/study.db"),
    ],
)
@pytest.mark.usefixtures("made_up")
def test_mistakes_in_the_database_are_named_and_passwords_are_not_printed(
    out, capsys, words, named
):
    assert run(out, GRID, words) == 2
    found = capsys.readouterr()
    assert (
        found.err.startswith("error: ")
        and named in found.err
        and "secret" not in found.out + found.err
    )


@pytest.mark.usefixtures("made_up")
def test_a_workdir_that_is_still_locked_is_waited_for(out):
    """As by a training whose worker has died, and that is saving."""
    folder = out / "seed=1"
    folder.mkdir(parents=True)
    holder = (
        "import fcntl, time; file = open('.lock', 'a'); fcntl.flock(file, fcntl.LOCK_EX); "
        "print(flush=True); "
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder + "time.sleep(3)"], cwd=folder, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    assert run(out, FILE + "[grid]\nseed = [1]\n") == 0
    process.communicate()
    assert (folder / "sweep.log").read_text() == "" and starts(folder) == [0]


def test_a_second_hangup_does_not_reach_the_trainings():
    """A second signal would end them without saving."""
    training = mock.Mock()
    worker = object.__new__(study.Worker)
    worker.signal_number, worker._trainings = 0, [training]
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT):
        worker._forward(number, None)
    sent = [call.args for call in training.process.send_signal.call_args_list]
    assert sent == [(signal.SIGTERM,), (signal.SIGINT,)]


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_all_runs_which_the_next_command_resumes(out, number):
    """A terminal that is closed counts as SIGTERM, once: the shell and the system both send it."""
    with processes.that_notice_hangups():
        worker = start(out, GRID, "--jobs=2", STEP_SECONDS="0.2")
    wait_until(lambda: len(list(out.glob("*/step"))) == 2)
    worker.send_signal(number)
    if number == signal.SIGHUP:
        worker.send_signal(number)
    output, _ = worker.communicate(timeout=240)
    assert worker.returncode == 128 + number, output
    assert len(list(out.glob("*/starts"))) == 2 and not list(out.glob("*/ends"))
    worker = start(out, GRID, "--jobs=2")
    output, _ = worker.communicate(timeout=240)
    assert worker.returncode == 0, output
    check_each_trained_once(out, 4)
    assert sorted(len(starts(folder)) for folder in folders(out)) == [1, 1, 2, 2]


@pytest.mark.full
def test_a_worker_that_is_killed_takes_its_training_with_it_and_another_resumes(out):
    """The training saves for two seconds longer, in which its workdir stays locked."""
    grid = FILE + "[grid]\nseed = [1, 2, 3]\n"
    one = start(out, grid, STEP_SECONDS="0.1", SAVE_SECONDS="6")
    wait_until(lambda: list(out.glob("*/step")))
    one.kill()
    one.communicate()
    [folder] = (path.parent for path in out.glob("*/step"))
    two = start(out, grid)
    output, _ = two.communicate(timeout=240)
    assert two.returncode == 0, output
    check_each_trained_once(out, 3)
    first, second = starts(folder)
    assert first == 0 < second < 20 and output.count(f"started   {folder.name}\n") == 1
    assert states(out) == {"COMPLETE": 3, "FAIL": 1}


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")  # As the worker takes a trial.
@pytest.mark.parametrize(
    ("ended", "is_free"),
    [
        (None, False),  # It is still trained.
        ({}, True),  # Its worker died, or it was stopped.
        ({"failed": "exit code 1"}, False),
    ],
)
def test_the_place_of_a_run_is_free_again_if_its_worker_died(out, ended, is_free):
    out.mkdir()
    (out.parent / "sweep.toml").write_text(FILE + "[grid]\nseed = [1]\n")
    made = sweep_file.Sweep(out.parent / "sweep.toml", str(out))
    worker = study.Worker(made, study.database_in(str(out)), [None])
    assert worker._queue()
    trial = worker._study.ask(made.space)
    if ended is not None:
        for name, value in ended.items():
            trial.set_user_attr(name, value)
        worker._study.tell(trial, state=optuna.trial.TrialState.FAIL)
    assert worker._queue() is is_free
    found = [(each.user_attrs["place"], each.state.name) for each in trials(out)[1:]]
    assert found == ([(trial.user_attrs["place"], "WAITING")] if is_free else [])


@pytest.mark.nightly(part="faults")
def test_four_workers_that_are_killed_at_any_moment_lose_no_run_and_repeat_none(out):
    grid = FILE + (
        "[grid]\nseed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\noptimizer.learning_rate = [1e-3, "
        "2e-3, 3e-3, 4e-3]\n"
    )
    workers = [start(out, grid, STEP_SECONDS="0.05") for _ in range(4)]
    wait_until(lambda: list(out.glob("*/ends")))
    for number in range(5):
        time.sleep(0.7)
        workers[number % 4].kill()
        workers[number % 4].communicate()
        workers[number % 4] = start(out, grid, STEP_SECONDS="0.05")
    for worker in workers:
        output, _ = worker.communicate(timeout=240)
        assert worker.returncode == 0, output
    check_each_trained_once(out, 40)
    assert states(out)["COMPLETE"] == 40 and states(out).keys() <= {"COMPLETE", "FAIL"}


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_a_worker_that_seemed_to_be_dead_keeps_its_runs(out, monkeypatch):
    """Its heartbeats do not arrive, as over a network that is cut; meanwhile its trials fail and
    are queued again.
    """
    monkeypatch.setenv("STEP_SECONDS", "0.3")
    real, beaten = optuna.storages.RDBStorage.record_heartbeat, set()

    def beat_once(self, trial_id):
        if trial_id not in beaten:
            beaten.add(trial_id)
            real(self, trial_id)

    monkeypatch.setattr(study._Storage, "record_heartbeat", beat_once)
    assert run(out, FILE + "[grid]\nseed = [1, 2]\n", "--jobs=2") == 0
    check_each_trained_once(out, 2)
    assert [starts(folder) for folder in folders(out)] == [[0], [0]]
    assert states(out) == {"COMPLETE": 2, "FAIL": 2}


def test_workers_that_start_together_share_one_study(out):
    """One makes the tables, while others fail to."""
    out.mkdir()
    (out.parent / "sweep.toml").write_text(GRID)
    made = sweep_file.Sweep(out.parent / "sweep.toml", str(out))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: study.Worker(made, study.database_in(str(out)), [None]), range(4)))
    assert trials(out) == []


@pytest.mark.usefixtures("made_up")
def test_of_two_trials_for_a_run_the_first_one_trains_it(out, monkeypatch):
    """Two workers may queue the same run at the same time."""
    real = optuna.Study.add_trial
    monkeypatch.setattr(
        optuna.Study, "add_trial", lambda self, trial: [real(self, trial) for _ in range(2)]
    )
    assert run(out, FILE + "[grid]\nseed = [1, 2]\n") == 0
    check_each_trained_once(out, 2)
    assert [trial.state.name for trial in trials(out)] == ["COMPLETE", "FAIL"] * 2


# Calls of a worker that has a trial: while it takes it (two), while it trains its run, and when
# that has ended.
MOMENTS = [
    (optuna.samplers.TPESampler, "before_trial"),
    (study._Storage, "set_trial_user_attr"),
    pytest.param((study._Storage, "set_trial_intermediate_value"), marks=pytest.mark.full),
    pytest.param((study._Storage, "set_trial_state_values"), marks=pytest.mark.full),
]


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment[1])
def test_a_trial_that_another_worker_ends_is_left_to_it(out, monkeypatch, moment):
    """Right before a call: the other one took this worker for dead.

    The next trial of the run takes its place.
    """
    owner, name = moment
    real = getattr(owner, name)
    ended = []

    def end_and_call(*arguments, **named):
        if not ended:
            ended.extend(sweep_worker.end_running_trials(f"sqlite:///{out}/study.db"))
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, end_and_call)
    assert run(out, FILE + "[grid]\nseed = [1]\n") == 0
    check_each_trained_once(out, 1)
    assert starts(out / "seed=1") == [0]
    assert ended == [0] and [trial.state.name for trial in trials(out)] == ["FAIL", "COMPLETE"]


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(("failures", "code"), [(1, 0), (1000, os.EX_TEMPFAIL)])
def test_a_training_goes_on_while_the_database_cannot_be_reached_and_saves_in_the_end(
    out, monkeypatch, failures, code
):
    monkeypatch.setenv("STEP_SECONDS", "0.4")
    monkeypatch.setattr(study, "PATIENCE_SECONDS", 1.0)
    real, calls = optuna.storages.RDBStorage.record_heartbeat, itertools.count()

    def beat(self, trial_id):
        if 2 <= next(calls) < 2 + failures:
            raise optuna.exceptions.StorageInternalError
        real(self, trial_id)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.RDBStorage, "record_heartbeat", beat)
        assert run(out, FILE + "[grid]\nseed = [1]\n") == code
    assert starts(out / "seed=1") == [0]
    monkeypatch.setenv("STEP_SECONDS", "0.01")
    assert run(out, FILE + "[grid]\nseed = [1]\n") == 0
    check_each_trained_once(out, 1)
    assert len(starts(out / "seed=1")) == (1 if code == 0 else 2)
