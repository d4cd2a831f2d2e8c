"""Tests studies of runs in a bucket: what they write there is what they write on a disk."""

import dataclasses
import json

import numpy as np
import pytest

from support import drawn_run, tiny, tiny_run
from txl_jax.config import CorpusName, DataConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs.workdir import TextInfo
from txl_jax.paper import ablation, attention_maps, context_length, continuation, plots, recl, sliding_window_speed
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


def test_a_study_of_a_group_keeps_its_losses(run, bucket, monkeypatch):
    config, corpus, workdir = run
    plan = recl.Plan(workdirs=(str(workdir.path),) * 2, names=("a", "b"), out=str(bucket), lengths=(2, 4, 2), stride=9)
    assert [each.workdir.path for each in plan.load_runs()] == [workdir.path] * 2
    runs = [TrainedRun(name, config, TextInfo.of(corpus), workdir) for name in plan.names]
    found = recl.run(runs, corpus, plan, log=str)
    assert names(bucket) == {"recl.json", "recl.csv", "recl.md", "losses"}
    table = (bucket / "recl.md").read_text()
    monkeypatch.setattr(recl, "context_losses", None)  # Nothing is computed again.
    assert recl.run(runs, corpus, plan, log=str) == found
    assert (bucket / "recl.md").read_text() == table


def test_continuations_are_written(run, bucket):
    config, corpus, workdir = run
    config = config_tree.replace(config, {"generate.length": 5})
    plan = continuation.Plan(context=9, out=str(bucket / "page.md"))
    continuation.run(config, corpus, workdir, plan, trained_on=TextInfo.of(corpus), log=str)
    assert (bucket / "page.md").read_text().count("\n### ") == 3
    continuation.run(
        config, corpus, workdir, dataclasses.replace(plan, out=None), trained_on=TextInfo.of(corpus), log=str
    )
    assert (workdir.path / "continuation.md").read_text() == (bucket / "page.md").read_text()


def test_an_ablation_trains_in_a_bucket_and_keeps_its_scores(run, bucket, monkeypatch):
    config, corpus, _ = run
    row = "recurrence-relative-full"
    plan = ablation.Plan(rows=(row,), seeds=(1,), lengths=(4,), out=str(bucket))
    found = ablation.run(config, corpus, plan, log=str)
    assert names(bucket) == {f"{row}-seed1", "ablation.json", "ablation.csv", "ablation.md"}
    [record] = json.loads((bucket / "ablation.json").read_text())["scores"]
    assert (record["init"], record["best"]) == (found[row][0].init, found[row][0].best)
    monkeypatch.setattr(ablation.context_length, "run", None)  # Nothing is scored again.
    assert ablation.run(config, corpus, plan, log=str) == found


def test_table_9_is_written_row_by_row(bucket, monkeypatch):
    timing = sliding_window_speed.Timing(20, (3.0,), (1.0,))
    monkeypatch.setattr(sliding_window_speed, "measure", lambda *_, **__: timing)
    plan = sliding_window_speed.Plan(lengths=(20,), out=str(bucket / "table9.json"))
    sliding_window_speed.run(dataclasses.replace(sliding_window_speed.DEFAULTS, model=tiny.CONFIG), plan, log=str)
    [row] = json.loads((bucket / "table9.json").read_text())["rows"]
    assert (row["attention_len"], row["ratio"]) == (20, 3)
