"""Tests flags that are given URLs: a report in a bucket, and what must be a folder of this machine."""

import types

import pytest

from experiments import lm_eval, quickstart, report
from support import recorded_run
from txl_jax.cli import training_config
from txl_jax.errors import UserError
from txl_jax.paper import ablation


def given(monkeypatch, program, **flags):
    monkeypatch.setattr(program, "FLAGS", types.SimpleNamespace(**flags))


@pytest.mark.full
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
