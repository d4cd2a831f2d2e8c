"""Tests of the softmax benchmark and its program."""

import re
from pathlib import Path

import numpy as np
import pytest

from support import programs
from txl_jax.bench import synthetic_tokens

V = 500


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


@pytest.mark.full
def test_the_program_prints_a_table_with_the_tokens_of_each():
    """A softmax that needs too much memory gets fewer tokens."""
    sizes = ["--vocab_size=4000", "--calls=2", "--model.d_model=64", "--model.cutoffs=200,1000"]
    sizes += ["--train.batch_size=4", "--train.segment_len=50"]
    code, out, err = programs.run(
        "experiments.bench.softmax_speed", *sizes, "--memory_gb=0.007"
    )  # They need 4 and 9 MB.
    assert code == 0, err
    rows = cells(out)
    assert rows["softmax"][0] == "tokens"
    assert rows["adaptive"][0] == "200" and rows["full"][0] == "100"
    assert rows["full"][-1].endswith(" MB") or not Path("/proc/self/status").exists()
    assert re.search(r"(?m)^[^|]*\bfull\b[^|]*\b200\b[^|]*\bMB\b", out), "the limit, and what all tokens need"
    shares = re.search(r"(?m)^[^|]*%.*$", out)[0]
    assert len(re.findall(r"[\d.]+% \([\d.]+%\)", shares)) == 3, "the head and two tails"
    code, _, err = programs.run(
        "experiments.bench.softmax_speed", *sizes, "--train.segment_len=1", "--memory_gb=0.000001"
    )
    assert code == 1 and re.search(r"\b1,000\b", err)
