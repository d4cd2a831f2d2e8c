"""Tests studies: workers that share a queue, die, are stopped, and take over from each other. Most
trainings are made up.
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
ONE_RUN = FILE + "[grid]\nseed = [1]\n"
TWO_RUNS = FILE + "[grid]\nseed = [1, 2]\n"
THREE_RUNS = FILE + "[grid]\nseed = [1, 2, 3]\n"
FORTY_RUNS = FILE + (
    "[grid]\nseed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\noptimizer.learning_rate = [1e-3, "
    "2e-3, 3e-3, 4e-3]\n"
)


@pytest.fixture
def out(tmp_path):
    """The directory of a study's runs, which does not exist."""
    return tmp_path / "out"


@pytest.fixture
def made_up(monkeypatch):
    """Trainings of sweeps in this process are made up."""
    sweep_worker.install(monkeypatch.setattr)


def write_file(out, content):
    """Writes the file of a sweep. Returns its path."""
    path = out.parent / "sweep.toml"
    path.write_text(content)
    return path


def run(out, content, *words):
    """Runs a sweep in this process. Returns its exit code."""
    return sweep.main(["sweep", str(write_file(out, content)), f"--out={out}", *words])


def start(out, content, *words, **variables):
    """Starts a worker in another process.

    `variables` of the made-up training are STEP_SECONDS, how long a step takes, and SAVE_SECONDS,
    how long it saves after a signal.
    """
    path = write_file(out, content)
    return subprocess.Popen(
        [sys.executable, "-m", "support.sweep_worker", str(path), f"--out={out}", *words],
        cwd=ROOT,
        env=os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu"} | variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(worker):
    """Waits for a worker in another process. Returns its exit code and output."""
    output, _ = worker.communicate(timeout=240)
    return worker.returncode, output


def worker_in_this_process(out, content):
    """A worker of a study, and its sweep."""
    out.mkdir(exist_ok=True)
    made = sweep_file.Sweep(write_file(out, content), str(out))
    return study.Worker(made, study.database_in(str(out)), [None]), made


def trials(out):
    return sweep_worker.trials(f"sqlite:///{out}/study.db")


def state_names(out):
    """The state of each trial, in their order."""
    return [trial.state.name for trial in trials(out)]


def states(out):
    """How many trials are in each state."""
    return dict(collections.Counter(state_names(out)))


def starts_of_all(out):
    """The steps at which each run was started, in the order of their names."""
    return [starts(folder) for folder in folders(out)]


def results(out):
    """The rows of results.csv."""
    with open(out / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("made_up")
def test_every_run_of_a_grid_is_trained_once_and_its_loss_is_its_value(out, capsys, monkeypatch):
    """The same command then has nothing to do, except for a run whose directory was removed."""
    # Otherwise a study of four runs would not print which setting matters.
    monkeypatch.setattr(study, "_FEWEST_FOR_IMPORTANCES", 4)

    assert run(out, GRID, "--jobs=2") == 0

    check_each_trained_once(out, 4)
    assert len(results(out)) == 4
    all_trials = trials(out)
    # As `support.sweep_worker` makes them up: seed + 10 * rate, and 1 / 20 after 20 steps.
    losses = {trial.user_attrs["run"]: trial.value for trial in all_trials}
    assert losses == pytest.approx(
        {
            "seed=1+learning_rate=0.001": 1 + 10 * 0.001 + 1 / 20,
            "seed=1+learning_rate=0.002": 1 + 10 * 0.002 + 1 / 20,
            "seed=2+learning_rate=0.001": 2 + 10 * 0.001 + 1 / 20,
            "seed=2+learning_rate=0.002": 2 + 10 * 0.002 + 1 / 20,
        }
    )
    assert all_trials[0].intermediate_values[20] == all_trials[0].value

    printed = capsys.readouterr().out
    best = r"seed=1\+learning_rate=0\.001"
    # In the measure of the table, exp(1.06), and in nats.
    assert re.search(rf"(?m)^best +{best}: .*\bppl 2\.89\b.*\b1\.06", printed)
    assert re.search(r"(?m)^logs +tail -f \S*/out/\*/sweep\.log$", printed)
    assert re.search(r"(?m)^progress +python -m launch\.sweep .* --table$", printed)
    assert "| seed=1+learning_rate=0.001 | 1 | 0.001 | 2.89 |" in printed
    assert not re.search(r"(?m)^(warning|continue|resumed) ", printed)
    assert re.search(rf"(?m)^next +python -m experiments\.\w+ --workdir=\S*/{best} ", printed)
    assert re.search(r"(?m)^matters +\d+% seed$", printed)
    assert "| 0.002 | " in printed
    assert "| 2 |" in printed

    assert run(out, GRID) == 0
    assert states(out) == {"COMPLETE": 4}
    shutil.rmtree(out / "seed=2+learning_rate=0.001")
    assert run(out, GRID) == 0
    assert starts_of_all(out) == [[0], [0], [0], [0]]


def test_the_database_is_in_the_directory_whatever_its_name(tmp_path):
    """A URL of SQLite ends at a question mark, and Optuna fills in what is between braces."""
    out = tmp_path / "a?b#c 50% {x}"
    worker, _ = worker_in_this_process(out, ONE_RUN)
    assert worker._queue()
    assert (out / "study.db").stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name, "sweep.toml"]


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///:memory:", "sqlite:///a?b#c 50% {x}/study.db"]
)
def test_a_database_without_a_file_or_with_other_signs_is_an_error(url):
    with pytest.raises(UserError, match="--storage must be"):
        study.database(url)


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_failed_runs_are_named_and_tried_again_by_the_next_command(out, capsys):
    """A made-up training with a loss above 90 fails, and the loss begins with the seed."""
    content = FILE + "[grid]\nseed = [1, 99]\n"
    for n_tries in (1, 2):
        assert run(out, content) == 1
        assert capsys.readouterr().out.count("| failed: error: no |") == 1
        assert starts(out / "seed=1") == [0]
        assert starts(out / "seed=99") == [0] * n_tries
        assert (out / "seed=99" / "sweep.log").read_text() == "error: no\n" * n_tries


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_a_changed_file_keeps_the_runs_that_have_finished(out):
    assert run(out, ONE_RUN) == 0
    assert run(out, TWO_RUNS) == 0
    assert starts_of_all(out) == [[0], [0]]


@pytest.mark.usefixtures("made_up")
def test_other_steps_than_before_are_a_warning(out, capsys):
    """A study of two runs, of which one has been trained with 20 steps."""
    assert run(out, ONE_RUN) == 0
    capsys.readouterr()

    run(out, TWO_RUNS.replace("train.steps = 20\n", "train.steps = 30\n"))

    [warning] = re.findall(r"(?m)^warning .*", capsys.readouterr().out)
    assert re.search(r"\b1 of 2 runs\b.*\bseed=1: 30, was 20\b", warning)


@pytest.mark.usefixtures("made_up")
def test_a_run_with_a_checkpoint_is_resumed_at_its_step(out, capsys):
    (out / "seed=1" / "checkpoints" / "latest" / "8").mkdir(parents=True)

    assert run(out, TWO_RUNS) == 0

    printed = capsys.readouterr().out
    assert re.search(r"(?m)^resumed +seed=1 .*\b8$", printed)
    assert re.search(r"(?m)^started +seed=2$", printed)


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_gpus_are_shared_out(out):
    assert run(out, GRID, "--gpus=4,7") == 0
    gpus = [(folder / "starts").read_text().split()[1] for folder in folders(out)]
    assert len(gpus) == 4
    assert set(gpus) == {"4", "7"}


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
    ids=["none", "seed", "others"],
)
def test_arguments_of_a_sampler_win_over_the_usual_ones(monkeypatch, table, expected):
    arguments = {}
    calls.keep(monkeypatch, arguments, optuna.samplers, "TPESampler")
    sweep_file.make_from_table("sampler", {"name": "TPESampler"} | table)
    for name, value in expected.items():
        assert arguments[f"TPESampler.{name}"] == value, name


def test_arguments_of_a_pruner_arrive(monkeypatch):
    arguments = {}
    calls.keep(monkeypatch, arguments, optuna.pruners, "MedianPruner")
    table = {"name": "MedianPruner", "n_startup_trials": 3, "n_warmup_steps": 7}
    sweep_file.make_from_table("pruner", table)
    assert arguments["MedianPruner.n_startup_trials"] == 3
    assert arguments["MedianPruner.n_warmup_steps"] == 7


SAMPLED = FILE + (
    "[random]\nsamples = 12\noptimizer.learning_rate = { log = [1e-3, 0.1] }\n"
    "[grid]\nmodel.n_layer = [2, 3]\n"
    '[sampler]\nname = "TPESampler"\nseed = 1\nn_startup_trials = 4\n'
    '[pruner]\nname = "MedianPruner"\nn_startup_trials = 3\nn_warmup_steps = 5\n'
)


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_a_sampler_draws_by_the_results_and_a_pruner_stops_runs(out, monkeypatch):
    """Learning rates above the best are pruned, and are saved. A pruned run is not started
    again.
    """
    monkeypatch.setenv("STEP_SECONDS", "0.1")

    assert run(out, SAMPLED, "--jobs=3") == 0

    n_pruned = states(out)["PRUNED"]
    assert n_pruned > 0
    assert len(trials(out)) == 12
    assert len(list(out.glob("*/starts"))) == 12
    assert sum("pruned" in row["state"] for row in results(out)) == n_pruned
    pruned_trial = next(trial for trial in trials(out) if trial.state.name == "PRUNED")
    pruned = out / pruned_trial.user_attrs["run"]
    # After the pruner's warm-up, and before the last step.
    assert 5 <= int((pruned / "step").read_text()) < 20

    assert run(out, SAMPLED) == 0
    assert starts(pruned) == [0]


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--storage=postgresql://me:secret@host/db", "PGPASSWORD"),
        ("--storage=mysql://me@host/db", "postgresql://"),
        ("--storage=mysql", "postgresql://"),
        # A directory in which nobody can make a file.
        ("--storage=sqlite:////proc/study.db", "/proc/study.db"),
    ],
)
@pytest.mark.usefixtures("made_up")
def test_mistakes_in_the_database_are_named_and_passwords_are_not_printed(out, capsys, flag, named):
    assert run(out, GRID, flag) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert named in printed.err
    assert "secret" not in printed.out + printed.err


# Locks the working directory as a run does, says so, and ends after a while.
HOLDER = """
import fcntl, time
file = open(".lock", "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(3)
"""


@pytest.mark.usefixtures("made_up")
def test_a_workdir_that_is_still_locked_is_waited_for(out):
    """As by a training whose worker has died, and that is saving."""
    folder = out / "seed=1"
    folder.mkdir(parents=True)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=folder, stdout=subprocess.PIPE)
    holder.stdout.readline()

    assert run(out, ONE_RUN) == 0

    holder.communicate()
    assert (folder / "sweep.log").read_text() == ""
    assert starts(folder) == [0]


def test_a_second_hangup_does_not_reach_the_trainings():
    """It comes from the same closed terminal as the first one, which counts as SIGTERM. Any other
    second signal is passed on, and ends trainings without saving.
    """
    training = mock.Mock()
    worker = object.__new__(study.Worker)
    worker.signal_number = 0
    worker._trainings = [training]

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
    code, output = finish(worker)
    assert code == 128 + number, output
    assert re.search(r"(?m)^continue ", output)
    assert len(list(out.glob("*/starts"))) == 2
    assert not list(out.glob("*/ends"))

    code, output = finish(start(out, GRID, "--jobs=2"))
    assert code == 0, output
    check_each_trained_once(out, 4)
    assert sorted(map(len, starts_of_all(out))) == [1, 1, 2, 2]


@pytest.mark.full
def test_a_worker_that_is_killed_takes_its_training_with_it_and_another_resumes(out):
    """The training still saves when the worker is taken for dead, after 3 seconds. Meanwhile its
    workdir is locked.
    """
    killed = start(out, THREE_RUNS, STEP_SECONDS="0.1", SAVE_SECONDS="6")
    wait_until(lambda: list(out.glob("*/step")))
    killed.kill()
    killed.communicate()
    [step] = out.glob("*/step")
    folder = step.parent

    code, output = finish(start(out, THREE_RUNS))

    assert code == 0, output
    check_each_trained_once(out, 3)
    first, second = starts(folder)
    assert first == 0
    assert 0 < second < 20
    assert output.count(f"started   {folder.name}\n") == 1
    assert states(out) == {"COMPLETE": 3, "FAIL": 1}


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")  # As the worker takes a trial.
@pytest.mark.parametrize(
    ("ended", "is_free"),
    [
        pytest.param(None, False, id="still trained"),
        pytest.param({}, True, id="its worker died or was stopped"),
        pytest.param({"failed": "exit code 1"}, False, id="failed"),
    ],
)
def test_the_place_of_a_run_is_free_again_if_its_worker_died(out, ended, is_free):
    worker, made = worker_in_this_process(out, ONE_RUN)
    assert worker._queue()
    trial = worker._study.ask(made.space)
    if ended is not None:
        for name, value in ended.items():
            trial.set_user_attr(name, value)
        worker._study.tell(trial, state=optuna.trial.TrialState.FAIL)

    assert worker._queue() is is_free

    new_trials = trials(out)[1:]
    if is_free:
        [waiting] = new_trials
        assert waiting.user_attrs["place"] == trial.user_attrs["place"]
        assert waiting.state.name == "WAITING"
    else:
        assert new_trials == []


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_has_a_heartbeat_before_it_is_taken(out, monkeypatch):
    """Its worker may die right after. Without a heartbeat nobody would take it for dead."""
    worker, made = worker_in_this_process(out, ONE_RUN)
    assert worker._queue()
    states_at_heartbeats = []
    record_heartbeat = study._Storage.record_heartbeat

    def record(self, trial_id):
        states_at_heartbeats.append(self.get_trial(trial_id).state.name)
        record_heartbeat(self, trial_id)

    monkeypatch.setattr(study._Storage, "record_heartbeat", record)

    worker._study.ask(made.space)

    assert states_at_heartbeats == ["WAITING"]


DRAWN = FILE + (
    "[random]\nsamples = 1\noptimizer.learning_rate = { log = [1e-3, 0.1] }\n"
    '[sampler]\nname = "TPESampler"\n'
)


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_stopped_run_is_queued_with_the_values_that_were_drawn_for_it(out):
    """Its directory is named after them. Other values would begin another run."""
    worker, made = worker_in_this_process(out, DRAWN)
    assert worker._queue()
    stopped = worker._study.ask(made.space)
    worker._study.tell(stopped, state=optuna.trial.TrialState.FAIL)

    assert worker._queue()

    again = worker._study.ask(made.space)
    assert again.user_attrs["place"] == stopped.user_attrs["place"]
    assert again.params == stopped.params
    assert list(again.params) == ["optimizer.learning_rate"]


@pytest.mark.nightly(part="faults")
def test_four_workers_that_are_killed_at_any_moment_lose_no_run_and_repeat_none(out):
    workers = [start(out, FORTY_RUNS, STEP_SECONDS="0.05") for _ in range(4)]
    wait_until(lambda: list(out.glob("*/ends")))
    for number in (0, 1, 2, 3, 0):
        time.sleep(0.7)
        workers[number].kill()
        workers[number].communicate()
        workers[number] = start(out, FORTY_RUNS, STEP_SECONDS="0.05")

    for worker in workers:
        code, output = finish(worker)
        assert code == 0, output
    check_each_trained_once(out, 40)
    assert states(out)["COMPLETE"] == 40
    assert states(out).keys() <= {"COMPLETE", "FAIL"}


@pytest.mark.full
@pytest.mark.usefixtures("made_up")
def test_a_worker_that_seemed_to_be_dead_keeps_its_runs(out, monkeypatch):
    """Its heartbeats do not arrive, as over a network that is cut. Meanwhile its trials fail and
    are queued again.
    """
    monkeypatch.setenv("STEP_SECONDS", "0.3")
    record_heartbeat = optuna.storages.RDBStorage.record_heartbeat
    recorded = set()

    def record_once(self, trial_id):
        if trial_id not in recorded:
            recorded.add(trial_id)
            record_heartbeat(self, trial_id)

    monkeypatch.setattr(study._Storage, "record_heartbeat", record_once)

    assert run(out, TWO_RUNS, "--jobs=2") == 0

    check_each_trained_once(out, 2)
    assert starts_of_all(out) == [[0], [0]]
    assert states(out) == {"COMPLETE": 2, "FAIL": 2}


def test_workers_that_start_together_share_one_study(out):
    """One makes the tables, while others fail to."""
    out.mkdir()
    made = sweep_file.Sweep(write_file(out, GRID), str(out))
    database = study.database_in(str(out))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(study.Worker, made, database, [None]) for _ in range(4)]
    for worker in workers:
        worker.result()
    assert trials(out) == []


@pytest.mark.usefixtures("made_up")
def test_of_two_trials_for_a_run_the_first_one_trains_it(out, monkeypatch):
    """Two workers may queue the same run at the same time."""
    add_trial = optuna.Study.add_trial

    def add_twice(self, trial):
        add_trial(self, trial)
        add_trial(self, trial)

    monkeypatch.setattr(optuna.Study, "add_trial", add_twice)

    assert run(out, TWO_RUNS) == 0

    # Each run has two trials, one after the other.
    check_each_trained_once(out, 2)
    assert state_names(out) == ["COMPLETE", "FAIL", "COMPLETE", "FAIL"]


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
    call = getattr(owner, name)
    ended = []

    def end_and_call(*arguments, **options):
        if not ended:
            ended.extend(sweep_worker.end_running_trials(f"sqlite:///{out}/study.db"))
        return call(*arguments, **options)

    monkeypatch.setattr(owner, name, end_and_call)

    assert run(out, ONE_RUN) == 0

    check_each_trained_once(out, 1)
    assert starts(out / "seed=1") == [0]
    assert ended == [0]  # The number of the first trial.
    assert state_names(out) == ["FAIL", "COMPLETE"]


# One heartbeat fails, or all that a training can have. Only if it was saved before its end, the
# second command starts it again.
@pytest.mark.full
@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("n_failures", "code", "n_starts"),
    [(1, 0, 1), (1000, os.EX_TEMPFAIL, 2)],
    ids=["reached again", "never reached"],
)
def test_a_training_continues_while_the_database_cannot_be_reached_and_saves_in_the_end(
    out, monkeypatch, n_failures, code, n_starts
):
    monkeypatch.setenv("STEP_SECONDS", "0.4")
    monkeypatch.setattr(study, "PATIENCE_SECONDS", 1.0)
    record_heartbeat = optuna.storages.RDBStorage.record_heartbeat
    numbers = itertools.count()

    def fail_from_the_third_call(self, trial_id):
        if 2 <= next(numbers) < 2 + n_failures:
            raise optuna.exceptions.StorageInternalError
        record_heartbeat(self, trial_id)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.storages.RDBStorage, "record_heartbeat", fail_from_the_third_call)
        assert run(out, ONE_RUN) == code
    assert starts(out / "seed=1") == [0]

    # The next command resumes what was saved.
    monkeypatch.setenv("STEP_SECONDS", "0.01")
    assert run(out, ONE_RUN) == 0
    check_each_trained_once(out, 1)
    assert len(starts(out / "seed=1")) == n_starts
