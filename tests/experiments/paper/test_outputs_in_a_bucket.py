"""Tests studies of runs in a bucket: what they write there is what they write on a disk."""

import io

import numpy as np
import pytest

from experiments.paper import attention, context_length, continuation, recl
from txl_jax import plots
from txl_jax.config import tree as config_tree
from txl_jax.runtime import storage as files


@pytest.fixture(scope="module")
def run(make_run, module_bucket, tmp_path_factory):
    """(config, corpus, workdir) of a run whose workdir is in the bucket."""
    return make_run(module_bucket, text_folder=tmp_path_factory.mktemp("text"))


def names(folder):
    return set(files.names(folder))


@pytest.fixture(autouse=True)
def without_plots(monkeypatch):
    """Drawing is dear, and `test_plots` has a plot in a bucket."""
    monkeypatch.setattr(plots, "can_draw", lambda: False)


@pytest.mark.full
def test_studies_of_one_run(run, bucket):
    config, corpus, workdir = run
    context_length.score_lengths(*run, context_length.Plan(lengths=(4,)))
    assert "context_length.csv" in names(workdir.path)
    short = config_tree.replace(config, {"generate.length": 5})
    continuation.write(short, corpus, workdir, continuation.Plan(context=9))
    assert files.read(f"{workdir.path}/continuation.md").decode().count("\n### ") == 3
    plan = attention.Plan(out=str(bucket / "maps"), positions=(20,))
    average = attention.draw(*run, plan)
    assert names(bucket / "maps") == {"attention.npz", "attention.json", "attention.md"}
    with np.load(io.BytesIO((bucket / "maps" / "attention.npz").read_bytes())) as arrays:
        np.testing.assert_allclose(arrays["average"], average, rtol=1e-6)


@pytest.mark.full
def test_a_study_of_a_group_keeps_its_losses(run, bucket, monkeypatch):
    _, corpus, workdir = run
    plan = recl.Plan(workdirs=(str(workdir.path),) * 2, names=("a", "b"), out=str(bucket), lengths=(2, 4, 2), stride=9)
    runs = plan.load_runs()
    assert [(name, each.path) for name, each in runs.items()] == [("a", workdir.path), ("b", workdir.path)]
    found = recl.compare(runs, corpus, plan)
    assert names(bucket) == {"recl.json", "recl.csv", "recl.md", "losses"}
    table = (bucket / "recl.md").read_text()
    monkeypatch.setattr(recl, "context_losses", None)  # Nothing is computed again.
    assert recl.compare(runs, corpus, plan) == found
    assert (bucket / "recl.md").read_text() == table
