"""Tests of the softmax benchmark and its program."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from support import ROOT, programs
from txl_jax.bench import softmax_speed, synthetic_tokens
from txl_jax.config import ModelConfig
from txl_jax.errors import UserError

V, T = 500, 64
ADAPTIVE = ModelConfig(d_model=32, cutoffs=(50, 200), div_val=2, tie_weight=False)
FULL = ModelConfig(d_model=32, tie_weight=False)


def run(*flags):
    command = programs.command("experiments.bench.softmax_speed", *flags)
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )


def cells(table: str) -> dict[str, list[str]]:
    """The cells of each row of a markdown table, by the first."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in lines}


def test_probabilities_follow_the_power_law():
    p = synthetic_tokens.probabilities(V)
    assert p.sum() == pytest.approx(1)
    assert p[0] / p[9] == pytest.approx((12.7 / 3.7) ** 1.1)
    drawn = synthetic_tokens.draw_tokens(V, 20_000)
    np.testing.assert_allclose((drawn < 50).mean(), p[:50].sum(), atol=0.02)


def test_a_softmax_that_needs_too_much_memory_gets_fewer_tokens(monkeypatch):
    monkeypatch.setattr(softmax_speed, "_peak_of_own_process", lambda *_: None)
    sizes = {"vocab_size": V, "tokens": T, "calls": 2}
    free = softmax_speed.measure({"full": FULL}, memory_limit=10**9, **sizes)["full"]
    assert free.tokens == T and free.memory_bytes == free.memory_bytes_of_all and len(free.seconds) == 2
    found = softmax_speed.measure({"adaptive": ADAPTIVE, "full": FULL}, memory_limit=free.memory_bytes - 1, **sizes)
    assert found["full"].tokens == T // 2
    assert found["full"].memory_bytes < found["full"].memory_bytes_of_all == free.memory_bytes
    with pytest.raises(UserError, match=r"\b1,000\b.*\d"):
        softmax_speed.measure({"full": FULL}, memory_limit=1000, **sizes)


def test_the_program_prints_a_table_with_the_tokens_of_each():
    result = run(
        "--vocab_size=4000", "--calls=2", "--model.d_model=64", "--model.cutoffs=200,1000",
        "--train.batch_size=4", "--train.segment_len=50", "--memory_gb=0.007",  # They need 4 and 9 MB.
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    rows = cells(result.stdout)
    assert rows["softmax"][0] == "tokens"
    assert rows["adaptive"][0] == "200" and rows["full"][0] == "100"
    assert rows["full"][-1].endswith(" MB") or not Path("/proc/self/status").exists()
    assert re.search(r"(?m)^[^|]*\bfull\b[^|]*\b200\b[^|]*\bMB\b", result.stdout), "the limit, and what all tokens need"
    shares = re.search(r"(?m)^[^|]*%.*$", result.stdout)[0]
    assert len(re.findall(r"[\d.]+% \([\d.]+%\)", shares)) == 3, "the head and two tails"


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (["--model.cutoffs=", "--model.div_val=1"], r"model\.cutoffs"),
        (["--calls=0"], r"calls\D*\b0\b\D*\b1\b"),
        (["--vocab_size=30000"], r"model\.cutoffs\D*\b200000\b\D*\b30000\b"),
    ],
)
def test_mistakes_are_answered_in_one_sentence(flags, pattern):
    result = run(*flags)
    assert result.returncode == 1
    assert (
        result.stderr.startswith("error: ")
        and re.search(pattern, result.stderr)
        and len(result.stderr.splitlines()) == 1
    )
