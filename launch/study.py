"""The study of a sweep, and the worker that takes and trains the sweep's runs.

The runs are Optuna trials in a database.

The queue has a place for each run, or for each draw of a sampler. A worker makes a trial for a
place that has none, and of multiple trials for a place the first one counts. So workers need no
lock, and may die at any moment: a trial without a heartbeat fails, its place is free again, and its
run resumes in its workdir. Two trainings never share a workdir: a training ends with its worker,
and a place whose workdir is still locked is skipped.
"""

import contextlib
import functools
import math
import os
import random
import shlex
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from txl_jax.errors import LogError, UserError, first_line, one_line, rephrased
from txl_jax.runs import run as run_lib
from txl_jax.runs.run import RESULTS
from txl_jax.runtime import storage
from txl_jax.runtime.lock import is_held
from txl_jax.runtime.log import read_metrics

if TYPE_CHECKING:
    from launch.sweep import Run, Sweep

T = TypeVar("T")
LOG = "sweep.log"
DATABASE = "study.db"  # In --out, unless --storage names another one.
GRACE_SECONDS = 90  # A worker that has sent no heartbeat for so long is dead.
POLL_SECONDS, REMOTE_POLL_SECONDS = 2.0, 15.0  # Object storage is paid by the request.
PATIENCE_SECONDS = 900.0  # With a database that is restarted, or cannot be reached.
_FEWEST_FOR_IMPORTANCES = 20  # With four runs each of two settings matters 50 %.
UNREACHABLE = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError)
# Starts a command that gets SIGTERM from the kernel when this process has ended, be it by SIGKILL.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(143); os.execvp(sys.argv[2], sys.argv[2:])"
)
optuna.logging.set_verbosity(optuna.logging.ERROR)
# Its heartbeat, constant_liar and importances.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
# By a call that was repeated, or a resumed run.
warnings.filterwarnings("ignore", "The reported value is ignored")


def made(kind: str, table: Mapping[str, Any]) -> Any:
    """Returns Optuna's sampler or pruner that a table names.

    Raises `UserError` if it rejects the arguments.
    """
    wrong = (
        f"[{kind}] must be a class of optuna.{kind}s and its arguments, as name = ..., got "
        f"{dict(table)} (%s)"
    )
    arguments = dict(table)
    name = arguments.pop("name", None)
    if name == "TPESampler":
        # Otherwise it would sample near the runs in progress. A seed would make all workers sample
        # the same values.
        arguments = {"constant_liar": True, "seed": None} | arguments
    module = getattr(optuna, f"{kind}s")
    with rephrased(wrong, AttributeError, TypeError, ValueError):
        # A sweep's file names one of Optuna's classes, and nothing else that its module happens to
        # contain.
        if name not in module.__all__:
            raise ValueError(f"unknown class {name!r}")
        return getattr(module, name)(**arguments)


def drawn(ranges: Mapping[str, Any], samples: int, seed: int) -> list[dict[str, Any]]:
    """Returns random values for each sample. More samples do not change the first ones."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    return [study.ask(dict(ranges)).params for _ in range(samples)]


def database(text: str) -> sqlalchemy.URL:
    """Returns the URL of a study's database.

    Raises `UserError` if it is unsupported, or contains a password.
    """
    wrong = (
        "--storage must be sqlite:///PATH or postgresql://USER@HOST/DATABASE, without a password "
        "(set PGPASSWORD)"
    )
    with rephrased(wrong, sqlalchemy.exc.ArgumentError):
        url = sqlalchemy.make_url(text)
    if url.password or url.drivername not in ("sqlite", "postgresql"):
        raise UserError(wrong)
    if url.drivername == "sqlite" and ("?" in text or url.database in (None, "", ":memory:")):
        raise UserError(f"{wrong}. A path of SQLite cannot contain '?'")
    return url.set(drivername=url.drivername.replace("postgresql", "postgresql+psycopg"))


def database_in(folder: str) -> sqlalchemy.URL:
    """Returns the URL of the study in a directory, whatever characters its name has."""
    return sqlalchemy.URL.create("sqlite", database=os.path.join(folder, DATABASE))


def reason(error: BaseException) -> str:
    """Returns the first line of an error's cause."""
    return first_line(error.__cause__ or error)


class _Storage(optuna.storages.RDBStorage):
    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        if state is TrialState.RUNNING:  # Before it is taken: its worker may die right after.
            self.record_heartbeat(trial_id)
        return super().set_trial_state_values(trial_id, state, values)


class _Training:
    """A process that trains the run of a trial."""

    def __init__(self, run: "Run", trial: optuna.Trial, gpu: str | None):
        self.run, self.trial, self.gpu = run, trial, gpu
        # How it ended, and whether the pruner ended it.
        self.state, self.pruned = "", False
        # The step of the last validation that was reported.
        self._began, self._step = time.monotonic(), -1
        self._path, self._is_remote = os.path.join(run.folder, LOG), storage.is_remote(run.folder)
        storage.make_folder(run.folder)
        run.note()
        self._log: IO[bytes]
        if self._is_remote:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
        else:
            self._log = open(self._path, "ab")  # noqa: SIM115
        tie = [sys.executable, "-ISc", _TIED, str(os.getpid())] if sys.platform == "linux" else []
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        # A session of its own: else Ctrl-C would reach it twice, and the second one stops a run
        # without saving.
        how: dict[str, Any] = {
            "stdout": self._log,
            "stderr": self._log,
            "env": environment,
            "start_new_session": True,
        }
        self.process = subprocess.Popen([*tie, *run.command], **how)
        _say(f"started   {run.name}" + (f" on GPU {gpu}" if gpu is not None else ""))

    def report(self) -> None:
        """Reports new validation losses, and ends the process if the pruner says so."""
        records = []
        with contextlib.suppress(LogError):  # The run says what is wrong.
            records = [each for each in read_metrics(self.run.folder) if each["kind"] == "valid"]
        for record in records:
            if record["step"] > self._step and not self.pruned:
                self.trial.report(float(record["loss"]), record["step"])
                self._step, self.pruned = record["step"], self.trial.should_prune()
                if self.pruned:
                    self.process.terminate()

    def close(self) -> None:
        """Waits for the process, and records how it ended."""
        code = self.process.wait()
        if self.state:
            return
        if self._is_remote:
            self._log.seek(0)
            storage.write(self._path, self._log.read())
        self._log.close()
        self.state = self.run.end(code, time.monotonic() - self._began, pruned=self.pruned)
        _say(f"{self.state}: {self.run.name}")


class Worker:
    """Worker that takes runs of a study and trains them, until none is left.

    It trains one run on each of `gpus` (numbers or None).

    All calls that need the database are in `_step`, which is repeated as a whole if it cannot be
    reached.
    """

    def __init__(self, sweep: "Sweep", place: sqlalchemy.URL, gpus: Sequence[str | None]):
        self.signal_number = 0
        self._sweep, self._free_gpus = sweep, list(gpus)
        self._was_late = self._is_waiting = False
        self._trainings: list[_Training] = []
        if place.drivername == "sqlite":
            open(str(place.database), "a").close()  # Its error names the file.
        with rephrased(
            "--storage=postgresql:... requires a driver (%s): pip install 'psycopg[binary]'",
            ImportError,
        ):
            # Of workers that start together one makes the tables, and others may fail once.
            self._storage, self._study = self._patiently(
                functools.partial(_connect, sweep, place), seconds=15
            )
        # Runs that failed before are tried again, and those whose folder was removed.
        self._outdated: set[int] = set()
        for trial in self._study.get_trials(deepcopy=False):
            results = os.path.join(sweep.out, trial.user_attrs.get("run", ""), RESULTS)
            if "failed" in trial.user_attrs or (
                trial.state is TrialState.COMPLETE and not storage.exists(results)
            ):
                self._outdated.add(trial.number)

    def run(self) -> None:
        """Trains runs until none is left, or a signal arrives.

        No training outlives this call, whatever fails.
        """
        with contextlib.ExitStack() as at_end:
            numbers = [signal.SIGTERM, signal.SIGINT]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Not if started by nohup.
                numbers.append(signal.SIGHUP)  # The terminal is gone.
            for number in numbers:
                at_end.callback(signal.signal, number, signal.signal(number, self._forward))
            bar = at_end.enter_context(tqdm(total=len(self._sweep.queue), unit="run", disable=None))
            at_end.callback(self._end_trainings)
            while self._patiently(functools.partial(self._step, bar), PATIENCE_SECONDS):
                time.sleep(
                    REMOTE_POLL_SECONDS if storage.is_remote(self._sweep.out) else POLL_SECONDS
                )

    def report(self) -> list[str]:
        """Returns lines with the best run.

        Once twenty runs have finished, the lines also show the importance of each setting.
        """
        finished = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if not finished:
            return []
        best = self._study.best_trial
        name = best.user_attrs["run"]
        lines = [f"best      {name}: validation loss {best.value:.4f} nats", *self._next(name)]
        if len(finished) < _FEWEST_FOR_IMPORTANCES:
            return lines
        with (
            contextlib.suppress(ValueError, RuntimeError),
            warnings.catch_warnings(action="ignore"),
        ):
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            shares = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
            lines += [f"matters   {share:4.0%} {name}" for name, share in shares.items()]
        return lines

    def _next(self, name: str) -> list[str]:
        """Returns lines with commands for a finished run.

        The commands train it twice as long, and compare it with others.
        """
        folder = os.path.join(self._sweep.out, name)
        steps = run_lib.read_results(folder).get("steps")
        if not isinstance(steps, int):  # Another worker has removed the run.
            return []
        place = shlex.quote(folder)
        return [
            (
                f"next      python -m experiments.{self._sweep.program} --workdir={place} "
                f"--train.steps={2 * steps}"
            ),
            f"          python -m experiments.report {shlex.quote(self._sweep.out)}",
        ]

    def _patiently(self, act: Callable[[], T], seconds: float) -> T:
        """Calls `act`, and retries while the database is unreachable.

        It retries for `seconds` or until a signal.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                return act()
            except UNREACHABLE as error:
                if self.signal_number or time.monotonic() > until:
                    raise
                _say(f"waiting   for the database: {reason(error)}")
            time.sleep(min(5, seconds / 3))

    def _forward(self, number: int, _: object) -> None:
        if number == signal.SIGHUP and self.signal_number:
            # The shell and the system both send it. A second signal would end runs without saving.
            return
        self.signal_number = number
        for training in self._trainings:
            training.process.send_signal(
                signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            )

    def _end_trainings(self) -> None:
        """Ends the trainings that are left after an error, and waits until they have saved."""
        for training in self._trainings:
            # A second signal ends a run without saving.
            if not self.signal_number and not training.pruned:
                training.process.terminate()
        for training in self._trainings:
            training.close()

    def _step(self, bar: Any) -> bool:
        """Looks after the trainings, and starts others.

        Returns whether there are some left, here or elsewhere.
        """
        self._beat()
        for training in list(self._trainings):
            self._look_after(training)
        if self.signal_number:
            return bool(self._trainings)
        optuna.storages.fail_stale_trials(self._study)
        while self._free_gpus and not self.signal_number and self._take():
            self._beat()
        bar.n = sum(
            trial.state.is_finished() for trial in self._trials().values() if self._counts(trial)
        )
        bar.refresh()
        is_left = bar.n < len(self._sweep.queue)
        if is_left and not self._trainings and not self._is_waiting:
            self._is_waiting = True
            _say(
                "waiting   for runs of other workers, a dead worker is noticed after "
                f"{GRACE_SECONDS} s"
            )
        return is_left

    def _beat(self) -> None:
        for training in self._trainings:
            self._storage.record_heartbeat(training.trial._trial_id)  # noqa: SLF001

    def _trials(self) -> dict[str, FrozenTrial]:
        """Returns the trial of each place in the queue: the first that counts, or else the last."""
        found: dict[str, FrozenTrial] = {}
        for trial in self._study.get_trials(deepcopy=False):
            place = trial.user_attrs.get("place")
            if place is not None and (place not in found or not self._counts(found[place])):
                found[place] = trial
        return found

    def _counts(self, trial: FrozenTrial) -> bool:
        """Returns whether a trial keeps its place.

        One that failed without a reason was stopped, or its worker died.
        """
        has_stopped = trial.state is TrialState.FAIL and "failed" not in trial.user_attrs
        return trial.number not in self._outdated and not has_stopped

    def _queue(self) -> bool:
        """Queues a trial for an empty place. Returns whether there is such a place."""
        trials = self._trials()
        places = [
            place
            for place in self._sweep.queue
            if place not in trials or not self._counts(trials[place])
        ]
        if self._was_late:  # Workers that start together should not all want the same place.
            random.shuffle(places)
        for place in places:
            before = trials.get(place)
            folder = os.path.join(
                self._sweep.out, before.user_attrs.get("run", place) if before else place
            )
            if not is_held(folder):  # Else by a training that saves, as its worker has died.
                params = dict(before.params if before else {}) | dict(self._sweep.queue[place])
                self._study.enqueue_trial(params, user_attrs={"place": place})
                return True
        return False

    def _take(self) -> bool:
        """Takes a trial, and starts its run unless that has finished.

        Returns whether there was a trial to take.
        """
        if (
            not self._study.get_trials(deepcopy=False, states=[TrialState.WAITING])
            and not self._queue()
        ):
            return False
        try:
            trial, run, failed = self._ask()
        except optuna.exceptions.UpdateFinishedTrialError:
            # Another worker took this one for dead meanwhile, and has ended the trial. Its place is
            # free again.
            return True
        if run is None or run.results is not None:
            self._tell(trial, run, failed=failed)
        else:
            self._trainings.append(_Training(run, trial, self._free_gpus.pop(0)))
            if self.signal_number:  # It arrived meanwhile.
                self._trainings[-1].process.terminate()
        return True

    def _ask(self) -> tuple[optuna.Trial, "Run | None", str]:
        """Takes a trial and returns it with its run, or with None.

        If the run cannot be made, the reason is returned too.

        Raises:
          UpdateFinishedTrialError: If another worker has ended the trial before its run was noted
            in it.
        """
        # The heartbeat is kept, though not by `optimize`.
        with warnings.catch_warnings(action="ignore"):
            trial = self._study.ask(self._sweep.space)
        # None if another worker has taken the trial from the queue.
        place = trial.user_attrs.get("place")
        self._was_late = place is None or self._trials()[place].number != trial.number
        if self._was_late:
            return trial, None, ""
        try:
            run = self._sweep.run(trial.params)
        except UserError as error:  # Drawn values that do not fit each other.
            _say(f"failed: {error}")
            return trial, None, str(error)
        trial.set_user_attr("run", run.name)
        return trial, run, ""

    def _look_after(self, training: _Training) -> None:
        has_ended = training.process.poll() is not None
        # If others took this worker for dead, they wait until its training ends.
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            training.report()
        if not has_ended:
            return
        training.close()
        # A training in a workdir that another one has locked fails.
        is_final = not self.signal_number and not is_held(training.run.folder)
        self._tell(
            training.trial,
            training.run,
            pruned=training.pruned,
            failed=training.state if is_final else "",
        )
        self._trainings.remove(training)
        self._free_gpus.append(training.gpu)

    def _tell(
        self,
        trial: optuna.Trial,
        run: "Run | None" = None,
        *,
        pruned: bool = False,
        failed: str = "",
    ) -> None:
        """Ends a trial, with the lowest validation loss in nats if its run has finished."""
        results = run.results if run else None
        value, state = None, TrialState.PRUNED if pruned else TrialState.FAIL
        if results is not None:
            state = TrialState.COMPLETE
            # Not nan.
            value = min(math.inf, float((results.get("best_valid") or results["test"])["loss"]))
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            if state is TrialState.FAIL and failed:
                trial.set_user_attr("failed", failed)
            self._study.tell(trial, value, state, skip_if_finished=True)


def _connect(sweep: "Sweep", place: sqlalchemy.URL) -> tuple[_Storage, optuna.Study]:
    engine: dict[str, Any] = {"poolclass": sqlalchemy.pool.NullPool}
    if place.drivername == "sqlite":
        # Optuna takes a URL as text, in which some characters of a path have meanings.
        url = "sqlite://"
        # Writers wait for each other.
        engine["creator"] = functools.partial(sqlite3.connect, str(place.database), timeout=60)
    else:
        url = str(place)
        # A call over a network that was cut ends.
        engine["connect_args"] = {"connect_timeout": 10, "tcp_user_timeout": 60_000}
    made = _Storage(url, engine, heartbeat_interval=1, grace_period=GRACE_SECONDS)
    name = f"{os.path.basename(sweep.out)}-{sweep.digest}"
    pruner = sweep.pruner or optuna.pruners.NopPruner()
    how: dict[str, Any] = {
        "study_name": name,
        "load_if_exists": True,
        "sampler": sweep.sampler,
        "pruner": pruner,
    }
    return made, optuna.create_study(storage=made, **how)


def _say(line: str) -> None:
    tqdm.write(one_line(line))  # Above the bar.
    sys.stdout.flush()
