"""A small run of 24 updates, and a workdir in which it has finished."""

import shutil

import numpy as np
import pytest

from txl_jax.config import (
    CorpusName,
    DataConfig,
    DropoutConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs import train
from txl_jax.jobs.workdir import Workdir


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """3,000 bytes; an epoch of the config below is 37 steps."""
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = np.random.default_rng(0).choice(["one", "two", "three", "four"], 800)
    path.write_bytes(" ".join(words).encode()[:3000])
    return path


@pytest.fixture(scope="module")
def config(text_file):
    return ExperimentConfig(
        model=ModelConfig(n_layer=2, d_model=12, n_head=3, d_head=5, d_inner=14, dropout=DropoutConfig(rate=0.1)),
        data=DataConfig(corpus=CorpusName.TEXT, file=str(text_file)),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=4),
        train=TrainConfig(
            steps=24,
            batch_size=8,
            segment_len=9,
            mem_len=7,
            segments_per_call=2,
            log_every=4,
            eval_every=8,
            checkpoint_every=6,
        ),
        eval=EvalConfig(batch_size=2, segment_len=11, mem_len=13, clamp_len=None, segments_per_call=3),
    )


@pytest.fixture(scope="module")
def corpus(text_file):
    return read_corpus(DataConfig(corpus=CorpusName.TEXT, file=str(text_file)), "nowhere", str(text_file.parent))


@pytest.fixture(scope="module")
def run_once(config, corpus, tmp_path_factory):
    """(workdir, outcome) of the run, which no test changes."""
    workdir = Workdir(tmp_path_factory.mktemp("once") / "whole")
    return workdir, train.run(config, corpus, workdir)


@pytest.fixture
def finished(run_once, tmp_path):
    """(workdir, outcome) of a copy that a test may change."""
    workdir, outcome = run_once
    shutil.copytree(workdir.path, tmp_path / "whole")
    return Workdir(tmp_path / "whole"), outcome
