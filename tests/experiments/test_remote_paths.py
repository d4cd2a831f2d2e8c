"""Tests flags that are given URLs: a report in a bucket, and what must be a folder of this machine."""

from pathlib import Path

import pytest

from support import programs, recorded_run
from txl_jax.runtime import storage as files


@pytest.mark.full
def test_a_report_in_a_bucket_of_runs_in_a_bucket(bucket, tmp_path):
    for name in ("one", "two"):
        made = Path(recorded_run.make(tmp_path / name))
        for path in (path for path in made.iterdir() if path.is_file()):
            files.write(f"{bucket}/runs/{name}/{path.name}", path.read_bytes())
    code, _, err = programs.run("experiments.report", f"{bucket}/runs", f"--out={bucket}/page/report.html")
    page = files.read(f"{bucket}/page/report.html").decode()
    assert code == 0 and page.startswith("<!doctype html>") and f"{bucket}/runs" in page, err


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        ("quickstart", ["--workdir=gs://bucket/run"], "gs://bucket/run, and the quick start"),
        (
            "lm_eval",
            ["--model_path=m", "--tasks=t", "--include_path=gs://bucket/tasks"],
            "--include_path is gs://bucket",
        ),
        ("lm_eval", ["--model_path=m", "--tasks=t", "--output=ftp://host/out.json"], "ftp://host/out.json"),
        ("paper.ablation", ["--out=ftp://host/out"], "ftp://host/out"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_before_anything_is_done(program, words, named):
    code, out, err = programs.run(f"experiments.{program}", *words)
    assert code == 1 and out == "" and named in err
