"""Several runs from one file: started a few at a time, gone on with, and told in one table.

    python -m launch.sweep sweep.toml --out=runs/sweep --jobs=2
    python -m launch.sweep sweep.toml --out=runs/sweep --table
    python -m launch.sweep sweep.toml --out=runs/sweep --print=slurm --with="--gpus=8 --time=12:00:00" | sbatch
    python -m launch.sweep sweep.toml --out=/mnt/txl/sweep --print=tpu --with="--zone=us-east5-b --type=v6e-8 --bucket=B"

The file (names are those of the program's flags):

    program = "ptb"                       # python -m experiments.ptb
    flagfile = "ptb_small"                # one, or a list
    [base]                                # of all runs
    train.steps = 2000
    [grid]                                # every combination
    seed = [1, 2, 3]
    model.dropout.rate = [0.1, 0.3]
    [[runs]]                              # and each of these with every combination
    model.n_layer = 4
    [[runs]]
    model.n_layer = 8
    name = "deep"                         # instead of what differs

Each run has a folder of --out that is named as what it differs in, with what it printed in sweep.log. The same command
goes on: finished runs are left alone, stopped ones are gone on with, failed ones are tried again. Ctrl-C and SIGTERM are
passed on to the runs, which save and leave. At the end the table is printed, and written to results.csv in --out.
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
from launch.sweep_file import Mistake, Run, Sweep
from txl_jax.errors import LogError
from txl_jax.training import ensemble as ensemble_step


def main(argv: Sequence[str]) -> int:
    """Does what a command line asks for; returns the exit code: 0, 1 (a run failed), 2 (usage) or 128 + signal."""
    given = _flags()
    if {"-h", "--help", "-help", "--helpfull"} & set(argv[1:]):
        print(f"{__doc__}\nFlags:\n")
        for flag in map(given.__getitem__, given):
            print(f"  --{flag.name}={(flag.default_as_str or '').strip(chr(39))}\n      {flag.help}")
        return 0
    try:
        files = given(argv)[1:]
        if len(files) != 1:
            raise Mistake(f"{len(files)} files were given ({' '.join(files) or 'none'}); give one, as sweep.toml")
        if not given.out:
            raise Mistake("no folder was given; say with --out=PATH where the runs belong")
        out = Path(given.out).expanduser()
        return _do(given, sweep_file.read(Path(files[0]), out), out)
    except (flags.Error, Mistake, LogError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _flags() -> flags.FlagValues:
    given = flags.FlagValues()

    def define(kind: Callable[..., None], *words: Any, **limits: Any) -> None:
        kind(*words, flag_values=given, **limits)

    define(flags.DEFINE_string, "out", None, "Folder of the runs' folders and of results.csv. Made if missing.")
    define(flags.DEFINE_integer, "jobs", 1, "Runs at a time.", lower_bound=1)
    define(flags.DEFINE_list, "gpus", [], "Numbers of the GPUs to share out, one to a run; as many runs at a time.")
    define(flags.DEFINE_bool, "table", False, "Only print the table of what there is.")
    define(flags.DEFINE_bool, "dry_run", False, "Only print the commands of the runs that have not finished.")
    define(flags.DEFINE_enum, "print", None, ["slurm", "tpu"], "Only print them as a job array, or for Cloud TPUs.")
    define(flags.DEFINE_string, "with", "", "Flags of launch/slurm.sh or launch/tpu.sh, for --print.")
    return given


def _do(given: flags.FlagValues, sweep: Sweep, out: Path) -> int:
    words = shlex.split(given["with"].value)
    if given.print:
        print(_printed(sweep.unfinished, given.print, words), end="")
        return 0
    if words:
        raise Mistake(
            "--with holds flags of the scripts that --print=slurm and --print=tpu name; give one of these too"
        )
    if given.dry_run:
        for run in sweep.unfinished:
            print(shlex.join(run.command))
        return 0
    if given.table:
        return sweep_table.write(sweep, out)
    if hint := _members_hint(sweep):
        print(hint)
    pool = _Pool(sweep, slots=given.gpus or [None] * given.jobs)
    pool.run()
    code = sweep_table.write(sweep, out)
    return 128 + pool.signal_number if pool.signal_number else code


def _printed(runs: Sequence[Run], where: str, words: list[str]) -> str:
    """A batch script for all runs, or a line for each."""
    if not runs:
        raise Mistake("all runs have finished; there is nothing to start")
    commands = [shlex.join(["python", *run.command[1:]]) for run in runs]
    if where == "tpu":
        lines = (
            f"launch/tpu.sh watch {_tpu_name(run.name)} {shlex.join(words)} -- {command}\n"
            for run, command in zip(runs, commands, strict=True)
        )
        return "".join(lines)
    asked = ["bash", Path(__file__).with_name("slurm.sh"), "--commands=-", "--dry_run", *words]
    told = subprocess.run(asked, check=False, input="\n".join(commands) + "\n", text=True, capture_output=True)
    if told.returncode:
        raise Mistake(told.stderr.strip().removeprefix("error: "))
    return told.stdout


def _tpu_name(name: str) -> str:
    """A run's name as Google lets a TPU be called: up to 61 lower-case letters, digits and hyphens.

    Of a longer one the beginning, and a number that stands for all of it.
    """
    told = "txl-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(told) > 61:
        told = f"{told[:52].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return told


def _members_hint(sweep: Sweep) -> str:
    """Says when the runs can be one program."""
    names = {name for run in sweep.runs for name in run.differs}
    if len(sweep.runs) < 2 or not names <= set(ensemble_step.NUMBERS):
        return ""
    return (
        f"note: these runs differ in {', '.join(sorted(names))} alone, which change no shape: python -m experiments.ensemble "
        "trains them as one program, which keeps an accelerator busy that one small model leaves idle"
    )


class _Pool:
    """Runs a few at a time, until all have ended or a signal says stop.

    Attributes:
      signal_number: of the signal that has arrived; 0 until then.
    """

    def __init__(self, sweep: Sweep, slots: Sequence[str | None]):
        going_on = [run for run in sweep.unfinished if sweep_table.is_going_on(run)]
        for run in going_on:
            print(f"{run.name} is going on already, and is left alone")
        self._waiting = [run for run in sweep.unfinished if run not in going_on]
        self._free = list(slots)  # The number of a GPU each, or None: all that there is.
        self._going: dict[subprocess.Popen, tuple[Run, str | None, float]] = {}
        self.signal_number = 0
        if finished := len(sweep.runs) - len(sweep.unfinished):
            print(f"{finished} of {len(sweep.runs)} runs have finished already")

    def run(self) -> None:
        """All of it; no run outlives it, whatever goes wrong."""
        # SIGHUP: the terminal is gone.
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        previous = {number: signal.signal(number, self._pass_on) for number in signals}
        try:
            while self._going or (self._waiting and not self.signal_number):
                while self._waiting and self._free and not self.signal_number:
                    self._start(self._waiting.pop(0))
                time.sleep(0.1)
                for process in [process for process in self._going if process.poll() is not None]:
                    self._note_end(process)
        except BaseException:
            self._pass_on(signal.SIGTERM, None)
            for process in self._going:
                process.wait()
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _start(self, run: Run) -> None:
        gpu = self._free.pop(0)
        environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
        run.folder.mkdir(parents=True, exist_ok=True)
        with open(run.folder / "sweep.log", "a") as log:
            # In a session of its own, or Ctrl-C would reach it from the terminal as well, and twice means at once.
            process = subprocess.Popen(
                run.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._going[process] = (run, gpu, time.monotonic())
        print(f"started   {run.name}" + (f" on GPU {gpu}" if gpu is not None else ""), flush=True)
        if self.signal_number:  # It came while the process was being made.
            process.send_signal(_as_runs_know_it(self.signal_number))

    def _note_end(self, process: subprocess.Popen) -> None:
        run, gpu, began = self._going.pop(process)
        self._free.append(gpu)
        sweep_table.note_end(run, seconds=time.monotonic() - began, code=process.returncode)
        print(f"{sweep_table.state_of(run)}: {run.name}", flush=True)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = number
        for process in list(self._going):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(_as_runs_know_it(number))


def _as_runs_know_it(number: int) -> int:
    return signal.SIGTERM if number == signal.SIGHUP else number


if __name__ == "__main__":
    sys.exit(main(sys.argv))
