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
in --out; where runs differ only in the seed, means and standard deviations follow, in means.csv. With --table and
folders instead of a file, the table lists the runs in them, wherever they were trained.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from txl_jax.cli.program import check_program, config_of_words
from txl_jax.config import CorpusName, ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.data.published import program_of
from txl_jax.errors import UserError, rephrased
from txl_jax.runs import records
from txl_jax.runs import run as run_lib
from txl_jax.runs.run import RESULTS
from txl_jax.runs.validation import with_defaults
from txl_jax.runtime import storage
from txl_jax.training.ensemble import VARYING

_PROGRAMS = list(dict.fromkeys(map(program_of, CorpusName)))
_KEYS = ("program", "flagfile", "base", "grid", "random", "runs")
_ENDED = "sweep.json"  # The exit code of a run's last process, and the seconds of all of them.
_LOG = "sweep.log"
_STOP_CODES = [code for number in (signal.SIGINT, signal.SIGTERM) for code in (-number, 128 + number)]
_RANGE = "{uniform = [low, high]}, or {log = [low, high]} for a logarithmic range"


# The file


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    name: str
    folder: str
    differs: Mapping[str, Any]  # The settings in which runs differ, by the flag's name.
    command: tuple[str, ...]
    config: ExperimentConfig

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of results.json, or None if it is corrupted or the run has not finished with these settings."""
        path = os.path.join(self.folder, RESULTS)
        if not storage.exists(path):
            return None
        recorded, program = run_lib.Run.read(self.folder).config, self.command[2].removeprefix("experiments.")
        if config_of(program, list(self.command[3:-1]), recorded) != recorded:  # As the program compares them.
            return None
        try:
            results = json.loads(storage.read(path))
            same = with_defaults(results["eval"]) == config_tree.to_dict(self.config.eval)
            # A run that was given more steps keeps the old results until it ends. With patience it may end early.
            ended = results["steps"] == self.config.train.steps or self.config.train.patience is not None
        except (ValueError, KeyError, TypeError):
            return None
        return results if same and ended else None

    @property
    def is_running(self) -> bool:
        """Whether a process is training in the folder, here or on a host that shares the file system's locks."""
        if storage.is_remote(self.folder):  # Object storage has no locks.
            return False
        try:
            with open(os.path.join(self.folder, ".lock")) as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @property
    def state(self) -> str:
        """Not started, running, stopped, failed, finished, or diverged."""
        if (results := self.results) is not None:
            return records.state_of(results)
        latest = run_lib.Run(self.folder).latest
        saved = [int(name) for name in storage.names(latest) if name.isdigit()] if storage.is_dir(latest) else []
        step = max(saved, default=0)
        if self.is_running:
            return f"running, saved after step {step}"
        code = self.ended.get("exit_code", 0)
        if code and code not in _STOP_CODES:
            return f"failed: {self._failure(code)}"
        started = step or storage.exists(os.path.join(self.folder, _LOG))
        return f"stopped after step {step}" if started else "not started"

    @property
    def ended(self) -> dict[str, Any]:
        """The content of sweep.json."""
        try:
            return json.loads(storage.read(os.path.join(self.folder, _ENDED)))
        except (FileNotFoundError, ValueError):  # Without it the table lacks a number; no run needs it.
            return {}

    def note_end(self, *, seconds: float, code: int) -> None:
        """Records the end of the run's process: its exit code, and its time added to the time of earlier ones."""
        ended = {"seconds": self.ended.get("seconds", 0.0) + seconds, "exit_code": code}
        storage.write_json(os.path.join(self.folder, _ENDED), ended)

    def row(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the row of results.csv."""
        in_effect = config_tree.to_dict(self.config) | dict(self.differs)
        row = {"run": self.name, **{name: in_effect.get(name, "") for name in names}, "state": self.state}
        if seconds := self.ended.get("seconds"):
            row["seconds"] = round(seconds, 1)
        if not run_lib.holds_run(self.folder):
            return row
        [found] = records.read_runs([self.folder])
        # The recorded rates are the time of a run that another machine has started.
        return dataclasses.replace(found, results=self.results).row([]) | row

    def _failure(self, code: int) -> str:
        """Returns the last line that the run printed, or the signal that killed it."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = storage.read(os.path.join(self.folder, _LOG)).decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")[:300]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The runs of a file, and the flags in which they differ, in the order of the file."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]

    @property
    def unfinished(self) -> list[Run]:
        """The runs without results."""
        return [run for run in self.runs if run.results is None]


def read(path: Path, out: str) -> Sweep:
    """Reads a file and checks runs as their program would; raises `UserError` if one would fail or two are the same."""
    content = _content(path)
    given = content.get("flagfile", [])
    common = [f"--flagfile={name}" for name in ([given] if isinstance(given, str) else given)]
    common += _as_flags(_flat(content.get("base", {})))
    points = list(_points(content))
    names = list(dict.fromkeys(name for point in points for name in point.differs))
    runs = [_run(content["program"], common, point, names, out) for point in points]
    for run, other in itertools.combinations(runs, 2):
        require(run.name != other.name, f"two runs have the name {run.name}; give each its own")
        alike = f"{run.name} and {other.name} have the same settings; remove one of them"
        require(run.config != other.config, alike)
    return Sweep(tuple(runs), tuple(names))


@dataclasses.dataclass(frozen=True)
class _Point:
    """One entry of [[runs]], by its name if it has one, with one sample and one point of the grid."""

    name: str | None
    entry: dict[str, Any]
    grid: dict[str, Any]

    @property
    def differs(self) -> dict[str, Any]:
        """All settings of this point."""
        return self.entry | self.grid


def _content(path: Path) -> dict[str, Any]:
    missing, damaged = f"cannot read {path} (%s); give the path of a TOML file", f"{path} is not valid TOML: %s"
    with rephrased(missing, OSError), rephrased(damaged, tomllib.TOMLDecodeError, UnicodeDecodeError):
        content = tomllib.loads(path.read_text())
    for key in content:
        if key not in _KEYS:
            near = config_tree.did_you_mean(key, _KEYS)
            raise UserError(f"{path} has {key!r}, which is not known; it may have {', '.join(_KEYS)}{near}")
    nothing = f"{path} has no grid, no random ranges and no runs"
    require(any(map(content.get, _KEYS[3:])), f"{nothing}; for one run start python -m experiments.PROGRAM itself")
    for key in ("base", "grid", "random", "runs"):
        kind, example = (list, "[[runs]]") if key == "runs" else (dict, f"[{key}]")
        wrong = f"{key} is {content.get(key)!r}; write it as {example}, with a flag on each line"
        require(isinstance(content.get(key, kind()), kind), wrong)
    program = content.get("program")
    near = config_tree.did_you_mean(str(program), _PROGRAMS)
    require(program in _PROGRAMS, f"program is {program!r}; it may be {', '.join(_PROGRAMS)}{near}")
    return content


def _points(content: dict[str, Any]) -> Iterator[_Point]:
    """Yields every entry of [[runs]] with every sample of [random] and every point of the grid."""
    grid = _flat(content.get("grid", {}))
    samples = drawn(content["random"]) if content.get("random") else [{}]
    for name, values in grid.items():
        advice = "give a list of the values to try, or move it to [base]"
        require(isinstance(values, list) and values, f"grid has {name} = {values!r}; {advice}")
    for entry in content.get("runs", [{}]):
        advice = "write each run as [[runs]], with a flag on each line"
        require(isinstance(entry, dict), f"runs has {entry!r}; {advice}")
        flat = _flat(entry)
        name = flat.pop("name", None)
        tables = {"the grid": grid, "runs": flat, "random": samples[0]}
        for (first, one), (second, other) in itertools.combinations(tables.items(), 2):
            if twice := ", ".join(sorted(one.keys() & other.keys())):
                raise UserError(f"{twice} is in {first} and in {second}, and a run has one value; take it out of one")
        for sample, values in itertools.product(samples, itertools.product(*grid.values())):
            yield _Point(name, flat, sample | dict(zip(grid, values, strict=True)))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens TOML tables: `model.n_layer = 4` is a table there, and a dotted name here."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _as_flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={_as_text(value)}" for name, value in values.items()]


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_as_text, value)) if isinstance(value, list) else str(value)


def _run(program: str, common: list[str], point: _Point, names: list[str], out: str) -> Run:
    name = _name(point, names)
    arguments, folder = [*common, *_as_flags(point.differs)], os.path.join(out, name)
    with rephrased(f"{name}: %s", ValueError):
        recorded = run_lib.Run.read(folder) if run_lib.holds_run(folder) else None
        config = config_of(program, arguments, recorded.config if recorded else None)
        if recorded is not None:
            recorded.compare(config)
    command = (sys.executable, "-m", f"experiments.{program}", *arguments, f"--workdir={folder}")
    return Run(name, folder, point.differs, command, config)


def _name(point: _Point, names: list[str]) -> str:
    """The name of a run and its folder: "seed=1+dropout.rate=0.3", without the first group where that is unique."""
    ends = [name.partition(".")[2] or name for name in names]
    short = {name: end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)}

    def format_settings(values: dict[str, Any]) -> list[str]:
        return [f"{short[name]}={_as_text(value)}" for name, value in values.items()]

    parts = [*(format_settings(point.entry) if point.name is None else [point.name]), *format_settings(point.grid)]
    return re.sub(r"[^\w.,=+-]+", "_", "+".join(parts)) or "base"


def config_of(program: str, arguments: list[str], recorded: ExperimentConfig | None = None) -> ExperimentConfig:
    """Returns the config that the program would make of these arguments, and of the record in the workdir, if any.

    Raises `UserError` as the program would.
    """
    defaults: ExperimentConfig = importlib.import_module(f"experiments.{program}").DEFAULTS
    without = () if program == "quickstart" else ("data_dir", "cache_dir")  # Flags that are not settings.
    config = config_of_words(defaults, [program, *arguments], without=without, recorded=recorded)
    check_program(defaults, config)
    return config


# Random search


class _Range(NamedTuple):
    """A range of a setting: between two numbers, or between their logarithms. Both ends belong to whole numbers."""

    low: float
    high: float
    log: bool
    whole: bool

    def at(self, share: float) -> int | float:
        """Returns the value below which a share, from 0 to 1, of the range is."""
        low, high = (self.low, self.high + 1) if self.whole else (self.low, self.high)
        value = low * (high / low) ** share if self.log else low + (high - low) * share
        if self.whole:
            return int(min(value // 1, self.high))
        # Four digits keep the names of runs short; rounding may not leave the range.
        return min(max(float(f"{value:.4g}"), self.low), self.high)


def drawn(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the settings of each sample of [random], without repetitions; raises `UserError` if it is not valid.

    A value depends only on the seed, the number of the sample and the setting: more samples, or another setting, leave
    the values of the others as they were.
    """
    numbers = {"seed": 0} | {name: value for name, value in table.items() if name in ("samples", "seed")}
    for name, least in (("samples", 1), ("seed", 0)):
        if type(value := numbers.get(name)) is not int or value < least:
            advice = f"give a whole number from {least}. The seeds of the runs go into [grid]"
            raise UserError(f"random has {name} = {value!r}; {advice}")
    ranges = _ranges(_flat({name: value for name, value in table.items() if name not in numbers}))
    found: list[dict[str, Any]] = []
    samples, seed = numbers["samples"], numbers["seed"]
    for number in range(samples):
        point = {}
        for name, each in ranges.items():
            share = np.random.default_rng([seed, number, zlib.crc32(name.encode())]).random()
            point[name] = each.at(share)
        if point not in found:
            found.append(point)
    return found


def _ranges(flat: Mapping[str, Any]) -> dict[str, _Range]:
    types = {leaf.name: leaf.type.kind for leaf in config_tree.leaves(ExperimentConfig)}
    found: dict[str, _Range] = {}
    for full, value in flat.items():
        name, _, kind = full.rpartition(".")
        if kind not in ("log", "uniform") or not name or name in found:
            raise UserError(f"random has {full} = {value!r}; give each setting one range: {_RANGE}")
        ends = value if isinstance(value, list) and all(type(end) in (int, float) for end in value) else []
        if len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:
            raise UserError(f"random has {full} = {value!r}; give two numbers, the lower one first")
        require(kind != "log" or ends[0] > 0, f"random has {full} = {value!r}; a logarithmic range begins above 0")
        found[name] = _Range(float(ends[0]), float(ends[1]), log=kind == "log", whole=types.get(name) is int)
    require(found, f"random has no range to draw from; {_RANGE}")
    return found


# Tables


def write(sweep: Sweep, out: str) -> int:
    """Writes the table of a sweep; returns the exit code, 1 if a run has failed."""
    rows = [run.row(sweep.names) for run in sweep.runs]
    write_table(sweep.names, rows, out)
    return int(any(row["state"].startswith("failed") for row in rows))


def write_table(names: Sequence[str], rows: Sequence[dict[str, Any]], out: str | None) -> None:
    """Prints the table and the means over seeds, and writes them to results.csv and means.csv in `out`, if given."""
    print("", *records.markdown(names, rows), sep="\n")
    if out is None:
        return
    storage.make_folder(out)
    print()
    tables = {"results": (["run", *names, *records.MEASURED, "state"], rows)}
    if averaged := records.means(names, rows):
        tables["means"] = (records.mean_columns(names), averaged)
    for name, (columns, content) in tables.items():
        path = os.path.join(out, f"{name}.csv")
        storage.write(path, records.csv_file(columns, content))
        print(f"{name:<10}{path}", flush=True)


# Running


class _Pool:
    """Runs a few runs at a time, until all have ended or a signal arrives, whose number is `signal_number`."""

    def __init__(self, sweep: Sweep, slots: Sequence[str | None]):
        self._waiting = sweep.unfinished
        self._free = list(slots)  # The number of a GPU each, or None for all devices.
        self._running: dict[subprocess.Popen[bytes], tuple[Run, str | None, float]] = {}
        self.signal_number = 0
        if finished := len(sweep.runs) - len(self._waiting):
            print(f"{finished} of {len(sweep.runs)} runs have finished already")

    def run(self) -> None:
        """Runs all runs. None outlives this call, whatever fails."""
        for run in [run for run in self._waiting if run.is_running]:
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
        with open(os.path.join(run.folder, _LOG), "a") as log:
            # A session of its own: else Ctrl-C would reach it twice, and the second one stops a run without saving.
            process = subprocess.Popen(
                run.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self._running[process] = (run, gpu, time.monotonic())
        print(f"started   {run.name}" + (f" on GPU {gpu}" if gpu is not None else ""), flush=True)
        if self.signal_number:  # It arrived while the process was being started.
            self._signal(process)

    def _note_end(self, process: subprocess.Popen[bytes]) -> None:
        run, gpu, began = self._running.pop(process)
        self._free.append(gpu)
        run.note_end(seconds=time.monotonic() - began, code=process.returncode)
        print(f"{run.state}: {run.name}", flush=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_number = number
        for process in list(self._running):
            self._signal(process)

    def _signal(self, process: subprocess.Popen[bytes]) -> None:
        # Runs do not handle SIGHUP.
        number = signal.SIGTERM if self.signal_number == signal.SIGHUP else self.signal_number
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


# The command line


def _launcher_text(runs: Sequence[Run], launcher: str, launcher_flags: list[str]) -> str:
    """Returns a batch script for all runs (slurm), or a line for each (tpu)."""
    require(runs, "all runs have finished; there is nothing to start")
    commands = [shlex.join(["python", *run.command[1:]]) for run in runs]
    if launcher == "tpu":
        lines = (
            f"launch/tpu.sh watch {_tpu_name(run.name)} {shlex.join(launcher_flags)} -- {command}\n"
            for run, command in zip(runs, commands, strict=True)
        )
        return "".join(lines)
    slurm = ["bash", str(Path(__file__).with_name("slurm.sh")), "--commands=-", "--dry_run", *launcher_flags]
    done = subprocess.run(slurm, check=False, input="\n".join(commands) + "\n", text=True, capture_output=True)
    require(not done.returncode, done.stderr.strip().removeprefix("error: "))
    return done.stdout


def _tpu_name(name: str) -> str:
    """A run's name as a TPU name: up to 61 lower-case letters, digits and hyphens. A longer one ends with its hash."""
    tpu = "txl-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if len(tpu) > 61:
        tpu = f"{tpu[:52].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return tpu


def main(argv: Sequence[str]) -> int:
    """Runs the sweep of the command line; returns the exit code: 0, 1 (a run failed), 2 (usage) or 128 + signal."""
    given = _flags()
    if {"-h", "--help", "-help", "--helpfull"} & set(argv[1:]):
        print(f"{__doc__}\nFlags:\n")
        for flag in map(given.__getitem__, given):
            print(f"  --{flag.name}={(flag.default_as_str or '').strip(chr(39))}\n      {flag.help}")
        return 0
    storage.shorten_storage_logs()
    try:
        files = given(argv)[1:]
        if given.table and files and not any(name.endswith(".toml") or Path(name).is_file() for name in files):
            found = records.read_runs(files)
            names = records.swept_settings(found)
            write_table(names, [run.row(names) for run in found], storage.as_path(given.out) if given.out else None)
            return 0
        several = f"{len(files)} files were given ({' '.join(files) or 'none'})"
        require(len(files) == 1, f"{several}; give one, as sweep.toml")
        require(given.out, "no folder was given; give the folder of the runs with --out=PATH")
        out = storage.as_path(given.out) if storage.is_remote(given.out) else os.path.expanduser(given.out)
        return _do(given, read(Path(files[0]), out), out)
    except (flags.Error, UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _flags() -> flags.FlagValues:
    given = flags.FlagValues()
    flags.DEFINE_string(
        "out", None, "Folder for the runs' folders and results.csv. Made if missing.", flag_values=given
    )
    flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1, flag_values=given)
    flags.DEFINE_list("gpus", [], "Numbers of the GPUs, one for each run; as many runs at a time.", flag_values=given)
    flags.DEFINE_bool("table", False, "Only print the table of results.", flag_values=given)
    flags.DEFINE_bool("dry_run", False, "Only print the commands of the unfinished runs.", flag_values=given)
    flags.DEFINE_enum(
        "print", None, ["slurm", "tpu"], "Only print a Slurm job array, or commands for TPUs.", flag_values=given
    )
    flags.DEFINE_string("with", "", "Flags of launch/slurm.sh or launch/tpu.sh, for --print.", flag_values=given)
    return given


def _do(given: flags.FlagValues, sweep: Sweep, out: str) -> int:
    launcher_flags = shlex.split(given["with"].value)
    if given.print:
        print(_launcher_text(sweep.unfinished, given.print, launcher_flags), end="")
        return 0
    without = "--with holds flags of the scripts that --print=slurm and --print=tpu name; give one of these too"
    require(not launcher_flags, without)
    if given.dry_run:
        for run in sweep.unfinished:
            print(shlex.join(run.command))
        return 0
    if given.table:
        return write(sweep, out)
    here = f"--out is {out}, and runs of this machine need a folder of its own; give one, or --print"
    require(not storage.is_remote(out), here)
    if len(sweep.runs) > 1 and set(sweep.names) <= set(VARYING):
        print(
            f"note: these runs differ only in {', '.join(sorted(sweep.names))}, and their shapes are the same: "
            "python -m experiments.ensemble trains them as one vmapped program, which uses an accelerator better than "
            "one small model"
        )
    pool = _Pool(sweep, slots=given.gpus or [None] * given.jobs)
    pool.run()
    code = write(sweep, out)
    return 128 + pool.signal_number if pool.signal_number else code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
