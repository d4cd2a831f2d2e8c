"""Tests the evaluation job: what it writes, another text in the run's vocabulary, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from support import drawn_run, runs, tiny_run
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.errors import UserError
from txl_jax.runs.score import Interrupted, evaluate_splits, score


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, corpus, workdir, components) of a run on 1,000 bytes."""
    folder = tmp_path_factory.mktemp("run")
    content = np.random.default_rng(0).integers(256, size=1000).astype(np.uint8).tobytes()
    config, corpus = drawn_run.on_text(folder, content)
    return config, corpus, *drawn_run.make(folder / "run", config, corpus)


def test_both_texts_are_scored_and_written(run):
    config, corpus, workdir, components = run
    lines = []
    results = evaluate_splits(config, corpus, workdir, log=lines.append)
    assert json.loads((Path(workdir.path, "evaluation.json")).read_text()) == results
    assert (results["step"], results["text_sha256"]) == (drawn_run.STEP, corpus.digest)
    params = tiny_run.params(components.model)
    for split in ("valid", "test"):
        expected = score(components, params, getattr(corpus, split), name=split, log=lines.append)
        assert results[split]["loss"] == pytest.approx(expected.nll, rel=1e-6)
        assert results[split]["tokens"] == expected.tokens == len(getattr(corpus, split)) - 1


def test_another_text_is_noted(run):
    config, corpus, workdir, _ = run
    lines, other = [], dataclasses.replace(corpus, digest="0" * 64, description="another text")
    evaluate_splits(config, other, workdir, log=lines.append)
    assert any("another text" in line for line in lines)


def test_an_empty_workdir_and_another_vocabulary_are_refused(run, tmp_path):
    config, corpus, workdir, _ = run
    with pytest.raises(UserError, match="--mode=train"):
        evaluate_splits(config, corpus, runs.record(tmp_path, config, corpus), log=str)
    other = dataclasses.replace(corpus, vocabulary=ByteVocabulary(b"abc"))
    with pytest.raises(UserError, match=r"\b256\b.*\b3\b"):
        evaluate_splits(config, other, workdir, log=str)


def test_a_stop_writes_nothing(run, tmp_path):
    config, corpus, *_ = run
    workdir, _ = drawn_run.make(tmp_path / "run", config, corpus)
    with pytest.raises(Interrupted, match="valid"):
        evaluate_splits(config, corpus, workdir, log=str, stop_requested=lambda: True)
    assert not (Path(workdir.path, "evaluation.json")).exists()
