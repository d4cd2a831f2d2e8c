"""The study of a sweep, and the workers that train its runs.

The runs are Optuna trials in a database.

The queue has a place for each run, or for each draw of a sampler. A worker creates a trial for a
place without one, and if a place has multiple trials, the first one counts. Workers therefore do
not need a lock, and may die at any moment: a trial without a heartbeat fails, its place becomes
free, and its run resumes in its workdir. Two trainings never share a workdir: a training ends with
its worker, and a place whose workdir is still locked is skipped.
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
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple, TypeVar

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from launch.sweep_file import DATABASE, GRACE_SECONDS, LOG, Sweep, SweepRun
from txl_jax.errors import LogError, UserError, first_line, one_line, rephrased
from txl_jax.metrics import Totals, format_score
from txl_jax.runs import run as run_lib
from txl_jax.runs.run import RESULTS
from txl_jax.runtime import storage
from txl_jax.runtime.lock import is_held
from txl_jax.runtime.log import read_metrics

T = TypeVar("T")
# Interval between two looks at the trainings. Object storage charges per request.
POLL_SECONDS = 2.0
REMOTE_POLL_SECONDS = 15.0
# How long a worker waits for a database that is restarting or unreachable.
PATIENCE_SECONDS = 900.0
# With four runs each of two settings matters 50 %.
_FEWEST_FOR_IMPORTANCES = 20
UNREACHABLE = (optuna.exceptions.StorageInternalError, sqlalchemy.exc.DBAPIError)
# Starts a command that gets SIGTERM from the kernel when this process has ended, even by SIGKILL.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(143); os.execvp(sys.argv[2], sys.argv[2:])"
)
# A repeated call and a resumed run report a loss that the study already has.
warnings.filterwarnings("ignore", "The reported value is ignored")


def database(text: str) -> sqlalchemy.URL:
    """Returns the URL of a study's database.

    Raises `UserError` if it is unsupported, or contains a password.
    """
    message = (
        "--storage must be sqlite:///PATH or postgresql://USER@HOST/DATABASE, without a password "
        "(set PGPASSWORD)"
    )
    with rephrased(message, sqlalchemy.exc.ArgumentError):
        url = sqlalchemy.make_url(text)
    if url.password or url.drivername not in ("sqlite", "postgresql"):
        raise UserError(message)
    if url.drivername == "sqlite" and ("?" in text or url.database in (None, "", ":memory:")):
        raise UserError(f"{message}. A path of SQLite cannot contain '?'")
    return url.set(drivername=url.drivername.replace("postgresql", "postgresql+psycopg"))


def database_in(folder: str) -> sqlalchemy.URL:
    """Returns the URL of the study in a directory, with special characters in its name escaped."""
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

    def __init__(self, run: SweepRun, trial: optuna.Trial, gpu: str | None):
        self.run = run
        self.trial = trial
        self.gpu = gpu
        self.state = ""  # How it ended, or "" if it has not ended.
        self.pruned = False  # Whether the pruner ended it.
        self._began = time.monotonic()
        self._reported_step = -1  # Step of the last validation that was reported.

        # Object storage cannot be appended to: there the output is written when the run ends.
        self._log_path = os.path.join(run.folder, LOG)
        self._is_remote = storage.is_remote(run.folder)
        storage.make_folder(run.folder)
        run.note()
        self._log: IO[bytes]
        if self._is_remote:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
        else:
            self._log = open(self._log_path, "ab")  # noqa: SIM115

        command = list(run.command)
        if sys.platform == "linux":
            command = [sys.executable, "-ISc", _TIED, str(os.getpid()), *command]
        environment = dict(os.environ)
        on_gpu = ""
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
            on_gpu = f" on GPU {gpu}"
        step = run.checkpoint_step
        # A separate session: otherwise Ctrl-C would reach the process twice, and the second one
        # stops a run without saving.
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=environment, start_new_session=True
        )
        if step:
            _say(f"resumed   {run.name}{on_gpu} at step {step}")
        else:
            _say(f"started   {run.name}{on_gpu}")

    def report(self) -> None:
        """Reports new validation losses, and ends the process if the pruner says so."""
        records = []
        # If the log cannot be read, the run itself reports it.
        with contextlib.suppress(LogError):
            records = [
                record for record in read_metrics(self.run.folder) if record["kind"] == "valid"
            ]
        for record in records:
            step = record["step"]
            if step <= self._reported_step or self.pruned:
                continue
            self.trial.report(float(record["loss"]), step)
            # The step counts as reported only if the pruner's query reaches the database too.
            should_prune = self.trial.should_prune()
            self._reported_step = step
            self.pruned = should_prune
            if should_prune:
                self.process.terminate()

    def close(self) -> None:
        """Waits for the process, and records how it ended."""
        code = self.process.wait()
        if self.state:
            return
        if self._is_remote:
            self._log.seek(0)
            storage.write(self._log_path, self._log.read())
        self._log.close()
        self.state = self.run.end(code, time.monotonic() - self._began, pruned=self.pruned)
        _say(f"{self.state}: {self.run.name}")


class _Taken(NamedTuple):
    """A trial that a worker has taken."""

    trial: optuna.Trial
    run: SweepRun | None  # None if another worker trains it, or it cannot be created.
    failed: str = ""  # Why the run cannot be created, or "".


class Worker:
    """Takes runs of a study and trains them, until none is left.

    It trains one run on each of `gpus` (numbers or None).

    All calls that need the database are in `_step`, which is repeated as a whole if the database is
    unreachable.
    """

    def __init__(self, sweep: Sweep, url: sqlalchemy.URL, gpus: Sequence[str | None]):
        self.signal_number = 0  # The last signal that arrived, or 0.
        self._sweep = sweep
        self._free_gpus = list(gpus)
        self._was_late = False  # Whether another worker took the place of the last trial first.
        self._is_waiting = False  # Whether the log says that it waits for other workers' runs.
        self._trainings: list[_Training] = []
        if url.drivername == "sqlite":
            open(str(url.database), "a").close()  # Its error names the file.
        with rephrased(
            "--storage=postgresql:... requires a driver (%s): pip install 'psycopg[binary]'",
            ImportError,
        ):
            # If workers start together, one creates the tables, and the others may fail once.
            self._storage, self._study = self._patiently(
                functools.partial(_connect, sweep, url), seconds=15
            )

        # Trials whose runs are tried again: they failed, or their directory was removed.
        self._outdated: set[int] = set()
        for trial in self._study.get_trials(deepcopy=False):
            results = os.path.join(sweep.out, trial.user_attrs.get("run", ""), RESULTS)
            has_failed = "failed" in trial.user_attrs
            is_complete = trial.state is TrialState.COMPLETE
            if has_failed or (is_complete and not storage.exists(results)):
                self._outdated.add(trial.number)

    def run(self) -> None:
        """Trains runs until none is left, or a signal arrives.

        No training outlives this call, whatever fails.
        """
        is_remote = storage.is_remote(self._sweep.out)
        with (
            self._forwarded_signals(),
            tqdm(total=len(self._sweep.queue), unit="run", disable=None) as bar,
            contextlib.ExitStack() as at_end,
        ):
            at_end.callback(self._end_trainings)
            while self._patiently(functools.partial(self._step, bar), PATIENCE_SECONDS):
                time.sleep(REMOTE_POLL_SECONDS if is_remote else POLL_SECONDS)

    @contextlib.contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """Forwards signals to the trainings, and restores the handlers at the end."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        # SIGHUP means that the terminal is gone. A command started by nohup ignores it.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        with contextlib.ExitStack() as at_end:
            for number in numbers:
                before = signal.signal(number, self._forward)
                at_end.callback(signal.signal, number, before)
            yield

    def report(self) -> list[str]:
        """Returns lines with the best run.

        Once twenty runs have finished, the lines also show the importance of each setting.
        """
        finished = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if not finished:
            return []
        best = self._study.best_trial
        run_name = best.user_attrs["run"]
        assert best.value is not None  # It has finished.
        lines = [f"best      {run_name}: validation {self._score(run_name, best.value)}"]
        lines += self._next(run_name)
        if len(finished) < _FEWEST_FOR_IMPORTANCES:
            return lines
        with (
            contextlib.suppress(ValueError, RuntimeError),
            warnings.catch_warnings(action="ignore"),
        ):
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            shares = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
            for setting, share in shares.items():
                lines.append(f"matters   {share:4.0%} {setting}")
        return lines

    def _score(self, name: str, loss: float) -> str:
        """Returns the score of a run with a loss in nats, in the table's measure and in nats."""
        in_nats = f"{loss:.4f} nats"
        try:
            recorded = run_lib.Run.read(os.path.join(self._sweep.out, name))
        except UserError:  # Another worker has removed the run.
            return in_nats
        measure = recorded.text.vocabulary.measure
        score = format_score(Totals(loss, 1).value(measure), measure)
        return f"{score} ({in_nats})"

    def _next(self, name: str) -> list[str]:
        """Returns lines with commands for a finished run.

        The commands train it twice as long, and compare it with others.
        """
        folder = os.path.join(self._sweep.out, name)
        steps = run_lib.read_results(folder).get("steps")
        if not isinstance(steps, int):  # Another worker has removed the run.
            return []
        workdir = shlex.quote(folder)
        return [
            (
                f"next      python -m experiments.{self._sweep.program} --workdir={workdir} "
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
        # A training treats a lost terminal like SIGTERM.
        forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        for training in self._trainings:
            training.process.send_signal(forwarded)

    def _end_trainings(self) -> None:
        """Ends the trainings that are left after an error, and waits until they have saved."""
        for training in self._trainings:
            # A second signal ends a run without saving.
            if not self.signal_number and not training.pruned:
                training.process.terminate()
        for training in self._trainings:
            training.close()

    def _step(self, bar: Any) -> bool:
        """Looks after the trainings, and starts new ones.

        Returns whether any are left, in this worker or others.
        """
        self._beat()
        for training in list(self._trainings):
            self._look_after(training)
        if self.signal_number:
            return bool(self._trainings)

        # Places of dead workers become free before places are taken.
        optuna.storages.fail_stale_trials(self._study)
        while self._free_gpus and not self.signal_number and self._take():
            self._beat()

        counted = [trial for trial in self._trials().values() if self._counts(trial)]
        bar.n = sum(trial.state.is_finished() for trial in counted)
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
        """Returns each queue place's trial: the first one that counts, or else the last one."""
        trials: dict[str, FrozenTrial] = {}
        for trial in self._study.get_trials(deepcopy=False):
            place = trial.user_attrs.get("place")
            if place is None:
                continue
            if place not in trials or not self._counts(trials[place]):
                trials[place] = trial
        return trials

    def _counts(self, trial: FrozenTrial) -> bool:
        """Returns whether a trial keeps its place.

        A trial that failed without a reason was stopped, or its worker died.
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
            name = place
            values = dict(self._sweep.queue[place])
            # A trial that is repeated keeps the values that were sampled for it.
            earlier = trials.get(place)
            if earlier:
                name = earlier.user_attrs.get("run", place)
                values = earlier.params | values
            # The training of a dead worker may still be saving, with its workdir locked.
            if not is_held(os.path.join(self._sweep.out, name)):
                self._study.enqueue_trial(values, user_attrs={"place": place})
                return True
        return False

    def _take(self) -> bool:
        """Takes a trial, and starts its run unless the run has finished.

        Returns whether there was a trial to take.
        """
        waiting = self._study.get_trials(deepcopy=False, states=[TrialState.WAITING])
        if not waiting and not self._queue():
            return False
        try:
            taken = self._ask()
        except optuna.exceptions.UpdateFinishedTrialError:
            # Another worker has assumed that this one is dead and has ended the trial. Its place is
            # free again.
            return True
        if taken.run is None or taken.run.results is not None:
            self._tell(taken.trial, taken.run, failed=taken.failed)
            return True
        training = _Training(taken.run, taken.trial, self._free_gpus.pop(0))
        self._trainings.append(training)
        # A signal that arrived before the training was in the list has not reached it.
        if self.signal_number:
            training.process.terminate()
        return True

    def _ask(self) -> _Taken:
        """Takes a trial, notes the name of its run in it, and returns both.

        Raises:
          UpdateFinishedTrialError: If another worker has ended the trial before its run was noted
            in it.
        """
        # Optuna warns that heartbeats need its `optimize`. `_beat` sends them instead.
        with warnings.catch_warnings(action="ignore"):
            trial = self._study.ask(self._sweep.space)
        # None if another worker has taken the trial from the queue.
        place = trial.user_attrs.get("place")
        self._was_late = place is None or self._trials()[place].number != trial.number
        if self._was_late:
            return _Taken(trial, run=None)
        try:
            run = self._sweep.run(trial.params)
        except UserError as error:  # The sampled values are incompatible.
            _say(f"failed: {error}")
            return _Taken(trial, run=None, failed=str(error))
        trial.set_user_attr("run", run.name)
        return _Taken(trial, run)

    def _look_after(self, training: _Training) -> None:
        has_ended = training.process.poll() is not None
        # If other workers assume that this one is dead, they wait until its training ends.
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
        run: SweepRun | None = None,
        *,
        pruned: bool = False,
        failed: str = "",
    ) -> None:
        """Ends a trial, with the lowest validation loss in nats if its run has finished."""
        results = run.results if run else None
        value = None
        if results is not None:
            state = TrialState.COMPLETE
            scores = results.get("best_valid") or results["test"]
            # A study does not accept nan. `min` returns its first argument instead.
            value = min(math.inf, float(scores["loss"]))
        elif pruned:
            state = TrialState.PRUNED
        else:
            state = TrialState.FAIL
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            if state is TrialState.FAIL and failed:
                trial.set_user_attr("failed", failed)
            self._study.tell(trial, value, state, skip_if_finished=True)


def _connect(sweep: Sweep, url: sqlalchemy.URL) -> tuple[_Storage, optuna.Study]:
    engine: dict[str, Any] = {"poolclass": sqlalchemy.pool.NullPool}
    if url.drivername == "sqlite":
        # Optuna takes a URL as text, in which some characters of a path are special.
        url_text = "sqlite://"
        # Writers wait for each other.
        engine["creator"] = functools.partial(sqlite3.connect, str(url.database), timeout=60)
    else:
        url_text = str(url)
        # Ends calls over a network connection that was cut.
        engine["connect_args"] = {"connect_timeout": 10, "tcp_user_timeout": 60_000}
    database_storage = _Storage(url_text, engine, heartbeat_interval=1, grace_period=GRACE_SECONDS)
    study = optuna.create_study(
        storage=database_storage,
        study_name=f"{os.path.basename(sweep.out)}-{sweep.digest}",
        load_if_exists=True,
        sampler=sweep.sampler,
        pruner=sweep.pruner or optuna.pruners.NopPruner(),
    )
    return database_storage, study


def _say(line: str) -> None:
    tqdm.write(one_line(line))  # Above the bar.
    sys.stdout.flush()
