"""Tests the continuation job: the parts of its page, the same text as generation writes, and what is refused."""

import re

import numpy as np
import pytest

from support import drawn_run, tiny_run
from txl_jax.config import CorpusName, DataConfig, LineMark, Network, Tokenizer, TokenizerConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.inference.generator import Generator
from txl_jax.jobs.score import Interrupted
from txl_jax.jobs.workdir import TextInfo
from txl_jax.paper import continuation
from txl_jax.paper.continuation import Plan

WORDS = ["the", "cat", "sat", "@-@", "on", "(", "a", ")", "mat", ",", "and", "was", "seen", "."]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(config, corpus, workdir, parts) of a run on words."""
    folder = tmp_path_factory.mktemp("continuation")
    lines = [" ".join(np.random.default_rng(i).choice(WORDS, 9)) for i in range(120)]
    (folder / "text").write_text("\n".join(lines) + "\n")
    data = DataConfig(
        corpus=CorpusName.TEXT,
        file=str(folder / "text"),
        tokenizer=TokenizerConfig(kind=Tokenizer.WORD, line_mark=LineMark.EOS),
    )
    config = config_tree.replace(tiny_run.CONFIG, {"data": data, "generate.length": 7, "generate.samples": 2})
    corpus = read_corpus(config.data, "nowhere", str(folder))
    return config, corpus, *drawn_run.make(folder / "run", config, corpus)


def write(run, path, **others):
    config, corpus, workdir, _ = run
    stop_requested = others.pop("stop_requested", lambda: False)
    plan = Plan(out=str(path), **others)
    log_and_stop = {"log": lambda line: None, "stop_requested": stop_requested}
    continuation.run(config, corpus, workdir, plan, trained_on=TextInfo.of(corpus), **log_and_stop)
    return path.read_text()


@pytest.mark.full
def test_context_continuation_and_the_texts_own_are_printed_below_each_other(run, tmp_path):
    page = write(run, tmp_path / "page.md", starts=(3, 20), context=11)
    headings = [line for line in page.splitlines() if line.startswith("##")]
    # Levels and numbers of the headings: the start, the context, two continuations, and the text's own.
    assert [(line.split()[0], *map(int, re.findall(r"\d+", line))) for line in headings] == [
        heading
        for start in (3, 20)
        for heading in (("##", start), ("###", 11), ("###", 1, 7), ("###", 2, 7), ("###", 7))
    ]
    assert "@-@" not in page
    assert re.search(r"\b7\b.*\b40\b.*\btemperature\b\D*\b1\b.*\bseed\b\D*\b0\b.*\b9\b", page)
    # The model goes on from the context, as generation does.
    config, corpus, _, parts = run
    generator = Generator(parts.model, config.eval, config.generate)
    weights = generator.prepare_params(tiny_run.params(parts.model))
    written = np.concatenate(list(generator.tokens(weights, np.asarray(corpus.test)[3:14])), axis=1)
    for row in written:
        assert continuation._quoted(corpus, row) in page
    assert continuation._quoted(corpus, np.asarray(corpus.test)[14:21]) in page


@pytest.mark.full
def test_a_stop_writes_nothing_and_what_cannot_be_is_refused(run, tmp_path):
    page, n_token = tmp_path / "page.md", len(run[1].test)
    with pytest.raises(Interrupted):
        write(run, page, context=3, stop_requested=lambda: True)
    with pytest.raises(ValueError, match=rf"\b{n_token}\b.*\b{n_token - 18}\b"):
        write(run, page, starts=(n_token,), context=11)
    lstm = config_tree.replace(run[0], {"model.network": Network.LSTM})
    with pytest.raises(ValueError, match=r"model\.network.*\blstm\b"):
        write((lstm, *run[1:]), page)
    assert not page.exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("- a", "\\- a"),
        ("----", "\\----"),
        ("1. b", "1\\. b"),
        ("&lt;", "\\&lt;"),
        ("    c", "&nbsp;" * 4 + "c"),
        ("a *b* #1\nc", "a \\*b\\* \\#1  \nc"),
    ],
)
def test_signs_of_markdown_are_shown_as_they_are(text, shown):
    assert continuation._escaped(text) == shown
