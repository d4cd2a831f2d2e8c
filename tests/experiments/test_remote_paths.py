"""Tests flags that are given URLs: a report in a bucket, and what must be a folder of this machine."""

import json
import sys
import types

import pytest

import txl_jax
from experiments import lm_eval, quickstart, report
from experiments.cli import training_config
from experiments.examples import comparison
from support import recorded_run, tiny
from txl_jax.bench import attention, estimate, speed
from txl_jax.config import EvalConfig, ExperimentConfig, TrainConfig
from txl_jax.errors import UserError
from txl_jax.paper import ablation

TINY = ExperimentConfig(
    model=tiny.CONFIG,
    train=TrainConfig(batch_size=2, segment_len=4, mem_len=6),
    eval=EvalConfig(batch_size=1, segment_len=3, mem_len=7),
)


def given(monkeypatch, program, **flags):
    monkeypatch.setattr(program, "FLAGS", types.SimpleNamespace(**flags))


def test_a_report_in_a_bucket_of_runs_in_a_bucket(monkeypatch, bucket, tmp_path):
    for name in ("one", "two"):
        made = recorded_run.make(tmp_path / name)
        for path in (path for path in made.iterdir() if path.is_file()):
            (bucket / "runs" / name / path.name).write_bytes(path.read_bytes())
    given(monkeypatch, report, out=str(bucket / "page" / "report.html"))
    assert report._run([str(bucket / "runs")]) == 0
    page = (bucket / "page" / "report.html").read_text()
    assert page.startswith("<!doctype html>") and str(bucket / "runs") in page


def test_paths_that_must_be_local_are_refused(monkeypatch):
    given(monkeypatch, quickstart, workdir="gs://bucket/run")
    with pytest.raises(UserError, match=r"gs://bucket/run.*local"):
        quickstart._run()
    given(monkeypatch, lm_eval, model_path="m", tasks=["t"], include_path="gs://bucket/tasks", output=None)
    with pytest.raises(UserError, match=r"--include_path.*gs://bucket/tasks"):
        lm_eval._run()


def test_a_url_that_nothing_opens_is_refused_before_a_study_begins(monkeypatch):
    with pytest.raises(UserError, match="ftp://host/out"):
        training_config.with_absolute_paths(ablation.Plan(out="ftp://host/out"))
    given(monkeypatch, lm_eval, model_path="m", tasks=["t"], include_path=None, output="ftp://host/out.json")
    with pytest.raises(UserError, match="ftp://host"):
        lm_eval._run()


BENCHMARKS = {
    "speed": (
        speed,
        lambda plan: speed.run(TINY, plan, log=str),
        {"tasks": ("data_loading",), "vocab_size": tiny.V, "calls": 1},
    ),
    "estimate": (estimate, lambda plan: estimate.write_records([], plan, str), {}),
    "attention": (attention, lambda plan: attention.run({}, plan, str), {}),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_figures_of_a_benchmark_in_a_bucket(bucket, name):
    module, write, settings = BENCHMARKS[name]
    write(training_config.with_absolute_paths(module.Plan(json=str(bucket / "figures.json"), **settings)))
    assert json.loads((bucket / "figures.json").read_text())["plan"]["json"] == str(bucket / "figures.json")


def test_curves_of_an_example_in_a_bucket(bucket):
    comparison.write(str(bucket), {"a": [1.0], "b": [2.0]}, measure="loss", bounds="0", title="curves")
    assert json.loads((bucket / "curves.json").read_text()) == {"a": {"10": 1.0}, "b": {"10": 2.0}}
    assert (bucket / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_results_of_the_harness_in_a_bucket(monkeypatch, bucket, capsys):
    harness = types.SimpleNamespace(
        HarnessModel=lambda *_, **__: None, evaluate=lambda *_, **__: {"results": {"t": {"acc": 0.5}}}
    )
    monkeypatch.setitem(sys.modules, "txl_jax.lm_eval_model", harness)
    monkeypatch.setattr(txl_jax, "lm_eval_model", harness, raising=False)
    flags = {"ensemble_member": None, "batch_size": 1, "first": None, "limit": None, "num_fewshot": None}
    output = str(bucket / "scores.json")
    given(monkeypatch, lm_eval, model_path="m", tasks=["t"], include_path=None, output=output, **flags)
    assert lm_eval._run() == 0 and output in capsys.readouterr().out
    assert json.loads((bucket / "scores.json").read_text())["results"]["t"]["acc"] == 0.5
