"""Tests of the softmax benchmark and its program."""

import re

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
def test_a_softmax_that_needs_too_much_memory_gets_fewer_tokens():
    sizes = ["--vocab_size=4000", "--calls=2", "--model.d_model=64", "--model.cutoffs=200,1000"]
    sizes += ["--train.batch_size=4", "--train.segment_len=50"]
    code, out, err = programs.run(
        "experiments.bench.softmax_speed", *sizes, "--memory_gb=0.007"
    )  # They need 4 and 9 MB.
    assert code == 0, err
    rows = cells(out)
    assert rows["softmax"][0] == "tokens"
    assert rows["adaptive"][0] == "200" and rows["full"][0] == "100"
    code, _, err = programs.run(
        "experiments.bench.softmax_speed", *sizes, "--train.segment_len=1", "--memory_gb=0.000001"
    )
    assert code == 1 and re.search(r"\b1,000\b", err)
