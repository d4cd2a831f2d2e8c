"""Tests studies of runs in a bucket: what they write there is what they write on a disk."""

import numpy as np
import pytest

from support import drawn_run, tiny_run
from txl_jax.config import CorpusName, DataConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs.workdir import TextInfo
from txl_jax.paper import attention_maps, context_length, plots, recl
from txl_jax.paper.recl import TrainedRun


@pytest.fixture(scope="module")
def run(module_bucket, tmp_path_factory):
    """(config, corpus, workdir) of a run with drawn parameters; the workdir is in the bucket."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text").write_bytes(np.random.default_rng(0).choice(list(b"the cat"), 1110).astype(np.uint8).tobytes())
    data = DataConfig(corpus=CorpusName.TEXT, file=str(folder / "text"))
    config = config_tree.replace(tiny_run.CONFIG, {"data": data})
    corpus = read_corpus(data, "nowhere", str(folder))
    workdir, _ = drawn_run.make(module_bucket / "run", config, corpus)
    return config, corpus, workdir


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def without_plots(monkeypatch):
    """Drawing is dear, and `test_plots` has a plot in a bucket."""
    monkeypatch.setattr(plots, "can_draw", lambda: False)


def test_studies_of_one_run(run, bucket):
    config, corpus, workdir = run
    facts = {"trained_on": TextInfo.of(corpus), "log": str}
    context_length.run(config, corpus, workdir, context_length.Plan(lengths=(4,)), **facts)
    assert "context_length.csv" in names(workdir.path)
    plan = attention_maps.Plan(out=str(bucket / "maps"), positions=(20,))
    average = attention_maps.run(config, corpus, workdir, plan, **facts)
    assert names(bucket / "maps") == {"attention.npz", "attention.json", "attention.md"}
    with (bucket / "maps" / "attention.npz").open("rb") as file, np.load(file) as arrays:
        np.testing.assert_allclose(arrays["average"], average, rtol=1e-6)


def test_a_study_of_a_group_keeps_its_losses(run, bucket, storage):
    config, corpus, workdir = run
    plan = recl.Plan(workdirs=(str(workdir.path),) * 2, names=("a", "b"), out=str(bucket), lengths=(2, 4, 2), stride=9)
    assert [each.workdir.path for each in plan.load_runs()] == [workdir.path] * 2
    runs = [TrainedRun(name, config, TextInfo.of(corpus), workdir) for name in plan.names]
    found = recl.run(runs, corpus, plan, log=str)
    assert names(bucket) == {"recl.json", "recl.csv", "recl.md", "losses"}
    table, before = (bucket / "recl.md").read_text(), len(storage.writes)
    assert recl.run(runs, corpus, plan, log=str) == found
    assert (bucket / "recl.md").read_text() == table
    assert not any("losses" in path for _, path in storage.writes[before:]), "losses were computed again"
