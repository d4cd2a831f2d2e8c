"""Tests flags that are given URLs and must be folders of this machine."""

import pytest

from support import programs

GCS = pytest.mark.full  # Without gcsfs, the error is that it is not installed.
TASK = ["--model_path=m", "--tasks=t"]


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        pytest.param("quickstart", ["--workdir=gs://bucket/run"], "gs://bucket/run, and the quick start", marks=GCS),
        pytest.param("lm_eval", [*TASK, "--include_path=gs://bucket"], "--include_path is gs://bucket", marks=GCS),
        ("lm_eval", [*TASK, "--output=ftp://host/out.json"], "ftp://host/out.json"),
        ("paper.ablation", ["--out=ftp://host/out"], "ftp://host/out"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_before_anything_is_done(program, words, named):
    code, out, err = programs.run(f"experiments.{program}", *words)
    assert code == 1 and out == "" and named in err
