"""Reads runs for a report: settings, records, results and samples of each, an ensemble's members one by one."""

import dataclasses
import fnmatch
import json
import math
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.config import COMPAT_PRESETS, CorpusName, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.published import CORPORA, default_data, program_of
from txl_jax.errors import UserError
from txl_jax.metrics import Measure, Totals
from txl_jax.runs.run import Run, by_name, holds_run
from txl_jax.runs.validation import RESULTS
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.storage import as_path, is_dir, names, read

Point = tuple[int, float]  # Updates done, and a value.
_LONGEST_SAMPLE = 4000  # Characters of a sample that are shown.


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """One run, or one member of an ensemble, as its folder has it.

    Attributes:
      name: its folder's name and member, or as much of the path as makes it unlike the other runs'.
      path: the workdir.
      member: the name of the member; None: a run by itself.
      config: its settings.
      corpus: the name of its text in a title, such as "Penn Treebank".
      text: what was read.
      folders: the folders that the text was read from, as flags.
      measure: in which its losses are reported.
      records: those of metrics.jsonl that are about it.
      results: "best_valid" and "test", with the facts about them; None: training has not ended.
      samples: generated texts, by the file's name.
    """

    name: str
    path: str
    member: str | None
    config: ExperimentConfig
    corpus: str
    text: str
    folders: tuple[str, ...]
    measure: Measure
    records: Sequence[Mapping[str, Any]]
    results: Mapping[str, Any] | None
    samples: Mapping[str, str]

    def curve(self, kind: str, field: str) -> list[Point]:
        """Returns the finite values of a field of the records of a kind, at their updates."""
        found = [
            (int(record["step"]), float(record[field]))
            for record in self.records
            if record["kind"] == kind and field in record
        ]
        return [point for point in found if math.isfinite(point[1])]

    def scores(self, kind: str) -> list[Point]:
        """Returns the measure of the records of a kind ("train", "valid", "test")."""
        return self.curve(kind, {Measure.BPC: "bpc", Measure.PPL: "perplexity"}[self.measure])

    @property
    def last_step(self) -> int:
        """Updates done, as far as they were recorded."""
        return max((int(record["step"]) for record in self.records), default=0)

    @property
    def best_valid(self) -> Point | None:
        """The lowest validation score and its update."""
        return min(self.scores("valid"), key=lambda point: point[1], default=None)

    @property
    def test(self) -> float | None:
        """The test score of the best parameters; None: training has not ended."""
        found = (self.results or {}).get("test")
        return Totals(float(found["loss"]), 1).value(self.measure) if found else None

    @property
    def state(self) -> str:
        """The state: finished, or how far it is."""
        if self.results is not None:
            return "finished"
        return f"{self.last_step:,} of {self.config.train.steps:,} updates"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update."""
        return self.config.train.batch_size * self.config.train.new_tokens

    @property
    def training_seconds(self) -> float:
        """Time of all updates by their recorded rates, without evaluation and start."""
        rates = self.curve("train", "tokens_per_second")
        before = [0, *(step for step, _ in rates)]
        return sum(
            (step - since) * self.tokens_per_step / rate for since, (step, rate) in zip(before, rates, strict=False)
        )

    def median(self, field: str) -> float | None:
        """Returns the median of a field of the train records; None: they have no such field."""
        values = [value for _, value in self.curve("train", field)]
        return statistics.median(values) if values else None

    @property
    def command(self) -> str:
        """A command with the same settings: flags where they differ from the program's defaults."""
        return shlex.join(self.command_words())

    def command_words(self) -> list[str]:
        """Returns the words of `command`."""
        corpus = self.config.data.corpus
        program = "ensemble" if self.member else program_of(corpus)
        words = ["python", "-m", f"experiments.{program}", *_flags(self.config)]
        words += [f"--ensemble_member={self.member}"] if self.member else []
        return [*words, *self.folders, f"--workdir={self.path}"]


def read_runs(paths: Sequence[str]) -> list[RunRecords]:
    """Reads the runs in folders: workdirs, or folders of workdirs as a sweep's.

    Raises:
      UserError: a folder holds no run, or one that cannot be read.
    """
    folders = list(dict.fromkeys(folder for path in paths for folder in workdirs_in(path)))
    runs = [run for folder in folders for run in _read(folder)]
    names = _names(runs)
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def workdirs_in(path: str) -> list[str]:
    """Returns the workdir itself, or those directly below a folder, by name.

    Raises:
      UserError: neither the folder nor one below it holds a run.
    """
    folder = as_path(path)
    if holds_run(folder):
        return [folder]
    below = [os.path.join(folder, name) for name in names(folder)] if is_dir(folder) else []
    if not (found := [each for each in below if holds_run(each)]):
        what = "no folder" if not is_dir(folder) else "a folder without a run (no config.json in it or right below)"
        raise UserError(f"{path} is {what}; give the --workdir of a run, or the --out of a sweep")
    return found


def swept_settings(runs: Sequence[RunRecords], *, all_settings: bool = False) -> list[str]:
    """Returns the names of the settings in which runs differ, in the order of the config.

    Args:
      runs: at least one.
      all_settings: also those that change no number but by rounding, such as the mesh and the intervals of logging.
    """
    first, *others = [run.config for run in runs]
    found = {leaf.name: leaf for other in others for leaf, _, _ in config_tree.differences(first, other)}
    names = [leaf.name for leaf in config_tree.leaves() if all_settings or not leaf.setting.free_on_resume]
    return [name for name in names if name in found]


def _read(folder: str) -> list[RunRecords]:
    record, records = Run.read_all(folder), read_metrics(folder)
    members = by_name(record.members)
    found = _json(os.path.join(folder, RESULTS))
    runs = []
    for member in members or [None]:
        config = config_tree.replace(record.config, dict(members[member])) if member else record.config
        scores = found.get("members", {}).get(member) if found and member else found
        runs.append(
            RunRecords(
                name="",
                path=folder,
                member=member,
                config=config,
                corpus=_title(config.data.corpus),
                text=record.text.description,
                folders=_folder_flags(record),
                measure=record.text.vocabulary.measure,
                records=[each for each in records if each.get("member") == member],
                results=found | scores if found and scores else None,
                samples=_samples(os.path.join(folder, "members", member) if member else folder),
            )
        )
    return runs


def _json(path: str) -> dict[str, Any] | None:
    """The content of a file; None: there is none, or it is damaged, and training makes it again."""
    try:
        content = json.loads(read(path))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _samples(folder: str) -> dict[str, str]:
    found = names(folder) if is_dir(folder) else []
    found = sorted(
        (name for name in found if fnmatch.fnmatchcase(name, "sample-seed*.txt")), key=lambda name: (len(name), name)
    )
    texts = {name: read(os.path.join(folder, name)).decode(errors="replace").strip("\n") for name in found}
    return {name: text[:_LONGEST_SAMPLE] + ("…" if len(text) > _LONGEST_SAMPLE else "") for name, text in texts.items()}


def _title(corpus: CorpusName) -> str:
    return CORPORA[corpus].title if corpus in CORPORA else {CorpusName.TEXT: "own text"}.get(corpus, str(corpus))


def _folder_flags(record: Run) -> tuple[str, ...]:
    if record.config.data.corpus is CorpusName.PYTHON_STDLIB:
        return ()
    folders = {"data_dir": record.text.data_dir, "cache_dir": record.text.cache_dir}
    return tuple(f"--{name}={folder}" for name, folder in folders.items() if folder)


def _flags(config: ExperimentConfig) -> list[str]:
    """Flags that make this config of the defaults of its corpus's program."""
    defaults = ExperimentConfig(data=default_data(config.data.corpus))
    flags = [] if program_of(config.data.corpus) == str(config.data.corpus) else [f"--data.corpus={config.data.corpus}"]
    bases = {f"--compat={name}": config_tree.apply_preset(defaults, name) for name in COMPAT_PRESETS}
    for flag, base in bases.items():  # Settings without a flag are set by presets, else in Python alone.
        if _without_flag(defaults, config) and not _without_flag(base, config):
            return [flag, *flags, *_changed(base, config)]
    return [*flags, *_changed(defaults, config)]


def _without_flag(base: ExperimentConfig, config: ExperimentConfig) -> bool:
    return any(not leaf.setting.flag for leaf, _, _ in config_tree.differences(base, config))


def _changed(base: ExperimentConfig, config: ExperimentConfig) -> list[str]:
    found = config_tree.differences(base, config)
    return [f"--{leaf.name}={config_tree.format_value(new)}" for leaf, _, new in found if leaf.setting.flag]


def _names(runs: Sequence[RunRecords]) -> list[str]:
    """A short name for each run: the member alone if there is one folder, the path where folders' names are alike."""
    paths = list(dict.fromkeys(run.path for run in runs))
    last = [Path(path).name for path in paths]
    short = {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}
    if len(paths) == 1:
        return [run.member or short[run.path] for run in runs]
    return [short[run.path] + (f": {run.member}" if run.member else "") for run in runs]
