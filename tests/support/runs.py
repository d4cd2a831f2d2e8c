"""Runs as programs make them: opened, trained, recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.runs import ensemble, generate
from txl_jax.runs import train as train_lib
from txl_jax.runs.run import Run, TextInfo
from txl_jax.runs.trainer import Outcome


def train(config: ExperimentConfig, corpus: Corpus, run: Any, **more: Any) -> Outcome:
    """Trains in a folder, or in that of a `Run`."""
    with Run.open(_path(run)) as opened:
        return train_lib.train_run(config, corpus, opened, **more)


def train_members(
    config: ExperimentConfig, members: Sequence[Mapping[str, float]], corpus: Corpus, run: Any, **more: Any
) -> Outcome:
    """Trains an ensemble in a folder, or in that of a `Run`."""
    with Run.open(_path(run)) as opened:
        return ensemble.train_members(config, members, corpus, opened, **more)


def generate_text(config: ExperimentConfig, run: Any, **more: Any) -> list[bytes]:
    """Generates with the run in a folder, or in that of a `Run`."""
    return generate.generate_text(config, Run.read(_path(run)), **more)


def record(path: Any, config: ExperimentConfig, text: TextInfo | Corpus, members: Any = ()) -> Run:
    """Records a run in a folder, without training it, and reads it back."""
    with Run.open(path) as run:
        run.begin(config, text, members=members)
    return Run.read_all(path)


def _path(run: Any) -> Any:
    return getattr(run, "path", run)
