"""The file of a sweep: from TOML to commands, each checked before the first is started."""

import dataclasses
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import enwik8, lm1b, ptb, quickstart, text, text8, wikitext103
from experiments.cli import flag_tree, runner
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.jobs import train
from txl_jax.jobs.workdir import Workdir

_DEFAULTS = {
    module.__name__.rpartition(".")[2]: module.DEFAULTS
    for module in (enwik8, text8, wikitext103, lm1b, ptb, text, quickstart)
}
_KEYS = ("program", "flagfile", "base", "grid", "runs")
_FOLDERS = ("data_dir", "cache_dir")  # Flags of the programs that are no settings.


class Mistake(ValueError):
    """Something in the file or on the command line that its writer can mend; one sentence."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep."""

    name: str
    folder: Path
    differs: Mapping[str, Any]  # What sets it apart, by the flag's name.
    command: tuple[str, ...]
    config: ExperimentConfig

    @property
    def workdir(self) -> Workdir:
        return Workdir(self.folder.resolve())

    @property
    def results(self) -> dict[str, Any] | None:
        """What results.json holds; None: the run has not finished with these very settings, or the file is damaged."""
        path = self.folder / "results.json"
        if not path.exists() or self.workdir.load()[0] != self.config:
            return None
        try:
            results = json.loads(path.read_text())
            same = train.with_defaults(results["eval"]) == config_tree.to_dict(self.config.eval)
            # Those of fewer steps stay until a run that was given more has ended; one without patience ends at its last.
            ended = results["steps"] == self.config.train.steps or self.config.train.patience is not None
        except (ValueError, KeyError, TypeError):
            return None
        return results if same and ended else None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a file asks for."""

    program: str
    runs: tuple[Run, ...]
    names: tuple[str, ...]  # Of the flags in which runs differ, in the order of the file.

    @property
    def unfinished(self) -> list[Run]:
        return [run for run in self.runs if run.results is None]


def read(path: Path, out: Path) -> Sweep:
    """Reads a file, and checks every run of it as its program would.

    Raises:
      Mistake: anything that would fail, or do twice what was meant to differ.
    """
    content = _content(path)
    program = content.get("program")
    if program not in _DEFAULTS:
        near = config_tree.did_you_mean(str(program), _DEFAULTS)
        raise Mistake(f"program is {program!r}{near}; it may be {', '.join(_DEFAULTS)}")
    common = [f"--flagfile={name}" for name in _flagfiles(content)]
    common += _as_flags(_flat(content.get("base", {})))
    points = list(_points(content))
    names = list(dict.fromkeys(name for point in points for name in point.differs))
    runs = [_run(program, common, point, names, out) for point in points]
    _check_apart(runs)
    return Sweep(program, tuple(runs), tuple(names))


@dataclasses.dataclass(frozen=True)
class _Point:
    """An entry of runs, with a point of the grid."""

    name: str | None  # The entry's, if it was given one.
    entry: dict[str, Any]
    grid: dict[str, Any]

    @property
    def differs(self) -> dict[str, Any]:
        return self.entry | self.grid


def _content(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise Mistake(f"cannot read {path} ({error.strerror}); give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"{path} is no TOML: {error}") from None
    for key in content:
        if key not in _KEYS:
            near = config_tree.did_you_mean(key, _KEYS)
            raise Mistake(f"{path} has {key!r}, which is not known{near}; it may have {', '.join(_KEYS)}")
    if not content.get("grid") and not content.get("runs"):
        raise Mistake(f"{path} has neither a grid nor runs; for one run start python -m experiments.PROGRAM itself")
    for key, kind, example in (("base", dict, "[base]"), ("grid", dict, "[grid]"), ("runs", list, "[[runs]]")):
        if not isinstance(content.get(key, kind()), kind):
            raise Mistake(f"{key} is {content[key]!r}; write it as {example}, with a flag on each line")
    return content


def _flagfiles(content: dict[str, Any]) -> list[str]:
    given = content.get("flagfile", [])
    return [given] if isinstance(given, str) else list(given)


def _points(content: dict[str, Any]) -> Iterator[_Point]:
    """Every entry of runs with every point of the grid."""
    grid = _flat(content.get("grid", {}))
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise Mistake(f"grid has {name} = {values!r}; give a list of the values to try, or move it to [base]")
    for entry in content.get("runs", [{}]):
        if not isinstance(entry, dict):
            raise Mistake(f"runs has {entry!r}; write each run as [[runs]], with a flag on each line")
        flat = _flat(entry)
        name = flat.pop("name", None)
        if twice := sorted(flat.keys() & grid.keys()):
            raise Mistake(
                f"{', '.join(twice)} stands in the grid and in runs, and a run has one value; take it out of one"
            )
        for values in itertools.product(*grid.values()):
            yield _Point(name, flat, dict(zip(grid, values, strict=True)))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`model.n_layer = 4` is a table in TOML; here it is a name again."""
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _as_flags(values: dict[str, Any]) -> list[str]:
    return [f"--{name}={_as_text(value)}" for name, value in values.items()]


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_as_text, value)) if isinstance(value, list) else str(value)


def _run(program: str, common: list[str], point: _Point, names: list[str], out: Path) -> Run:
    name = _name(point, names)
    words, folder = [*common, *_as_flags(point.differs)], out / name
    try:
        config = _config(program, words)
        Workdir(folder.resolve()).check_same_settings(config)
    except ValueError as error:
        raise Mistake(f"{name}: {error}") from None
    command = (sys.executable, "-m", f"experiments.{program}", *words, f"--workdir={folder}")
    return Run(name, folder, point.differs, command, config)


def _name(point: _Point, names: list[str]) -> str:
    """Also its folder's: "seed=1+dropout=0.3", with the whole name of a flag where two end alike."""
    lasts = [name.rpartition(".")[2] for name in names]
    short = {name: last if lasts.count(last) == 1 else name for name, last in zip(names, lasts, strict=True)}

    def told(values: dict[str, Any]) -> list[str]:
        return [f"{short[name]}={_as_text(value)}" for name, value in values.items()]

    parts = [*(told(point.entry) if point.name is None else [point.name]), *told(point.grid)]
    return re.sub(r"[^\w.,=+-]+", "_", "+".join(parts)) or "base"


def _config(program: str, words: list[str]) -> ExperimentConfig:
    """What the program would make of these words, without starting it; raises `ValueError` as it would."""
    parsed = flags.FlagValues()
    flag_tree.define(_DEFAULTS[program], parsed)
    for name in _FOLDERS if program != "quickstart" else ():
        flags.DEFINE_string(name, None, "", flag_values=parsed)
    flag_tree.parse([program, *words], parsed)
    config = runner.with_absolute_paths(flag_tree.build(_DEFAULTS[program], parsed))
    config.validate()
    runner.check_program(_DEFAULTS[program], config)
    return config


def _check_apart(runs: list[Run]) -> None:
    """Raises `Mistake` for two runs with one name or one meaning."""
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if run.name == other.name:
                raise Mistake(f"two runs are called {run.name}; give each a name of its own")
            if run.config == other.config:
                raise Mistake(f"{other.name} and {run.name} have the same settings; one of them would be run twice")
