"""Tests of the benchmark of attention as a program: for devices that are not at hand."""

import json
import os
import subprocess
import sys

import pytest

from support import ROOT

SIZES = ["--model.n_head=2", "--model.d_head=32", "--train.segment_len=256", "--train.mem_len=256"]
EVALUATION = ["--eval.segment_len=128", "--eval.mem_len=512", "--eval.clamp_len=none"]
# On a GPU the position scores of some rows are in memory at a time; of a few rows that would be all.
ROWS = 512
TPU, CUDA = pytest.mark.nightly(part="tpu"), pytest.mark.nightly(part="cuda")


@pytest.mark.parametrize("topology", [pytest.param("v5e", marks=TPU), pytest.param("h200", marks=CUDA)])
def test_the_reference_writes_its_scores_and_the_kernels_do_not(tmp_path, topology):
    path = tmp_path / "attention.json"
    flags = [f"--topology={topology}", "--configs=small", f"--batch_size={ROWS}", f"--eval.batch_size={ROWS}"]
    flags += ["--model.dropout.attention=0.1", "--paths=reference,fused,plain", f"--json={path}"]
    program = [sys.executable, "-m", "experiments.bench.attention", *SIZES, *EVALUATION, *flags]
    done = subprocess.run(program, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {(row["task"], row["path"]): row for row in json.loads(path.read_text())["rows"]}
    assert len(found) == 6
    for task in ("training", "evaluation"):
        assert found[task, "reference"]["scores_written"] is not None
        for name in ("fused", "plain"):
            row = found[task, name]
            assert row["refused"] is None, row
            assert row["scores_written"] is None, row
    fused, reference = found["training", "fused"], found["training", "reference"]
    assert fused["bytes_accessed"] < reference["bytes_accessed"] / 2
