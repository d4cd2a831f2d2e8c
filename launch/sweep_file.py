"""The file of a sweep: TOML becomes commands, all of which are checked before the first is started."""

import dataclasses
import importlib
import itertools
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch import sweep_draws
from txl_jax.cli.corpus_program import check_program
from txl_jax.cli.program import config_of_words
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.published import program_of
from txl_jax.errors import UserError
from txl_jax.runs import run as run_lib
from txl_jax.runs.run import RESULTS
from txl_jax.runs.validation import with_defaults
from txl_jax.runtime import storage

_DEFAULTS: dict[str, ExperimentConfig] = {
    program: importlib.import_module(f"experiments.{program}").DEFAULTS
    for program in dict.fromkeys(map(program_of, CorpusName))
}
_KEYS = ("program", "flagfile", "base", "grid", "random", "runs")
_FOLDERS = ("data_dir", "cache_dir")  # Flags of the programs that are not settings.


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
        """The content of results.json; None if the run has not finished with these settings, or the file is damaged."""
        path = os.path.join(self.folder, RESULTS)
        if not storage.exists(path) or run_lib.Run.read(self.folder).config != self.config:
            return None
        try:
            results = json.loads(storage.read(path))
            same = with_defaults(results["eval"]) == config_tree.to_dict(self.config.eval)
            # A run that was given more steps keeps the old results until it ends. With patience it may end early.
            ended = results["steps"] == self.config.train.steps or self.config.train.patience is not None
        except (ValueError, KeyError, TypeError):
            return None
        return results if same and ended else None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The runs of a file."""

    program: str
    runs: tuple[Run, ...]
    names: tuple[str, ...]  # The flags in which runs differ, in the order of the file.

    @property
    def unfinished(self) -> list[Run]:
        """The runs without results."""
        return [run for run in self.runs if run.results is None]


def read(path: Path, out: str) -> Sweep:
    """Reads a file and checks every run as its program would.

    Raises:
      UserError: anything in which a run would fail, or two runs that are the same.
    """
    content = _content(path)
    program = content.get("program")
    if program not in _DEFAULTS:
        near = config_tree.did_you_mean(str(program), _DEFAULTS)
        raise UserError(f"program is {program!r}; it may be {', '.join(_DEFAULTS)}{near}")
    common = [f"--flagfile={name}" for name in _flagfiles(content)]
    common += _as_flags(_flat(content.get("base", {})))
    points = list(_points(content))
    names = list(dict.fromkeys(name for point in points for name in point.differs))
    runs = [_run(program, common, point, names, out) for point in points]
    _check_apart(runs)
    return Sweep(program, tuple(runs), tuple(names))


@dataclasses.dataclass(frozen=True)
class _Point:
    """One entry of [[runs]] with one point of the grid, or one sample with one point of the grid."""

    name: str | None  # The entry's own name, if it has one.
    entry: dict[str, Any]
    grid: dict[str, Any]

    @property
    def differs(self) -> dict[str, Any]:
        """All settings of this point."""
        return self.entry | self.grid


def _content(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}); give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from None
    for key in content:
        if key == "halving":
            raise UserError(f"{path} has [halving], which was removed; without it all runs train to the end")
        if key not in _KEYS:
            near = config_tree.did_you_mean(key, _KEYS)
            raise UserError(f"{path} has {key!r}, which is not known; it may have {', '.join(_KEYS)}{near}")
    if not any(content.get(key) for key in ("grid", "random", "runs")):
        raise UserError(
            f"{path} has no grid, no random ranges and no runs; for one run start python -m experiments.PROGRAM itself"
        )
    tables = [(key, dict, f"[{key}]") for key in ("base", "grid", "random")]
    for key, kind, example in (*tables, ("runs", list, "[[runs]]")):
        if not isinstance(content.get(key, kind()), kind):
            raise UserError(f"{key} is {content[key]!r}; write it as {example}, with a flag on each line")
    return content


def _flagfiles(content: dict[str, Any]) -> list[str]:
    given = content.get("flagfile", [])
    return [given] if isinstance(given, str) else list(given)


def _points(content: dict[str, Any]) -> Iterator[_Point]:
    """Every entry of [[runs]] with every sample of [random] and every point of the grid."""
    grid = _flat(content.get("grid", {}))
    samples = sweep_draws.drawn(content["random"], _flat) if content.get("random") else [{}]
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid has {name} = {values!r}; give a list of the values to try, or move it to [base]")
    for entry in content.get("runs", [{}]):
        if not isinstance(entry, dict):
            raise UserError(f"runs has {entry!r}; write each run as [[runs]], with a flag on each line")
        flat = _flat(entry)
        name = flat.pop("name", None)
        _check_once({"the grid": grid, "runs": flat, "random": samples[0]})
        for sample, values in itertools.product(samples, itertools.product(*grid.values())):
            yield _Point(name, flat, sample | dict(zip(grid, values, strict=True)))


def _check_once(tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `UserError` for a setting that is in two tables."""
    for (first, one), (second, other) in itertools.combinations(tables.items(), 2):
        if twice := sorted(one.keys() & other.keys()):
            raise UserError(
                f"{', '.join(twice)} is in {first} and in {second}, and a run has one value; take it out of one"
            )


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
    try:
        config = _config(program, arguments)
        if run_lib.holds_run(folder):
            run_lib.Run.read(folder).compare(config)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None
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


def _config(program: str, arguments: list[str]) -> ExperimentConfig:
    """Returns the config that the program would make of these arguments; raises `UserError` as it would."""
    without = () if program == "quickstart" else _FOLDERS
    config = config_of_words(_DEFAULTS[program], [program, *arguments], without=without)
    check_program(_DEFAULTS[program], config)
    return config


def _check_apart(runs: list[Run]) -> None:
    """Raises `UserError` for two runs with the same name or the same settings."""
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if run.name == other.name:
                raise UserError(f"two runs have the name {run.name}; give each its own")
            if run.config == other.config:
                raise UserError(f"{other.name} and {run.name} have the same settings; remove one of them")
