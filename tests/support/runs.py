"""Runs as programs make them (opened, trained, stopped, recorded), and the records that do not
depend on the clock.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import Corpus
from txl_jax.runs.build import build_for
from txl_jax.runs.run import Run, TextInfo
from txl_jax.runs.trained import load_state
from txl_jax.runs.trainer import Outcome, train_run
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.sinks import MEASURED
from txl_jax.training.step import TrainState


def train(config: ExperimentConfig, corpus: Corpus, run: Any, **options: Any) -> Outcome:
    """Trains in a directory, or in the directory of a `Run`."""
    with Run.open(_path(run)) as opened:
        return train_run(config, corpus, opened, **options)


def record(path: Any, config: ExperimentConfig, text: TextInfo | Corpus, members: Any = ()) -> Run:
    """Records a run in a directory, without training it, and reads it back."""
    with Run.open(path) as run:
        run.record_start(config, text, members=members)
    return Run.read_all(path)


def state_of(run: Any) -> tuple[int, TrainState, dict[str, Any]]:
    """Step, state and notes of a run's latest checkpoint.

    `run` is a directory, or a `Run` or its ensemble member.
    """
    run = Run.read(_path(run), member=getattr(run, "member", None))
    return load_state(build_for(run.config, run.text.vocabulary), run, log=print)


def stop_after(calls: int) -> Callable[[], bool]:
    """Requests a stop from the `calls`-th question on."""
    questions = itertools.count(1)
    return lambda: next(questions) >= calls


def numbers(run):
    """Returns the records of a run in order, without measured times and rates."""
    records = []
    for record in read_metrics(_path(run)):
        for name in ("time", *MEASURED):
            record.pop(name, None)
        records.append(record)
    return records


def log_lines(path):
    """Returns the lines of a log.txt, or of its bytes, without date and time."""
    content = path if isinstance(path, bytes) else Path(path).read_bytes()
    lines = []
    for line in content.decode().splitlines():
        match = re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)", line)
        assert match, f"a line without date and time: {line}"
        lines.append(match[1])
    return lines


def _path(run: Any) -> Any:
    return getattr(run, "path", run)
