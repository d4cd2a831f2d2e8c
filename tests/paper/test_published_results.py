"""Tests the paper's scores: each is that of a configuration of its corpus."""

import pytest

from txl_jax.cli.flags import FLAGFILE_DIR
from txl_jax.config import CorpusName
from txl_jax.paper.published_results import PUBLISHED, published_for


@pytest.mark.parametrize("result", PUBLISHED, ids=lambda result: result.flagfile)
def test_a_score_is_that_of_its_flagfile(result):
    text = (FLAGFILE_DIR / f"{result.flagfile}.flags").read_text()
    assert f"--data.corpus={result.corpus}\n" in text and f"--model.n_layer={result.layers}\n" in text
    assert result.score in text.partition("\n--")[0]


def test_scores_are_found_by_their_corpus():
    assert [result.score for result in published_for(CorpusName.ENWIK8)] == ["1.06", "1.03", "0.99"]
    assert published_for(CorpusName.TEXT) == []
