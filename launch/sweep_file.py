"""The sweep file: the settings that runs share, those in which they differ, and each run.

docs/launch.md describes the file. `launch.sweep` is the command, and `launch.study` trains the
runs.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import signal
import sys
import time
import tomllib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from txl_jax.cli.precedence import config_of_words
from txl_jax.cli.train_command import check_program
from txl_jax.config import CorpusName, ExperimentConfig, config_tree
from txl_jax.config.config_tree import require
from txl_jax.config.evaluation import is_same_in_training
from txl_jax.data.published import program_of
from txl_jax.errors import LogError, rephrased
from txl_jax.runs import run as run_lib
from txl_jax.runs import run_tables
from txl_jax.runs.run import RESULTS
from txl_jax.runtime import storage
from txl_jax.runtime.checkpoint import find_steps
from txl_jax.runtime.lock import has_locks, is_held
from txl_jax.runtime.log import read_metrics

# Output of a run's processes, in its directory.
LOG = "sweep.log"
# A worker that has not sent a heartbeat for this long is dead.
GRACE_SECONDS = 90
# Database of the study in --out, unless --storage names another one.
DATABASE = "study.db"

_PROGRAMS = list(dict.fromkeys(map(program_of, CorpusName)))
# Keys that have one value, keys of tables, and keys of tables that define the runs.
_PLAIN_KEYS = ("program", "flagfile")
_RUN_KEYS = ("grid", "random", "runs")
_KEYS = (*_PLAIN_KEYS, "base", "sampler", "pruner", *_RUN_KEYS)
# Values of a run, when its last process started, how it ended, and the seconds of all of them.
_NOTES = "sweep.json"
_NOT_STARTED = "not started"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Python reports a signal as a negative code, and a shell in between as 128 + the number.
_STOP_CODES = {
    *(-number for number in _STOP_SIGNALS),
    *(128 + number for number in _STOP_SIGNALS),
}
# Each run has a process and a directory. All runs are checked before the first starts: checking
# this many takes a minute (6.7 ms each).
MAX_RUNS = 10_000
# File systems allow 255, and temporary names next to a directory are longer than its own name.
MAX_NAME_BYTES = 200
# Digits at the end of a shortened name. Two of 10,000 names are equal with a probability of 2e-7.
_DIGEST_LETTERS = 12
# Maximum length that is shown of a failed run's last line of output.
_MAX_REASON_LETTERS = 300
# Files in --out, next to the directories of the runs.
_OWN_FILES = (DATABASE, "results.csv", "means.csv")
_RANGE = "{uniform = [low, high]}, or {log = [low, high]} for a logarithmic range"

optuna.logging.set_verbosity(optuna.logging.ERROR)
# Optuna calls constant_liar, the heartbeat and the importances of a study experimental.
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    folder: str
    # Values in the form of its trial: the entry of [[runs]], texts of the grid, numbers of ranges.
    values: Mapping[str, Any]
    # The settings in which runs differ, by the flag's name.
    differs: Mapping[str, Any]
    command: tuple[str, ...]
    config: ExperimentConfig
    # train.steps in the record of its directory, or None if nothing is recorded yet.
    recorded_steps: int | None = None

    @property
    def checkpoint_step(self) -> int:
        """The step of the checkpoint from which the run resumes, or 0 without one."""
        checkpoints = find_steps(run_lib.Run(self.folder).latest)
        return max((step for step, _ in checkpoints), default=0)

    @property
    def results(self) -> dict[str, Any] | None:
        """Content of results.json, or None.

        None means that the file is corrupted or the run has not finished with these settings.
        """
        try:
            results = dict(storage.read_json(os.path.join(self.folder, RESULTS)))
            is_same = is_same_in_training(results["eval"], self.config.eval)
            # A run whose steps were raised keeps the old results until it ends. With patience it
            # may end early.
            has_ended = (
                results["steps"] == self.config.train.steps
                or self.config.train.patience is not None
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None
        if not is_same or not has_ended:
            return None
        return results

    def note(self, state: str | None = None, seconds: float = 0.0) -> None:
        """Records in sweep.json how the last process ended, and the seconds of all processes.

        `state` is None if the last process has not ended.
        """
        earlier = _notes(self.folder)
        earlier_seconds = earlier.get("seconds", 0.0)
        started = earlier.get("started")
        if state is None:
            # The last process has no end in the notes if its worker was killed.
            earlier_seconds += self._seconds_without_end(earlier)
            started = time.time()
        notes = {
            "values": self.values,
            "seconds": earlier_seconds + seconds,
            "started": started,
            "state": state,
        }
        storage.write_json(os.path.join(self.folder, _NOTES), notes)

    def end(self, code: int, seconds: float, *, pruned: bool) -> str:
        """Records how a process of the run ended: finished, diverged, pruned, stopped or failed.

        Returns it.
        """
        if self.results is not None:
            state = run_tables.state_of(self.results)
        elif code == 0 or code in _STOP_CODES:
            how = "pruned" if pruned else "stopped"
            state = f"{how} after step {self.checkpoint_step}"
        elif code < 0:
            state = f"failed: killed by {signal.Signals(-code).name}"
        else:
            state = f"failed: {self._last_line() or f'exit code {code}'}"
        self.note(state, seconds)
        return state

    def _last_line(self) -> str:
        """Returns the last line of the output, which is the error of a failed process."""
        log = storage.read(os.path.join(self.folder, LOG)).decode(errors="replace")
        return log.strip().split("\n")[-1].strip()[:_MAX_REASON_LETTERS]

    def _seconds_without_end(self, notes: Mapping[str, Any]) -> float:
        """Returns the seconds from the start of a process to the last record of the run.

        They are 0 if the notes say how the process ended, because their seconds include it.
        """
        started = notes.get("started")
        if started is None or notes.get("state") is not None:
            return 0.0
        # If the log cannot be read, the run itself reports it.
        with contextlib.suppress(LogError, ValueError):
            records = read_metrics(self.folder)
            times = [str(record["time"]) for record in records if "time" in record]
            if times:
                last = datetime.datetime.fromisoformat(times[-1]).timestamp()
                return max(0.0, last - started)
        return 0.0

    def _progress(self, notes: Mapping[str, Any], so_far: str) -> str:
        """Returns the state of a run that has not finished.

        `so_far` is the state according to its records.
        """
        # A process that has just started has no records yet.
        details = "" if so_far == _NOT_STARTED else f", {so_far}"
        if is_held(self.folder):
            return f"running{details}"
        noted = notes.get("state")
        # A run that had finished before its settings changed has only the steps of its records.
        if noted and noted not in run_tables.END_STATES:
            return str(noted)
        started = notes.get("started")
        if noted or started is None or not has_locks(self.folder):
            return so_far
        # A process locks its directory some seconds after its start. A dead worker is noticed after
        # the grace period.
        if time.time() - started < GRACE_SECONDS:
            return f"starting{details}"
        return f"interrupted{details}"

    def row(self, names: Sequence[str]) -> dict[str, Any]:
        """Returns the row of results.csv."""
        notes = _notes(self.folder)
        row: dict[str, Any] = {"state": _NOT_STARTED}
        if run_lib.holds_run(self.folder):
            [records] = run_tables.read_runs([self.folder])
            # Results of other settings are not this run's.
            row |= dataclasses.replace(records, results=self.results).row([])
        if self.results is None:
            row["state"] = self._progress(notes, row["state"])
            # A run that stops between two records saves a later step than the last one recorded.
            if "steps" in row:
                row["steps"] = max(row["steps"], self.checkpoint_step)

        # Without the note, the time is still estimated from the recorded rates.
        seconds = notes.get("seconds", 0.0) + self._seconds_without_end(notes)
        if seconds:
            row["seconds"] = round(seconds, 1)

        in_effect = config_tree.to_dict(self.config) | dict(self.differs)
        row["run"] = self.name
        for name in names:
            row[name] = in_effect.get(name, "")
        return row


class Sweep:
    """Content of a sweep file: the settings that runs share, and the values in which they differ.

    Reading the file checks each run the way its command does, and raises `UserError` if a run would
    fail or two are the same. For runs that are sampled while others are trained, it checks the ends
    of the ranges.
    """

    def __init__(self, path: Path, out: str):
        content = _content(path)
        self.out = out
        self.program = content["program"]

        # Settings that all runs share, as flags.
        flagfiles = content.get("flagfile", [])
        if isinstance(flagfiles, str):
            flagfiles = [flagfiles]
        self._common = [f"--flagfile={name}" for name in flagfiles]
        self._common += _as_flags(_flat(content.get("base", {})))

        # Settings that differ between runs.
        self._entries = _entries(content.get("runs") or [{}])
        self._grid = _grid(_flat(content.get("grid", {})))
        ranges, samples, seed = _random(content.get("random", {}))
        names_in_entries = _names_in_entries(self._entries.values())
        _refuse_names_in_two_tables(
            {"the grid": self._grid, "runs": names_in_entries, "random": ranges}
        )

        # Texts of the values that are combined with each other, by setting.
        texts: dict[str, Mapping[str, Any]] = dict(self._grid)
        if len(self._entries) > 1:
            texts = {"runs": self._entries} | texts
        # Values by their names in the study.
        self.space = dict(ranges)
        for name, choices in texts.items():
            self.space[name] = CategoricalDistribution(list(choices))
        self.names = [*names_in_entries, *ranges, *self._grid]  # The settings in which runs differ.

        # Different content means a different study. The directories of runs stay the same.
        text = json.dumps(content, sort_keys=True, default=str)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:8]

        self.sampler: Any = None
        if "sampler" in content:
            self.sampler = make_from_table("sampler", content["sampler"])
        self.pruner: Any = None
        if "pruner" in content:
            self.pruner = make_from_table("pruner", content["pruner"])
        has_sampler = self.sampler is not None
        require(
            ranges or not has_sampler,
            f"[sampler] has no range to draw from in [random]. Add {_RANGE}",
        )

        numbers = {name: len(choices) for name, choices in texts.items()}
        _check_number(numbers, samples, has_sampler=has_sampler)
        runs = self._checked_runs(_points(ranges, samples, seed, has_sampler=has_sampler), texts)

        # Runs by name. A sampler chooses them while others are trained, so none is known yet.
        self.runs: dict[str, SweepRun] = {}
        # Values of the runs that are to be trained, by their places in the queue.
        self.queue: dict[str, Mapping[str, Any]] = {}
        if has_sampler:
            self.queue = {f"draw {number}": {} for number in range(samples)}
        else:
            _refuse_equal(runs.values())
            self.runs = runs
            self.queue = {name: run.values for name, run in runs.items()}

    def _checked_runs(
        self, points: Iterable[Mapping[str, Any]], texts: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, SweepRun]:
        """Makes the run of each point with each combination of texts.

        Returns the runs by name. Raises `UserError` if a run is invalid, or two different ones have
        the same name.
        """
        combinations = [
            dict(zip(texts, values, strict=True)) for values in itertools.product(*texts.values())
        ]
        runs: dict[str, SweepRun] = {}
        for point in points:
            for combination in combinations:
                run = self.run({**point, **combination})
                # Samples may be equal. The first one then stands for both.
                first = runs.setdefault(run.name, run)
                require(
                    first.config == run.config,
                    f"two runs are named {run.name}. Give them different names.",
                )
        return runs

    def run(self, values: Mapping[str, Any]) -> SweepRun:
        """Returns the run with these values. Raises `UserError` if its command rejects them."""
        # Without `runs` in the values, the file has only one entry.
        first_entry = next(iter(self._entries))
        settings = dict(self._entries[values.get("runs", first_entry)])
        entry_name = settings.pop("name", None)
        drawn = self._settings_of(values)

        # The name of an entry stands for the entry's settings.
        in_name = dict(drawn) if entry_name else settings | drawn
        short = self._short_names()
        parts = [f"{short[name]}={_as_text(value)}" for name, value in in_name.items()]
        name = safe_name(entry_name, parts)

        settings |= drawn
        arguments = [*self._common, *_as_flags(settings)]
        folder = os.path.join(self.out, name)
        recorded_steps = None
        with rephrased(f"{name}: %s", ValueError):
            if run_lib.holds_run(folder):
                recorded = run_lib.Run.read(folder)
                config = config_of(self.program, arguments, recorded.config)
                recorded.compare(config)
                recorded_steps = recorded.config.train.steps
            else:
                config = config_of(self.program, arguments)
        module = f"experiments.{self.program}"
        command = (sys.executable, "-m", module, *arguments, f"--workdir={folder}")
        return SweepRun(name, folder, values, settings, command, config, recorded_steps)

    def _settings_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that the grid and the ranges have at these values."""
        settings: dict[str, Any] = {}
        for name, distribution in self.space.items():
            if isinstance(distribution, FloatDistribution):
                # Four digits keep the names of runs short.
                value = float(f"{values[name]:.4g}")
                settings[name] = min(max(value, distribution.low), distribution.high)
            elif name in self._grid:
                settings[name] = self._grid[name][values[name]]
            elif name != "runs":
                settings[name] = values[name]
        return settings

    def _short_names(self) -> dict[str, str]:
        """Returns the names of settings in names of runs, as in "seed=1+dropout.rate=0.3".

        The first group is omitted where the name is unique without it.
        """
        ends = {name: name.partition(".")[2] or name for name in self.names}
        all_ends = list(ends.values())
        short = {}
        for name, end in ends.items():
            is_unique = all_ends.count(end) == 1
            short[name] = end if is_unique else name
        return short

    def _has(self, values: Mapping[str, Any]) -> bool:
        """Returns whether a run's recorded values match this file, not an earlier version of it."""
        for name, distribution in self.space.items():
            if name not in values:
                return False
            choices = getattr(distribution, "choices", None)
            if choices is not None and values[name] not in choices:
                return False
        return True

    def known_runs(self) -> list[SweepRun]:
        """Returns all runs, or with a sampler those that have a directory."""
        if self.runs or not storage.is_dir(self.out):
            return list(self.runs.values())
        runs = []
        for name in storage.names(self.out):
            values = _notes(os.path.join(self.out, name)).get("values")
            if isinstance(values, dict) and self._has(values):
                runs.append(self.run(values))
        return runs


def safe_name(entry_name: Any, parts: Sequence[str]) -> str:
    """Returns the name of a run and of its directory.

    It consists of the name of the run's entry, if any, and of the settings that differ.

    A long name is cut, and ends in a digest of the whole. `sweep.json` in the directory has the
    values. Raises `UserError` for a name that could lead out of the sweep's directory, be a hidden
    file, or be one of the sweep's own files.
    """
    text = str(entry_name or "")
    require(
        not text.startswith(".") and "/" not in text and "\\" not in text,
        "the name of a run must not begin with a dot or contain a slash, because it names a "
        f"directory in --out, got {text!r}",
    )
    pieces = [text, *parts] if text else parts
    name = re.sub(r"[^\w.,=+-]+", "_", "+".join(pieces)) or "base"
    require(
        name not in _OWN_FILES,
        f"the name of a run must not be one of {', '.join(_OWN_FILES)}, got {name!r}",
    )
    data = name.encode()
    if len(data) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(data).hexdigest()[:_DIGEST_LETTERS]
    # The cut may be inside a character.
    beginning = data[: MAX_NAME_BYTES - _DIGEST_LETTERS - 1].decode(errors="ignore")
    return f"{beginning}-{digest}"


def config_of(
    program: str, arguments: list[str], recorded: ExperimentConfig | None = None
) -> ExperimentConfig:
    """Returns the config that the command would build from these arguments.

    The record in the workdir is taken into account. Raises `UserError` if the command would reject
    them.
    """
    defaults: ExperimentConfig = importlib.import_module(f"experiments.{program}").DEFAULTS
    # Flags that are not settings.
    without = () if program == "quickstart" else ("data_dir", "cache_dir")
    config = config_of_words(defaults, [program, *arguments], without=without, recorded=recorded)
    check_program(defaults, config)
    return config


def make_from_table(kind: str, table: Mapping[str, Any]) -> Any:
    """Returns the Optuna sampler or pruner that a table names.

    Args:
      kind: "sampler" or "pruner".
      table: The class as `name`, and its arguments.

    Raises:
      UserError: If Optuna rejects the arguments.
    """
    arguments = dict(table)
    name = arguments.pop("name", None)
    if name == "TPESampler":
        # Without constant_liar it would sample near the runs in progress. With a seed, all workers
        # would sample the same values.
        arguments = {"constant_liar": True, "seed": None} | arguments
    module = getattr(optuna, f"{kind}s")
    with rephrased(
        f"[{kind}] must name a class of optuna.{kind}s (name = ...) and its arguments, got "
        f"{dict(table)} (%s)",
        AttributeError,
        TypeError,
        ValueError,
    ):
        # A sweep file must name one of Optuna's classes, and nothing else that the module happens
        # to contain.
        if name not in module.__all__:
            raise ValueError(f"unknown class {name!r}")
        return getattr(module, name)(**arguments)


def draw_samples(ranges: Mapping[str, Any], samples: int, seed: int) -> list[dict[str, Any]]:
    """Returns random values for each sample. More samples do not change the first ones."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    return [study.ask(dict(ranges)).params for _ in range(samples)]


def _points(
    ranges: Mapping[str, Any], samples: int, seed: int, *, has_sampler: bool
) -> list[dict[str, Any]]:
    """Returns the values of the ranges for which runs are made and checked.

    With a sampler, whose values are not known yet, these are the ends of the ranges.
    """
    if has_sampler:
        lowest = {name: distribution.low for name, distribution in ranges.items()}
        highest = {name: distribution.high for name, distribution in ranges.items()}
        return [lowest, highest]
    if ranges:
        return draw_samples(ranges, samples, seed)
    return [{}]


def _names_in_entries(entries: Iterable[Mapping[str, Any]]) -> dict[str, None]:
    """Returns the settings of all entries of [[runs]] in order, without duplicates."""
    names: dict[str, None] = {}
    for entry in entries:
        names |= dict.fromkeys(entry)
    names.pop("name", None)
    return names


def _refuse_names_in_two_tables(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `UserError` if a setting is in two of the tables."""
    for first, second in itertools.combinations(tables, 2):
        twice = ", ".join(sorted(tables[first].keys() & tables[second].keys()))
        require(
            not twice,
            f"{twice} must be in only one of {first} and {second}, got both. Remove it from one.",
        )


def _check_number(numbers: Mapping[str, int], samples: int, *, has_sampler: bool) -> None:
    """Raises `UserError` if a sweep has too many runs.

    `numbers` contains the number of values of each setting.
    """
    combinations = math.prod(numbers.values())
    if has_sampler:
        # The ends of the ranges are checked for each combination, and `samples` runs are trained.
        count = max(samples, combinations)
    else:
        count = samples * combinations
    factors = [f"{number:,} of {name}" for name, number in numbers.items()]
    if samples > 1:
        factors.append(f"{samples:,} samples")
    require(
        count <= MAX_RUNS,
        f"a sweep must have at most {MAX_RUNS:,} runs, got {count:,} ({' x '.join(factors)}). "
        "List fewer values, or draw them with [random].",
    )


def _refuse_equal(runs: Iterable[SweepRun]) -> None:
    """Raises `UserError` if two runs have the same settings."""
    names: dict[ExperimentConfig, str] = {}
    for run in runs:
        first = names.setdefault(run.config, run.name)
        require(
            first == run.name, f"{first} and {run.name} have the same settings. Remove one of them."
        )


def _content(path: Path) -> dict[str, Any]:
    """Reads a sweep file. Raises `UserError` if it is unreadable, or has unknown keys."""
    missing = f"cannot read {path} (%s). Pass the path of a TOML file."
    invalid = f"{path} is not valid TOML: %s"
    with (
        rephrased(missing, OSError),
        rephrased(invalid, tomllib.TOMLDecodeError, UnicodeDecodeError),
    ):
        content = tomllib.loads(storage.read_text(path))

    for key, value in content.items():
        near_key = config_tree.did_you_mean(key, _KEYS)
        require(
            key in _KEYS, f"the keys of {path} must be of {', '.join(_KEYS)}, got {key!r}{near_key}"
        )
        kind = list if key == "runs" else dict
        require(
            key in _PLAIN_KEYS or isinstance(value, kind),
            f"{key} must be a table [{key}] with one flag per line, got {value!r}",
        )
    require(
        any(content.get(key) for key in _RUN_KEYS),
        f"{path} must have a grid, random ranges or runs. For a single run use "
        "python -m experiments.PROGRAM.",
    )

    program = content.get("program")
    near_program = config_tree.did_you_mean(str(program), _PROGRAMS)
    require(
        program in _PROGRAMS,
        f"program must be one of {', '.join(_PROGRAMS)}, got {program!r}{near_program}",
    )
    return content


def _entries(tables: list[Any]) -> dict[str, dict[str, Any]]:
    """Returns the entries of [[runs]] by name, or else by their settings."""
    entries: dict[str, dict[str, Any]] = {}
    for table in tables:
        require(
            isinstance(table, dict),
            f"each run must be a table [[runs]] with one flag per line, got {table!r}",
        )
        entry = _flat(table)
        name = str(entry.get("name") or " ".join(_as_flags(entry)) or "base")
        require(name not in entries, f"two runs are named {name}. Give them different names.")
        entries[name] = entry
    return entries


def _grid(flat: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the values of each setting of the grid by their texts."""
    grid = {}
    for name, values in flat.items():
        require(
            isinstance(values, list) and values,
            f"grid.{name} must be a list of values to try, got {values!r}. Move a single value to "
            "[base].",
        )
        grid[name] = {_as_text(value): value for value in values}
    return grid


def _random(table: dict[str, Any]) -> tuple[dict[str, Any], int, int]:
    """Returns the ranges of [random], the number of samples and the seed."""
    samples = table.get("samples", 1)
    seed = table.get("seed", 0)
    _require_whole_number("samples", samples, least=1)
    _require_whole_number("seed", seed, least=0)

    # Values of these settings are sampled as whole numbers.
    whole = {leaf.name for leaf in config_tree.leaves(ExperimentConfig) if leaf.type.kind is int}
    tables = {name: value for name, value in table.items() if name not in ("samples", "seed")}
    ranges: dict[str, Any] = {}
    for dotted_name, ends in _flat(tables).items():
        name, _, kind = dotted_name.rpartition(".")
        message = (
            f"random.{dotted_name} must be one range per setting, the lower number first, "
            f"{_RANGE}, got {ends!r}"
        )
        is_range = kind in ("log", "uniform") and isinstance(ends, list)
        require(is_range and name and name not in ranges, message)
        make_range: Any = IntDistribution if name in whole else FloatDistribution
        with rephrased(f"{message} (%s)", TypeError, ValueError):
            ranges[name] = make_range(*ends, log=kind == "log")
    require(ranges or not table, f"random has no range to draw from. Add {_RANGE}.")
    return ranges, samples, seed


def _require_whole_number(name: str, value: Any, *, least: int) -> None:
    """Raises `UserError` unless a value of [random] is a whole number of at least `least`."""
    require(
        type(value) is int and value >= least,
        f"random.{name} must be a whole number of at least {least}, got {value!r}. Seeds of the "
        "runs go into [grid].",
    )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens TOML tables: `model.n_layer = 4` is a table in TOML, and a dotted name here."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
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
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # Without it the table lacks a number. Runs do not need it.
        return {}
    return notes if isinstance(notes, dict) else {}
