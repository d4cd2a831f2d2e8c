"""Tests flags that are given URLs and must be folders of this machine."""

import functools

import pytest

from support import programs

needs_gcsfs = functools.partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        needs_gcsfs("quickstart", ["--workdir=gs://bucket/run"], "gs://bucket/run, and the quick start"),
        needs_gcsfs("lm_eval", ["--model_path=m", "--tasks=t", "--include_path=gs://b"], "--include_path is gs://b"),
        ("lm_eval", ["--model_path=m", "--tasks=t", "--output=ftp://host/out.json"], "ftp://host/out.json"),
        ("paper.ablation", ["--out=ftp://host/out"], "ftp://host/out"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_before_anything_is_done(program, words, named):
    code, out, err = programs.run(f"experiments.{program}", *words)
    assert code == 1 and out == "" and named in err
