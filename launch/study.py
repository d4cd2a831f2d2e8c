"""The study of a sweep: its runs as trials of Optuna in a database, and the workers that take and train them.

A run is queued before anybody trains it, under a lock of the whole study. So a worker may die at any moment: a trial
without a heartbeat is queued again, and resumes in its workdir. Two never share one: a training ends with its worker,
and a workdir that is still locked is waited for.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from txl_jax.errors import LogError, UserError, first_line, rephrased
from txl_jax.runs.run import RESULTS
from txl_jax.runtime import storage
from txl_jax.runtime.lock import is_held
from txl_jax.runtime.log import read_metrics

if TYPE_CHECKING:
    from launch.sweep import Run, Sweep

T = TypeVar("T")
LOG = "sweep.log"
BEAT_SECONDS, GRACE_SECONDS = 15, 90  # A worker that has sent no heartbeat for so long is dead.
POLL_SECONDS, REMOTE_POLL_SECONDS = 2.0, 30.0  # Object storage is paid by the request.
PATIENCE_SECONDS = 900.0  # With a database that is restarted, or cannot be reached.
UNREACHABLE = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.OperationalError)
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)
# Starts a command that gets SIGTERM from the kernel when this process has ended, be it by SIGKILL. It may get several,
# as threads end one by one: then it stops without saving.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(143); os.execvp(sys.argv[2], sys.argv[2:])"
)
optuna.logging.set_verbosity(optuna.logging.ERROR)
# Its heartbeat, constant_liar and importances.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def made(kind: str, table: Mapping[str, Any]) -> Any:
    """Returns Optuna's sampler or pruner that a table names; raises `UserError` if it does not take the arguments."""
    wrong = f"[{kind}] must be a class of optuna.{kind}s and its arguments, as name = ..., got {dict(table)} (%s)"
    # Else it would draw near the runs in progress; a seed would make all workers draw the same.
    more = {"constant_liar": True, "seed": None} if table.get("name") == "TPESampler" else {}
    with rephrased(wrong, AttributeError, KeyError, TypeError, ValueError):
        return getattr(getattr(optuna, f"{kind}s"), table["name"])(
            **more, **{name: value for name, value in table.items() if name != "name"}
        )


def drawn(ranges: Mapping[str, Any], samples: int, seed: int) -> list[dict[str, Any]]:
    """Returns random values for each sample; more samples leave the first ones as they were."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    return [study.ask(dict(ranges)).params for _ in range(samples)]


def database(text: str) -> sqlalchemy.URL:
    """Returns the URL of a study's database; raises `UserError` if it is another one, or contains a password."""
    wrong = "--storage must be sqlite:///PATH or postgresql://USER@HOST/DATABASE, without a password (set PGPASSWORD)"
    with rephrased(wrong, sqlalchemy.exc.ArgumentError):
        url = sqlalchemy.make_url(text)
    if url.password or url.drivername not in ("sqlite", "postgresql"):
        raise UserError(wrong)
    return url.set(drivername=url.drivername.replace("postgresql", "postgresql+psycopg"))


def reason(error: BaseException) -> str:
    """Returns the first line of an error's cause."""
    return first_line(error.__cause__ or error)


def _patient(act: Callable[..., T]) -> Callable[..., T]:
    """Wraps a method that may be called again: it waits for a database that cannot be reached."""

    @functools.wraps(act)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return act(self, *args, **kwargs)
            except UNREACHABLE as error:
                if self.ended.is_set() or time.monotonic() > until:
                    raise
                _say(f"waiting   for the database: {reason(error)}")
            self.ended.wait(5)

    return call


class _Storage(optuna.storages.RDBStorage):
    """Optuna's database, whose calls survive a restart of it."""

    ended = threading.Event()  # Once it is set they do not wait.

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        """Sets the state of a trial."""
        if state is TrialState.RUNNING:  # Before it is taken: its worker may die right after.
            self.record_heartbeat(trial_id)
        return super().set_trial_state_values(trial_id, state, values)


for _name in [name for name in dir(_Storage) if name.lstrip("_").startswith(("get_", "set_t", "record_"))]:
    setattr(_Storage, _name, _patient(getattr(_Storage, _name)))


class Worker:
    """Takes runs of a study and trains them, one in each slot (the number of a GPU, or None), until none is left."""

    def __init__(self, sweep: "Sweep", url: str, slots: Sequence[str | None]):
        self.signal_number = 0
        self.ended = threading.Event()
        self.ended.set()  # No patience before the start.
        self._sweep, self._slots = sweep, slots
        self._processes: set[subprocess.Popen[bytes]] = set()
        place, name = database(url), f"{os.path.basename(sweep.out)}-{sweep.digest}"
        self._file = f"{place.database}.lock" if place.drivername == "sqlite" else None
        self._number = zlib.crc32(name.encode())  # Of the lock in PostgreSQL.
        # Writers of SQLite wait for each other; a call over a network that was cut ends.
        limits = {"timeout": 60} if self._file else {"connect_timeout": 10, "tcp_user_timeout": 60_000}
        how: dict[str, Any] = {"poolclass": sqlalchemy.pool.NullPool, "connect_args": limits}
        with rephrased("--storage=postgresql:... needs a driver (%s); pip install 'psycopg[binary]'", ImportError):
            self._engine = sqlalchemy.create_engine(place, **how)
        with self._lock():
            made = _Storage(str(place), how, heartbeat_interval=BEAT_SECONDS, grace_period=GRACE_SECONDS)
            made.ended = self.ended
            how = {"sampler": sweep.sampler, "pruner": sweep.pruner or optuna.pruners.NopPruner()}
            self._study = optuna.create_study(storage=made, study_name=name, load_if_exists=True, **how)
        before = self._trials()
        self._first = len(before)  # Runs that failed before are tried again, and those whose folder was removed.
        complete = [trial for trial in before if trial.state is TrialState.COMPLETE]
        paths = {trial.number: os.path.join(sweep.out, trial.user_attrs["run"], RESULTS) for trial in complete}
        self._again = {number for number, path in paths.items() if not storage.exists(path)}

    def run(self) -> None:
        """Trains runs until none is left, or a signal arrives. No training outlives this call, whatever fails."""
        self.ended.clear()
        with contextlib.ExitStack() as at_end:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # SIGHUP: the terminal is gone.
                at_end.callback(signal.signal, number, signal.signal(number, lambda number, _: self._end(number)))
            bar = at_end.enter_context(tqdm(total=self._sweep.size, unit="run", disable=None))
            pool = at_end.enter_context(concurrent.futures.ThreadPoolExecutor(len(self._slots)))
            at_end.callback(lambda: self._end(self.signal_number))  # The first of these.
            left = works = {pool.submit(self._work, gpu) for gpu in self._slots}
            while left:
                ended, left = concurrent.futures.wait(works, POLL_SECONDS, concurrent.futures.FIRST_EXCEPTION)
                for work in ended:
                    work.result()
                bar.n = sum(trial.state in _ENDED for trial in self._trials())
                bar.refresh()

    def report(self) -> list[str]:
        """Returns lines with the best run, and with the importance of each setting once there are enough runs."""
        if not [trial for trial in self._trials() if trial.state is TrialState.COMPLETE]:
            return []
        best = self._study.best_trial
        lines = [f"best      {best.user_attrs['run']}: validation loss {best.value:.4f} nats"]
        with contextlib.suppress(ValueError, RuntimeError), warnings.catch_warnings(action="ignore"):
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            shares = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
            lines += [f"matters   {share:4.0%} {name}" for name, share in shares.items()]
        return lines

    def _end(self, number: int) -> None:
        self.signal_number = number
        self.ended.set()
        for process in list(self._processes):  # Runs do not handle SIGHUP.
            process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _work(self, gpu: str | None) -> None:
        """Takes one trial after the other, and waits for other workers' trials, since these workers may die."""
        left, told = True, ""
        while left and not self.ended.is_set():
            with self._lock() as lock:
                states = self._queue()
                left = not states.isdisjoint({TrialState.WAITING, TrialState.RUNNING})
                if TrialState.WAITING in states:
                    objective: Any = functools.partial(self._objective, gpu, lock)
                    try:
                        self._study.optimize(objective, n_trials=1)
                    except Exception as error:
                        # Others took this worker for dead, as it could not reach the database, and continue the run.
                        cause = error.__context__ if isinstance(error, AssertionError) else error
                        lost = isinstance(cause, optuna.exceptions.UpdateFinishedTrialError)
                        if not lost and not str(cause).startswith("Cannot tell"):
                            raise
                    continue
            if left and not told and not self._processes:
                told = f"waiting   for runs of other workers; one that has died is noticed after {GRACE_SECONDS} s"
                _say(told)
            self.ended.wait(POLL_SECONDS if left else 0)

    @_patient
    def _lock(self) -> contextlib.ExitStack:
        """Takes the lock of the study, and returns what releases it; it ends with its process or connection."""
        with contextlib.ExitStack() as stack:
            if self._file:
                fcntl.flock(stack.enter_context(open(self._file, "a")), fcntl.LOCK_EX)
            else:
                connection = stack.enter_context(self._engine.connect())
                # If its host vanishes, the connection ends after that time.
                connection.exec_driver_sql("SET idle_in_transaction_session_timeout = '60s'")
                connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (self._number,))
            return stack.pop_all()

    @_patient
    def _queue(self) -> set[TrialState]:
        """Queues the runs that no trial is or was for; returns the states of all trials."""
        optuna.storages.fail_stale_trials(self._study)
        trials, runs = self._trials(), self._sweep.runs
        # Runs that are drawn are known once they were.
        known = {name: (run.values, self._sweep.space) for name, run in runs.items()} or {
            name: (each.params, each.distributions) for each in trials if (name := each.user_attrs.get("run"))
        }
        counted = [trial for trial in trials if self._counts(trial)]
        names = {trial.user_attrs.get("run") for trial in counted}
        queue = [(*what, {"run": name}) for name, what in known.items() if name not in names]
        queue += [({}, {}, {})] * (0 if runs else self._sweep.size - len(counted) - len(queue))
        for values, space, notes in queue:
            what: dict[str, Any] = {"params": dict(values), "distributions": space, "user_attrs": notes}
            self._study.add_trial(optuna.create_trial(state=TrialState.WAITING, **what))
        return {trial.state for trial in trials} | ({TrialState.WAITING} if queue else set())

    def _counts(self, trial: FrozenTrial) -> bool:
        """Returns whether no other trial is needed for the run of this one."""
        if trial.state is TrialState.FAIL:  # Without a reason its worker was stopped, or has died.
            return "failed" in trial.user_attrs and trial.number >= self._first
        return trial.number not in self._again

    def _objective(self, gpu: str | None, lock: contextlib.ExitStack, trial: optuna.Trial) -> float | None:
        """Trains the run of a trial; returns its lowest validation loss in nats, or None if it has not finished."""
        with lock:  # One worker draws at a time.
            values = {name: _value(trial, name, of) for name, of in self._sweep.space.items()}
            try:
                run = self._sweep.run(values)
            except UserError as error:  # Drawn values that do not fit each other.
                trial.set_user_attr("failed", str(error))
                _say(f"failed: {error}")
                return None
            trial.set_user_attr("run", run.name)
        state, reported = "", {-1}
        while run.results is None and not self.ended.is_set():
            if is_held(run.folder):  # By a training that saves, as its worker has died.
                state = ""
                self.ended.wait(POLL_SECONDS)
            elif state:
                trial.set_user_attr("failed", state)
                return None
            else:
                state = self._train(run, gpu, trial, reported)
        if (results := run.results) is None:
            return None
        return min(math.inf, float((results.get("best_valid") or results["test"])["loss"]))  # Not nan.

    def _train(self, run: "Run", gpu: str | None, trial: optuna.Trial, reported: set[int]) -> str:
        """Runs the program of a run, and reports its validation losses; returns how it ended."""
        path, remote, began = os.path.join(run.folder, LOG), storage.is_remote(run.folder), time.monotonic()
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        tie = [sys.executable, "-ISc", _TIED, str(os.getpid())] if sys.platform == "linux" else []
        storage.make_folder(run.folder)
        run.note()
        pruned = False
        with tempfile.TemporaryFile() if remote else open(path, "ab") as log, contextlib.ExitStack() as at_end:
            # A session of its own: else Ctrl-C would reach it twice, and the second one stops a run without saving.
            how: dict[str, Any] = {"stdout": log, "stderr": log, "env": environment, "start_new_session": True}
            process = subprocess.Popen([*tie, *run.command], **how)
            self._processes.add(process)
            for act in (lambda: self._processes.discard(process), process.wait, process.terminate):
                at_end.callback(act)  # Whatever fails; the last one first.
            _say(f"started   {run.name}" + (f" on GPU {gpu}" if gpu is not None else ""))
            if self.ended.is_set():  # It was set while the process was being started.
                process.terminate()
            while process.returncode is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(REMOTE_POLL_SECONDS if remote else POLL_SECONDS)
                for step, loss in [] if pruned else _validations(run.folder, after=max(reported)):
                    reported.add(step)
                    trial.report(loss, step)
                    pruned = pruned or bool(trial.should_prune())
                if pruned and process.returncode is None:
                    process.terminate()
                    process.wait()
            if remote:
                log.seek(0)
                storage.write(path, log.read())
        state = run.end(process.returncode, time.monotonic() - began, pruned=pruned)
        _say(f"{state}: {run.name}")
        if pruned and run.results is None:
            raise optuna.TrialPruned
        return state


def _value(trial: optuna.Trial, name: str, of: Any) -> Any:
    """Returns a value of a trial: of the queue, or drawn now."""
    if isinstance(of, optuna.distributions.CategoricalDistribution):
        return trial.suggest_categorical(name, of.choices)
    whole = isinstance(of, optuna.distributions.IntDistribution)
    return (trial.suggest_int if whole else trial.suggest_float)(name, of.low, of.high, log=of.log)


def _validations(folder: str, *, after: int) -> list[tuple[int, float]]:
    """Returns step and loss of each validation after a step."""
    with contextlib.suppress(LogError):  # The run says what is wrong.
        records = [each for each in read_metrics(folder) if each["kind"] == "valid" and each["step"] > after]
        return [(int(each["step"]), float(each["loss"])) for each in records]
    return []


def _say(line: str) -> None:
    tqdm.write(line)  # Above the bar.
    sys.stdout.flush()
