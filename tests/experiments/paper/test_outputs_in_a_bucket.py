"""Tests studies and scores of a run in a bucket: they write the same files there as on a disk."""

import io

import numpy as np
import pytest

from experiments.paper import attention, context_length, continuation, recl
from support import programs
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.runs import score_input, score_splits
from txl_jax.runtime.storage import names, read


@pytest.mark.full
def test_studies_of_one_run(make_run, bucket, tmp_path):
    config, corpus, workdir = run = make_run(bucket, text_folder=tmp_path)
    context_length.score_lengths(*run, context_length.Plan(lengths=(4,)))
    assert "context_length.csv" in names(workdir.path)
    short = config_tree.replace(config, {"generate.length": 5})
    continuation.write(short, corpus, workdir, continuation.Plan(context=9))
    # The context, the model's continuation and the text's own.
    assert read(f"{workdir.path}/continuation.md").decode().count("\n### ") == 3
    average = attention.draw(*run, attention.Plan(out=str(bucket / "maps"), positions=(20,)))
    pictures = {"average.png", "heads-20.png", "terms-20.png"}
    files = {"attention.npz", "attention.json", "attention.md"}
    assert set(names(bucket / "maps")) == files | pictures
    assert (bucket / "maps" / "average.png").read_bytes().startswith(b"\x89PNG")
    with np.load(io.BytesIO((bucket / "maps" / "attention.npz").read_bytes())) as arrays:
        np.testing.assert_allclose(arrays["average"], average, rtol=1e-6)
    plan = recl.Plan(lengths=(2, 4, 2), stride=9, out=str(bucket / "recl"))
    recl.compare({"ours": workdir, "again": workdir}, corpus, plan)
    assert set(names(plan.out)) == {
        "recl.json",
        "recl.csv",
        "recl.md",
        "gains.png",
        "context.png",
        "losses",
    }


@pytest.mark.full
def test_scores_and_reports_are_written_and_inputs_read_there_too(make_run, bucket, tmp_path):
    config, corpus, workdir = make_run(bucket, text_folder=tmp_path)
    score_splits.evaluate_splits(config, corpus, workdir)
    score_splits.score_tokens(config, corpus, workdir)
    assert {"evaluation.json", "scores-valid.tsv", "scores-test.tsv"} < set(names(workdir.path))
    with score_input.open_input(f"{workdir.path}/scores-test.tsv") as file:
        assert len(file.readlines()) == len(corpus.test)
    with pytest.raises(UserError, match=r"gs://.*--input"):
        score_input.open_input(str(bucket / "missing.txt"))

    code, _, err = programs.run("experiments.report", workdir.path, f"--out={bucket / 'report'}")
    assert code == 0, err
    assert {"report.md", "report.csv"} <= set(names(bucket / "report"))
