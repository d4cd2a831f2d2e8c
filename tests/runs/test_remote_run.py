"""Tests a run in a bucket: scored, loaded, converted, and split off."""

import json
import os
from pathlib import Path

import pytest

import txl_jax
from support import drawn_run, runs
from txl_jax.errors import UserError
from txl_jax.interop.portable import is_portable
from txl_jax.runs import score
from txl_jax.runs.convert import convert
from txl_jax.runs.ensemble import split_off
from txl_jax.runs.run import Run
from txl_jax.runtime.storage import read

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """(config, corpus): bytes, of which the validation text has 55."""
    return drawn_run.on_text(tmp_path_factory.mktemp("text"), drawn_run.letters())


@pytest.fixture(scope="module")
def drawn(text, module_bucket, tmp_path_factory):
    """The same run with drawn parameters, in a bucket and on this machine: two workdirs."""
    return [drawn_run.make(place / "run", *text)[0] for place in (module_bucket, tmp_path_factory.mktemp("drawn"))]


def test_scores_are_written_beside_the_run(text, drawn):
    config, corpus = text
    remote, local = drawn
    for workdir in drawn:
        score.evaluate_splits(config, corpus, workdir)
        score.score_tokens(config, corpus, workdir)
    names = {path.name for path in Path(local.path).iterdir() if path.is_file()}
    assert {"evaluation.json", "scores-valid.tsv", "scores-test.tsv"} < names
    for name in names - {".lock", "config.json", "evaluation.json"}:
        assert read(os.path.join(remote.path, name)) == Path(local.path, name).read_bytes(), name
    scores = [json.loads(read(os.path.join(workdir.path, "evaluation.json"))) for workdir in drawn]
    assert scores[0]["valid"] == scores[1]["valid"] and scores[0]["test"] == scores[1]["test"]


def test_a_run_and_its_conversion_are_loaded_from_a_bucket(drawn, bucket, tmp_path):
    remote, local = drawn
    expected = txl_jax.load(local.path).score(["the cat", "a hat"])
    assert txl_jax.load(str(remote.path)).score(["the cat", "a hat"]) == expected
    convert(str(remote.path), str(bucket / "portable"), log=str)
    assert txl_jax.load(str(bucket / "portable")).score(["the cat", "a hat"]) == expected
    convert(str(bucket / "portable"), tmp_path / "back", log=str)
    for name in ("model.safetensors", "vocabulary.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (bucket / "portable" / name).read_bytes()
    with pytest.raises(UserError, match="new or empty"):
        convert(local.path, str(bucket / "portable"), log=str)


def test_a_conversion_that_was_killed_is_no_portable_folder(drawn, bucket, storage):
    storage.refuse("POST", after=2)
    with pytest.raises(UserError, match="cannot write to gs://"):
        convert(drawn[1].path, str(bucket), log=str)
    storage.calm()
    assert sorted(path.name for path in bucket.iterdir()) == ["model.safetensors", "vocabulary.txt"]
    assert not is_portable(bucket)


def test_a_member_of_an_ensemble_is_split_off_in_a_bucket(text, bucket):
    config, corpus = text
    results = runs.train(config, corpus, Run(bucket / "both"), members=[{"seed": 1}, {"seed": 2}]).results
    split_off(bucket / "both", "seed=2", bucket / "second")
    own = json.loads((bucket / "second" / "results.json").read_bytes())
    assert own["test"] == results["members"]["seed=2"]["test"]
    assert txl_jax.load(str(bucket / "second")).step == config.train.steps
