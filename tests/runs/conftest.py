"""A small run of 24 updates, and a workdir in which it has finished.

Its settings leave nothing empty in a checkpoint that a resumed run could lose unnoticed: the
weights are averaged, the text is rolled, and an epoch ends before the run does.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from support import drawn_run, order, runs, traced_once
from txl_jax.config import (
    AverageConfig,
    DropoutConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    Roll,
    TrainConfig,
)
from txl_jax.runs.run import Run
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.runtime.lock import RunLock
from txl_jax.runtime.log import RunLog


@pytest.fixture(scope="module")
def traces_kept():
    """Runs with the same settings are traced once (`support.traced_once`)."""
    with traced_once.kept():
        yield


@pytest.fixture(scope="session")
def _text(tmp_path_factory):
    """(config, corpus): 2,800 bytes, of which 2,520 are trained on.

    These are 16 rows of 157 targets, in 17 segments of 9: an epoch is 17 steps, so that it ends
    inside a call of two.
    """
    words = np.random.default_rng(0).choice(["one", "two", "three", "four"], 800)
    content = " ".join(words).encode()[:2800]
    return drawn_run.on_text(
        tmp_path_factory.mktemp("text"),
        content,
        model=ModelConfig(
            n_layer=2, d_model=12, n_head=3, d_head=5, d_inner=14, dropout=DropoutConfig(rate=0.1)
        ),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=4),
        train=TrainConfig(
            steps=24,
            batch_size=16,
            segment_len=9,
            mem_len=7,
            segments_per_call=2,
            log_every=4,
            eval_every=8,
            checkpoint_every=6,
        ),
        # Until ten updates are averaged, the weight of each depends on their number, which a
        # resumed run must know.
        average=AverageConfig(start_step=3, ema_decay=0.9),
        data__roll=Roll.ROWS,
        eval=EvalConfig(batch_size=2, segment_len=4, mem_len=13, clamp_len=None),
    )


@pytest.fixture(scope="session")
def config(_text):
    return _text[0]


@pytest.fixture(scope="session")
def corpus(_text):
    return _text[1]


@pytest.fixture(scope="session")
def _recorded(config, corpus, tmp_path_factory):
    """(workdir, outcome, events) of the run; the events are described at `events`."""
    folder = tmp_path_factory.mktemp("once") / "whole"
    with pytest.MonkeyPatch.context() as patch, traced_once.kept():
        events = order.record(patch, folder)
        order.add_calls(patch, events, RunLock, "confirm", lambda lock: ("confirm", ""))
        order.add_calls(patch, events, RunLog, "seal", lambda log: ("seal", ""))
        order.add_calls(patch, events, Checkpointer, "save", _describe_save)
        outcome = runs.train(config, corpus, folder)
    return Run.read(folder), outcome, tuple(events)


def _describe_save(checkpointer, step, *rest):
    """Describes a call as ("save", "latest/6"): the directory's name, and the step."""
    return "save", f"{Path(checkpointer._directory).name}/{step}"


@pytest.fixture(scope="session")
def run_once(_recorded):
    """(workdir, outcome) of the run, which no test changes."""
    return _recorded[:2]


@pytest.fixture(scope="session")
def events(_recorded):
    """What the run did to its files, in order, as `support.order` describes it.

    These calls are among the events: ("confirm", "") of the lock, ("seal", "") of the log, and
    ("save", "latest/6").
    """
    return _recorded[2]


@pytest.fixture
def finished(run_once, tmp_path):
    """(workdir, outcome) of a copy that a test may change."""
    workdir, outcome = run_once
    shutil.copytree(workdir.path, tmp_path / "whole")
    return Run.read(tmp_path / "whole"), outcome
