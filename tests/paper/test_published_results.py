"""Tests that the paper's scores are the same in the table of the code, in README and in the flagfiles."""

import pytest

from experiments.cli.flag_tree import FLAGFILE_DIR
from support import ROOT
from txl_jax.config import CorpusName
from txl_jax.paper.published_results import PUBLISHED, published_for


@pytest.mark.parametrize("result", PUBLISHED, ids=lambda result: result.flagfile)
def test_scores_are_those_of_readme_and_of_the_flagfile(result):
    comment = (FLAGFILE_DIR / f"{result.flagfile}.flags").read_text()
    text = " ".join(line.removeprefix("#").strip() for line in comment.splitlines() if line.startswith("#"))
    assert f"table {result.table} of the paper" in text and result.score in text and result.parameters in text
    [row] = [
        line
        for line in (ROOT / "README.md").read_text().splitlines()
        if line.startswith("|") and f"`{result.flagfile}`" in line
    ]
    assert result.score in row


def test_scores_are_found_by_their_corpus():
    assert [result.score for result in published_for(CorpusName.ENWIK8)] == ["1.06", "1.03", "0.99"]
    assert published_for(CorpusName.TEXT) == []
