r"""Runs a hyperparameter sweep from one file, on one machine or many.

It starts, resumes and tabulates the runs.

    python -m launch.sweep sweep.toml --out=runs/sweep --jobs=2
    python -m launch.sweep sweep.toml --out=runs/sweep --table
    python -m launch.sweep --table runs/one gs://bucket/runs/two
    python -m launch.sweep sweep.toml --out=gs://bucket/sweep \
        --storage=postgresql://me@host/db --jobs=8 --print=sky

The file lists the settings of the runs, named like the command's flags. Write None as "none":

    program = "ptb"                       # python -m experiments.ptb
    base.train.steps = 2000               # for all runs
    grid.seed = [1, 2, 3]                 # every combination is a run

docs/launch.md describes the other tables: [[runs]], [random], [sampler] and [pruner]. Each run has
a directory in --out, named after the settings in which it differs, with its output in sweep.log. To
resume a sweep, or to join it from another machine, rerun the same command. Ctrl-C saves all runs.
"""

import argparse
import dataclasses
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
except ImportError as error:
    sys.exit(f"error: sweeps require Optuna ({error}). Run pip install '.[sweep]'.")

from launch import study
from txl_jax.cli.precedence import config_of_words
from txl_jax.cli.train_command import check_program
from txl_jax.config import CorpusName, ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.config.evaluation import is_same_in_training
from txl_jax.data.published import program_of
from txl_jax.errors import UserError, describe_system_error, one_line, rephrased
from txl_jax.runs import run as run_lib
from txl_jax.runs import run_tables
from txl_jax.runs.run import RESULTS
from txl_jax.runtime import output, remote, storage
from txl_jax.runtime.checkpoint import find_steps
from txl_jax.runtime.lock import is_held

_PROGRAMS = list(dict.fromkeys(map(program_of, CorpusName)))
_KEYS = ("program", "flagfile", "base", "sampler", "pruner", "grid", "random", "runs")
# Values of a run, how its last process ended, and the seconds of all of them.
_NOTES = "sweep.json"
_STOP_CODES = [
    code
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for code in (-number, 128 + number)
]
# Each run has a process and a directory. All are checked before the first: this many take a minute
# (6.7 ms each).
MAX_RUNS = 10_000
# File systems allow 255, and temporary names beside a directory are longer than its own.
MAX_NAME_BYTES = 200
# At the end of a shortened name. Of 10,000 names two are alike with a chance of 2e-7.
_DIGEST_LETTERS = 12
# In --out, beside the directories of the runs.
_OWN_FILES = (study.DATABASE, "results.csv", "means.csv")
_RANGE = "{uniform = [low, high]}, or {log = [low, high]} for a logarithmic range"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    name: str
    folder: str
    # As its trial has them: the entry of [[runs]], texts of the grid, numbers of ranges.
    values: Mapping[str, Any]
    # The settings in which runs differ, by the flag's name.
    differs: Mapping[str, Any]
    command: tuple[str, ...]
    config: ExperimentConfig

    @property
    def results(self) -> dict[str, Any] | None:
        """The content of results.json, or None.

        It is None if the file is corrupted or the run has not finished with these settings.
        """
        try:
            results = dict(storage.read_json(os.path.join(self.folder, RESULTS)))
            same = is_same_in_training(results["eval"], self.config.eval)
            # A run that was given more steps keeps the old results until it ends. With patience it
            # may end early.
            ended = (
                results["steps"] == self.config.train.steps
                or self.config.train.patience is not None
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        return results if same and ended else None

    def note(self, state: str | None = None, seconds: float = 0.0) -> None:
        """Records in sweep.json how the last process ended, and the seconds of all processes.

        `state` is None if the last process has not ended.
        """
        notes = {
            "values": self.values,
            "seconds": _notes(self.folder).get("seconds", 0.0) + seconds,
            "state": state,
        }
        storage.write_json(os.path.join(self.folder, _NOTES), notes)

    def end(self, code: int, seconds: float, *, pruned: bool) -> str:
        """Records how a process of the run ended: finished, diverged, pruned, stopped or failed.

        Returns it.
        """
        if self.results is not None:
            state = run_tables.state_of(self.results)
        elif not code or code in _STOP_CODES:
            step = max((step for step, _ in find_steps(run_lib.Run(self.folder).latest)), default=0)
            state = f"{'pruned' if pruned else 'stopped'} after step {step}"
        else:
            lines = (
                storage.read(os.path.join(self.folder, study.LOG))
                .decode(errors="replace")
                .strip()
                .split("\n")
            )
            why = lines[-1].strip()[:300] or f"exit code {code}"
            state = f"failed: {f'killed by {signal.Signals(-code).name}' if code < 0 else why}"
        self.note(state, seconds)
        return state

    def row(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the row of results.csv."""
        notes, row = _notes(self.folder), {"state": "not started"}
        if run_lib.holds_run(self.folder):
            [found] = run_tables.read_runs([self.folder])
            row |= dataclasses.replace(found, results=self.results).row([])
        if self.results is None:
            row["state"] = (
                f"running, {row['state']}"
                if is_held(self.folder)
                else notes.get("state") or row["state"]
            )
        if seconds := notes.get("seconds"):  # Else the recorded rates are the time.
            row["seconds"] = round(seconds, 1)
        in_effect = config_tree.to_dict(self.config) | dict(self.differs)
        return row | {"run": self.name, **{name: in_effect.get(name, "") for name in names}}


class Sweep:
    """The content of a file: what its runs share, and the values in which they differ.

    Reading it checks runs like their command, and raises `UserError` if one would fail or two are
    the same. For runs that are drawn while others are trained it checks the ends of the ranges.
    """

    def __init__(self, path: Path, out: str):
        content = _content(path)
        self.out, self.program, given = out, content["program"], content.get("flagfile", [])
        self._common = [
            f"--flagfile={name}" for name in ([given] if isinstance(given, str) else given)
        ]
        self._common += _as_flags(_flat(content.get("base", {})))
        self._entries = _entries(content.get("runs") or [{}])
        self._grid = _grid(_flat(content.get("grid", {})))
        ranges, samples, seed = _random(content.get("random", {}))
        of_entries = {
            name: None for entry in self._entries.values() for name in entry if name != "name"
        }
        tables: dict[str, Mapping[str, Any]] = {
            "the grid": self._grid,
            "runs": of_entries,
            "random": ranges,
        }
        for first, second in itertools.combinations(tables, 2):
            twice = ", ".join(sorted(tables[first].keys() & tables[second].keys()))
            require(
                not twice,
                f"{twice} is in both {first} and {second}, but a run has one value. "
                "Remove it from one.",
            )
        texts = ({"runs": self._entries} if len(self._entries) > 1 else {}) | self._grid
        # Values by their names in the study.
        self.space = ranges | {
            name: CategoricalDistribution(list(each)) for name, each in texts.items()
        }
        self.names = [*of_entries, *ranges, *self._grid]  # The settings in which runs differ.
        # Another content is another study; the folders are the same.
        self.digest = hashlib.sha256(
            json.dumps(content, sort_keys=True, default=str).encode()
        ).hexdigest()[:8]
        made = {
            kind: study.made(kind, content[kind])
            for kind in ("sampler", "pruner")
            if kind in content
        }
        self.sampler, self.pruner = made.get("sampler"), made.get("pruner")
        online = self.sampler is not None
        require(
            ranges or not online, f"[sampler] has no range to draw from in [random]. Add {_RANGE}"
        )
        _check_number({name: len(values) for name, values in texts.items()}, samples, online=online)
        points = study.drawn(ranges, samples, seed) if ranges else [{}]
        if online:
            points = [
                {name: getattr(each, end) for name, each in ranges.items()}
                for end in ("low", "high")
            ]
        combinations = [
            dict(zip(texts, each, strict=True)) for each in itertools.product(*texts.values())
        ]
        found: dict[str, Run] = {}
        for run in (self.run(point | each) for point in points for each in combinations):
            same = found.setdefault(run.name, run).config == run.config  # Draws may be equal.
            require(same, f"two runs are named {run.name}. Give them different names.")
        if not online:
            _refuse_equal(found.values())
        # All runs by name, unless they are drawn while others are trained.
        self.runs = {} if online else found
        draws: dict[str, Mapping[str, Any]] = {f"draw {number}": {} for number in range(samples)}
        # By places in the queue.
        self.queue = draws if online else {name: run.values for name, run in found.items()}

    def run(self, values: Mapping[str, Any]) -> Run:
        """Returns the run with these values. Raises `UserError` as its program would."""
        settings = dict(self._entries[values.get("runs", next(iter(self._entries)))])
        rounded = dict[str, Any]()
        given = settings.pop("name", None)
        for name, of in self.space.items():
            if isinstance(of, FloatDistribution):  # Four digits keep the names of runs short.
                rounded[name] = min(max(float(f"{values[name]:.4g}"), of.low), of.high)
            elif name != "runs":
                rounded[name] = (
                    self._grid[name][values[name]] if name in self._grid else values[name]
                )
        # "seed=1+dropout.rate=0.3": without the first group where that is unique.
        ends = [name.partition(".")[2] or name for name in self.names]
        short = {
            name: end if ends.count(end) == 1 else name
            for name, end in zip(self.names, ends, strict=True)
        }
        parts = [
            f"{short[each]}={_as_text(value)}"
            for each, value in (({} if given else settings) | rounded).items()
        ]
        settings |= rounded
        name = safe_name(given, parts)
        arguments, folder = [*self._common, *_as_flags(settings)], os.path.join(self.out, name)
        with rephrased(f"{name}: %s", ValueError):
            recorded = run_lib.Run.read(folder) if run_lib.holds_run(folder) else None
            config = config_of(self.program, arguments, recorded.config if recorded else None)
            if recorded is not None:
                recorded.compare(config)
        command = (
            sys.executable,
            "-m",
            f"experiments.{self.program}",
            *arguments,
            f"--workdir={folder}",
        )
        return Run(name, folder, values, settings, command, config)

    def _has(self, values: Mapping[str, Any]) -> bool:
        """Returns whether a run's recorded values are this file's, not an earlier version's."""
        for name, distribution in self.space.items():
            choices = getattr(distribution, "choices", None)
            if name not in values or (choices is not None and values[name] not in choices):
                return False
        return True

    def write(self) -> int:
        """Writes the table of all (or all drawn) runs.

        Returns the exit code, 1 if a run has failed.
        """
        runs: Iterable[Run] = self.runs.values()
        if not runs and storage.is_dir(self.out):
            found = (
                _notes(os.path.join(self.out, name)).get("values")
                for name in storage.names(self.out)
            )
            runs = [
                self.run(values)
                for values in found
                if isinstance(values, dict) and self._has(values)
            ]
        rows = [run.row(self.names) for run in runs]
        _write_table(self.names, rows, self.out)
        return int(any(row["state"].startswith("failed") for row in rows))


def safe_name(given: Any, parts: Sequence[str]) -> str:
    """Returns the name of a run and of its directory.

    It consists of the name that the run's entry has, if any, and of what differs.

    A long name is cut, and ends in a digest of the whole. `sweep.json` in the directory has the
    values. Raises `UserError` for a name that could lead out of the sweep's directory, or hide
    there, or be one of its files.
    """
    text = str(given or "")
    require(
        not text.startswith(".") and "/" not in text and "\\" not in text,
        "the name of a run must not begin with a dot or contain a slash, because it names a "
        f"directory in --out, got {text!r}",
    )
    name = "+".join([*filter(None, [text]), *parts])
    name = re.sub(r"[^\w.,=+-]+", "_", name) or "base"
    require(
        name not in _OWN_FILES,
        f"the name of a run must not be one of {', '.join(_OWN_FILES)}, got {name!r}",
    )
    data = name.encode()
    if len(data) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(data).hexdigest()[:_DIGEST_LETTERS]
    # The cut may be inside of a letter.
    kept = data[: MAX_NAME_BYTES - _DIGEST_LETTERS - 1].decode(errors="ignore")
    return f"{kept}-{digest}"


def _check_number(values: Mapping[str, int], samples: int, *, online: bool) -> None:
    """Raises `UserError` if a sweep has too many runs.

    `values` is the number of values of each setting.
    """
    combinations = math.prod(values.values())
    # With a sampler the ends of the ranges are checked for each combination, and `samples` runs are
    # trained.
    count = max(samples, combinations) if online else samples * combinations
    numbers = [f"{count:,} of {name}" for name, count in values.items()]
    if samples > 1:
        numbers.append(f"{samples:,} samples")
    require(
        count <= MAX_RUNS,
        f"a sweep must have at most {MAX_RUNS:,} runs, got {count:,} ({' x '.join(numbers)}). "
        "List fewer values, or draw them with [random].",
    )


def _refuse_equal(runs: Iterable[Run]) -> None:
    """Raises `UserError` if two runs have the same settings."""
    found: dict[ExperimentConfig, str] = {}
    for run in runs:
        other = found.setdefault(run.config, run.name)
        require(
            other == run.name, f"{other} and {run.name} have the same settings. Remove one of them."
        )


def _content(path: Path) -> dict[str, Any]:
    missing = f"cannot read {path} (%s). Pass the path of a TOML file."
    invalid = f"{path} is not valid TOML: %s"
    with (
        rephrased(missing, OSError),
        rephrased(invalid, tomllib.TOMLDecodeError, UnicodeDecodeError),
    ):
        content = tomllib.loads(storage.read_text(path))
    for key, value in content.items():
        near = config_tree.did_you_mean(key, _KEYS)
        require(
            key in _KEYS, f"the keys of {path} must be of {', '.join(_KEYS)}, got {key!r}{near}"
        )
        fits = key in _KEYS[:2] or isinstance(value, list if key == "runs" else dict)
        require(fits, f"{key} must be a table [{key}] with one flag per line, got {value!r}")
    nothing = f"{path} must have a grid, random ranges or runs"
    require(
        any(map(content.get, _KEYS[5:])),
        f"{nothing}. For a single run use python -m experiments.PROGRAM.",
    )
    program = content.get("program")
    near = config_tree.did_you_mean(str(program), _PROGRAMS)
    require(
        program in _PROGRAMS,
        f"program must be one of {', '.join(_PROGRAMS)}, got {program!r}{near}",
    )
    return content


def _entries(given: list[Any]) -> dict[str, dict[str, Any]]:
    """Returns the entries of [[runs]] by name, or else by their settings."""
    found: dict[str, dict[str, Any]] = {}
    for entry in given:
        require(
            isinstance(entry, dict),
            f"each run must be a table [[runs]] with one flag per line, got {entry!r}",
        )
        flat = _flat(entry)
        name = str(flat.get("name") or " ".join(_as_flags(flat)) or "base")
        require(name not in found, f"two runs are named {name}. Give them different names.")
        found[name] = flat
    return found


def _grid(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of each setting of the grid by their texts."""
    for name, values in flat.items():
        wanted = f"grid.{name} must be a list of values to try"
        require(
            isinstance(values, list) and values,
            f"{wanted}, got {values!r}. Move a single value to [base].",
        )
    return {name: {_as_text(value): value for value in values} for name, values in flat.items()}


def _random(table: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Returns the ranges of [random], the number of samples and the seed."""
    samples, seed = table.get("samples", 1), table.get("seed", 0)
    for name, value, least in (("samples", samples, 1), ("seed", seed, 0)):
        wanted = f"random.{name} must be a whole number of at least {least}"
        require(
            type(value) is int and value >= least,
            f"{wanted}, got {value!r}. Seeds of the runs go into [grid].",
        )
    whole = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.type.kind is int}
    found: dict[str, Any] = {}
    for full, ends in _flat(
        {name: value for name, value in table.items() if name not in ("samples", "seed")}
    ).items():
        name, _, kind = full.rpartition(".")
        wrong = (
            f"random.{full} must be one range per setting, the lower number first, "
            f"{_RANGE}, got {ends!r}"
        )
        require(
            kind in ("log", "uniform") and name and name not in found and isinstance(ends, list),
            wrong,
        )
        of: Any = IntDistribution if name in whole else FloatDistribution
        with rephrased(f"{wrong} (%s)", TypeError, ValueError):
            found[name] = of(*ends, log=kind == "log")
    require(found or not table, f"random has no range to draw from. Add {_RANGE}.")
    return found, samples, seed


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens TOML tables: `model.n_layer = 4` is a table there, and a dotted name here."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= (
            _flat(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {f"{prefix}{name}": value}
        )
    return flat


def _as_flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={_as_text(value)}" for name, value in values.items()]


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return config_tree.format_value([_as_text(entry) for entry in value])
    return str(value)


def _notes(folder: str) -> dict[str, Any]:
    try:
        notes = json.loads(storage.read(os.path.join(folder, _NOTES)))
        return notes if isinstance(notes, dict) else {}
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # Without it the table lacks a number; no run needs it.
        return {}


def config_of(
    program: str, arguments: list[str], recorded: ExperimentConfig | None = None
) -> ExperimentConfig:
    """Returns the config that the program would make of these arguments.

    The record in the workdir is taken into account. Raises `UserError` if the program would reject
    them.
    """
    defaults: ExperimentConfig = importlib.import_module(f"experiments.{program}").DEFAULTS
    # Flags that are not settings.
    without = () if program == "quickstart" else ("data_dir", "cache_dir")
    config = config_of_words(defaults, [program, *arguments], without=without, recorded=recorded)
    check_program(defaults, config)
    return config


def _write_table(names: Sequence[str], rows: Sequence[dict[str, Any]], out: str | None) -> None:
    """Prints the table and the means over seeds.

    If `out` is passed, they are also written to results.csv and means.csv there.
    """
    print("", *run_tables.markdown(names, rows), "", sep="\n")
    if out is None:
        return
    storage.make_folder(out)
    columns = ["run", *names, *run_tables.MEASURED, "state"]
    averages = run_tables.means(names, rows)
    for name, header, content in (
        ("results", columns, rows),
        ("means", run_tables.mean_columns(names), averages),
    ):
        if content:
            path = os.path.join(out, f"{name}.csv")
            storage.write(path, run_tables.csv_file(header, content))
            print(f"{name:<10}{path}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Runs the sweep and returns the exit code.

    The exit code is 0, 1 (a run failed), 2 (usage), 75 (no database), 141 or 128 + signal.
    """
    output.prepare()
    given = _parsed(argv[1:])
    remote.shorten_storage_logs()
    try:
        return _run(given)
    except study.UNREACHABLE as error:
        advice = "Check --storage, and rerun the same command"
        print(
            f"error: the database of the study is unreachable ({study.reason(error)}). {advice}.",
            file=sys.stderr,
        )
        return os.EX_TEMPFAIL
    except OSError as error:
        print(f"error: {one_line(describe_system_error(error))}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    files, out = given.files, given.out
    if given.table and files and not files[0].endswith(".toml"):
        found = run_tables.read_runs(files)
        names = run_tables.swept_settings(found)
        _write_table(
            names, [run.row(names) for run in found], storage.as_path(out) if out else None
        )
        return output.exit_code()
    require(
        len(files) == 1,
        f"one file must be passed, such as sweep.toml, got {' '.join(files) or 'none'}",
    )
    require(given.jobs > 0, f"--jobs must be at least 1, got {given.jobs}")
    require(out, "--out is required: the directory of the runs. Pass --out=PATH.")
    wrong = f"--storage=postgresql://USER@HOST/DATABASE is required for a bucket, got --out={out}"
    require(given.table or given.dry_run or given.storage or not storage.is_remote(out), wrong)
    commands = _sky(given) if given.print else []
    sweep = Sweep(Path(files[0]), storage.as_path(out))
    if given.table:
        return sweep.write() or output.exit_code()
    if given.print or given.dry_run:
        commands = commands or [run.command for run in sweep.runs.values() if run.results is None]
        print(*map(shlex.join, commands), sep="\n")
        return output.exit_code()
    storage.make_folder(sweep.out)
    place = study.database(given.storage) if given.storage else study.database_in(sweep.out)
    worker = study.Worker(sweep, place, given.gpus or [None] * given.jobs)
    worker.run()
    code = sweep.write()
    print(*worker.report(), sep="\n", flush=True)
    return 128 + worker.signal_number if worker.signal_number else code


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "launch.sweep", description=__doc__, formatter_class=how, allow_abbrev=False
    )
    add = parser.add_argument
    add("files", nargs="*", help="the sweep file, or with --table directories of runs")
    add("--out", help="directory or bucket for runs and tables, created if missing")
    several = (
        "for multiple machines postgresql://USER@HOST/DATABASE, with the password in PGPASSWORD"
    )
    add("--storage", help=f"database of the study (default: sqlite:///OUT/study.db), {several}")
    add("--jobs", type=int, metavar="N", default=1, help="runs at a time")
    add(
        "--gpus",
        type=lambda text: text.split(","),
        help="GPUs to use, such as 0,1, with one run at a time on each",
    )
    add("--table", action="store_true", help="only print the table of results")
    add("--dry_run", action="store_true", help="only print the commands of the unfinished runs")
    add(
        "--print",
        choices=["sky"],
        help="only print commands that start --jobs workers as managed jobs of SkyPilot",
    )
    return parser.parse_args(words)


def _sky(given: argparse.Namespace) -> list[Sequence[str]]:
    """Returns a command for each managed job: a worker of the study on a separate machine."""
    shared = storage.is_remote(given.out) and given.storage and study.database(given.storage).host
    require(
        shared,
        "SkyPilot jobs share a bucket and a database. Set "
        "--out=gs://BUCKET/DIRECTORY and --storage.",
    )
    run = [
        "python",
        "-m",
        "launch.sweep",
        *given.files,
        f"--out={given.out}",
        f"--storage={given.storage}",
    ]
    # Not its value.
    more = [f"--env=RUN={shlex.join(run)}"] + ["--secret=PGPASSWORD"] * ("PGPASSWORD" in os.environ)
    start = ["sky", "jobs", "launch", "launch/sky.yaml", "--yes", "--detach-run", *more]
    name = os.path.basename(given.out.rstrip("/"))
    return [[*start, f"--name={name}-{number}"] for number in range(1, given.jobs + 1)]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
