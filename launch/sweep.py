"""Runs a hyperparameter sweep from one file: starts, resumes and tabulates the runs.

    python -m launch.sweep sweep.toml --out=runs/sweep --jobs=2
    python -m launch.sweep sweep.toml --out=runs/sweep --table
    python -m launch.sweep --table runs/one gs://bucket/runs/two
    python -m launch.sweep sweep.toml --out=runs/sweep --print=slurm --with="--gpus=8 --time=12:00:00" | sbatch
    python -m launch.sweep sweep.toml --out=gs://my-bucket/sweep --print=tpu --with="--zone=us-east5-b --type=v6e-8"

The file (names are those of the program's flags; a setting that is off, or all, is "none"):

    program = "ptb"                       # python -m experiments.ptb
    flagfile = "ptb_small"                # one, or a list
    [base]                                # settings of all runs
    train.steps = 2000
    [grid]                                # grid search: every combination is a run
    seed = [1, 2, 3]
    model.dropout.rate = [0.1, 0.3]
    [[runs]]                              # each of these with every combination of the grid
    model.n_layer = 4
    [[runs]]
    model.n_layer = 8
    name = "deep"                         # instead of the settings that differ
    [random]                              # random search: each sample with every combination too
    samples = 20
    optimizer.learning_rate = { log = [1e-4, 1e-2] }
    model.dropout.attention = { uniform = [0, 0.3] }

Each run has a folder in --out, named after the settings in which it differs; its output is in sweep.log there. The same
command continues a sweep: finished runs are skipped, stopped runs are resumed, failed runs are tried again. Ctrl-C and
SIGTERM are forwarded to the runs, which save and exit. At the end the table is printed and written to results.csv
in --out; where runs differ in the seed alone, means and standard deviations follow, in means.csv. With --table and
folders instead of a file, the table is that of the runs in them, wherever they were trained.
"""

import contextlib
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from absl import flags

from launch import sweep_file, sweep_table
from launch.sweep_file import Run, Sweep
from txl_jax.errors import UserError
from txl_jax.runtime.storage import as_path, is_remote, shorten_storage_logs
from txl_jax.training.ensemble import VARYING


def main(argv: Sequence[str]) -> int:
    """Runs the sweep of the command line; returns the exit code: 0, 1 (a run failed), 2 (usage) or 128 + signal."""
    given = _flags()
    if {"-h", "--help", "-help", "--helpfull"} & set(argv[1:]):
        print(f"{__doc__}\nFlags:\n")
        for flag in map(given.__getitem__, given):
            print(f"  --{flag.name}={(flag.default_as_str or '').strip(chr(39))}\n      {flag.help}")
        return 0
    shorten_storage_logs()
    try:
        files = given(argv)[1:]
        if given.table and files and not any(name.endswith(".toml") or Path(name).is_file() for name in files):
            return sweep_table.write_runs(files, as_path(given.out) if given.out else None)
        if len(files) != 1:
            raise UserError(f"{len(files)} files were given ({' '.join(files) or 'none'}); give one, as sweep.toml")
        if not given.out:
            raise UserError("no folder was given; give the folder of the runs with --out=PATH")
        out = as_path(given.out) if is_remote(given.out) else os.path.expanduser(given.out)
        return _do(given, sweep_file.read(Path(files[0]), out), out)
    except (flags.Error, UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _flags() -> flags.FlagValues:
    given = flags.FlagValues()

    def define(kind: Callable[..., Any], *arguments: Any, **limits: Any) -> None:
        kind(*arguments, flag_values=given, **limits)

    define(flags.DEFINE_string, "out", None, "Folder for the runs' folders and results.csv. Made if missing.")
    define(flags.DEFINE_integer, "jobs", 1, "Runs at a time.", lower_bound=1)
    define(flags.DEFINE_list, "gpus", [], "Numbers of the GPUs, one for each run; as many runs at a time.")
    define(flags.DEFINE_bool, "table", False, "Only print the table of results.")
    define(flags.DEFINE_bool, "dry_run", False, "Only print the commands of the unfinished runs.")
    define(flags.DEFINE_enum, "print", None, ["slurm", "tpu"], "Only print a Slurm job array, or commands for TPUs.")
    define(flags.DEFINE_string, "with", "", "Flags of launch/slurm.sh or launch/tpu.sh, for --print.")
    return given


def _do(given: flags.FlagValues, sweep: Sweep, out: str) -> int:
    launcher_flags = shlex.split(given["with"].value)
    if given.print:
        print(_launcher_text(sweep.unfinished, given.print, launcher_flags), end="")
        return 0
    if launcher_flags:
        raise UserError(
            "--with holds flags of the scripts that --print=slurm and --print=tpu name; give one of these too"
        )
    if given.dry_run:
        for run in sweep.unfinished:
            print(shlex.join(run.command))
        return 0
    if given.table:
        return sweep_table.write(sweep, out)
    if is_remote(out):
        raise UserError(f"--out is {out}, and runs of this machine need a folder of its own; give one, or --print")
    if hint := _ensemble_hint(sweep):
        print(hint)
    pool = _Pool(sweep, slots=given.gpus or [None] * given.jobs)
    pool.run()
    code = sweep_table.write(sweep, out)
    return 128 + pool.signal_number if pool.signal_number else code


def _launcher_text(runs: Sequence[Run], launcher: str, launcher_flags: list[str]) -> str:
    """Returns a batch script for all runs (slurm), or a line for each (tpu)."""
    if not runs:
        raise UserError("all runs have finished; there is nothing to start")
    commands = [shlex.join(["python", *run.command[1:]]) for run in runs]
    if launcher == "tpu":
        lines = (
            f"launch/tpu.sh watch {_tpu_name(run.name)} {shlex.join(launcher_flags)} -- {command}\n"
            for run, command in zip(runs, commands, strict=True)
        )
        return "".join(lines)
    slurm = ["bash", str(Path(__file__).with_name("slurm.sh")), "--commands=-", "--dry_run", *launcher_flags]
    done = subprocess.run(slurm, check=False, input="\n".join(commands) + "\n", text=True, capture_output=True)
    if done.returncode:
        raise UserError(done.stderr.strip().removeprefix("error: "))
    return done.stdout


def _tpu_name(name: str) -> str:
    """A run's name as a TPU name: up to 61 lower-case letters, digits and hyphens.

    A longer one is cut, and ends with a hash of the whole name.
    """
    tpu = "txl-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(tpu) > 61:
        tpu = f"{tpu[:52].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return tpu


def _ensemble_hint(sweep: Sweep) -> str:
    """A line for a sweep whose runs can be trained as an ensemble; else empty."""
    names = {name for run in sweep.runs for name in run.differs}
    if len(sweep.runs) < 2 or not names <= set(VARYING):
        return ""
    return (
        f"note: these runs differ only in {', '.join(sorted(names))}, and their shapes are the same: python -m "
        "experiments.ensemble trains them as one vmapped program, which uses an accelerator better than one small model"
    )


class _Pool:
    """Runs a few runs at a time, until all have ended or a signal arrives.

    Attributes:
      signal_number: the signal that has arrived; 0 until then.
    """

    def __init__(self, sweep: Sweep, slots: Sequence[str | None]):
        self._waiting = sweep.unfinished
        self._free = list(slots)  # The number of a GPU each, or None: all devices.
        self._running: dict[subprocess.Popen[bytes], tuple[Run, str | None, float]] = {}
        self.signal_number = 0
        if finished := len(sweep.runs) - len(self._waiting):
            print(f"{finished} of {len(sweep.runs)} runs have finished already")

    def run(self) -> None:
        """Runs all runs. None outlives this call, whatever fails."""
        for run in [run for run in self._waiting if sweep_table.is_running(run)]:
            print(f"{run.name} is running already and is skipped")
            self._waiting.remove(run)
        # SIGHUP: the terminal is gone.
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        previous = {number: signal.signal(number, self._forward) for number in signals}
        try:
            while self._running or (self._waiting and not self.signal_number):
                while self._waiting and self._free and not self.signal_number:
                    self._start(self._waiting.pop(0))
                time.sleep(0.1)
                for process in [process for process in self._running if process.poll() is not None]:
                    self._note_end(process)
        except BaseException:
            self._forward(signal.SIGTERM, None)
            for process in self._running:
                process.wait()
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, run: Run) -> None:
        gpu = self._free.pop(0)
        environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        os.makedirs(run.folder, exist_ok=True)
        with open(os.path.join(run.folder, "sweep.log"), "a") as log:
            # A session of its own: else Ctrl-C would reach it twice, and the second one stops a run without saving.
            process = subprocess.Popen(
                run.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._running[process] = (run, gpu, time.monotonic())
        print(f"started   {run.name}" + (f" on GPU {gpu}" if gpu is not None else ""), flush=True)
        if self.signal_number:  # It arrived while the process was being started.
            process.send_signal(_signal_for_runs(self.signal_number))

    def _note_end(self, process: subprocess.Popen[bytes]) -> None:
        run, gpu, began = self._running.pop(process)
        self._free.append(gpu)
        sweep_table.note_end(run, seconds=time.monotonic() - began, code=process.returncode)
        print(f"{sweep_table.state_of(run)}: {run.name}", flush=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = number
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(_signal_for_runs(number))


def _signal_for_runs(number: int) -> int:
    """SIGTERM for SIGHUP, which runs do not handle."""
    return signal.SIGTERM if number == signal.SIGHUP else number


if __name__ == "__main__":
    sys.exit(main(sys.argv))
