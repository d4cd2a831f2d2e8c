"""Tests the quickstart's comparison."""

import numpy as np
import pytest

from experiments import quickstart
from support import drawn_run
from txl_jax.config import config_tree
from txl_jax.runs import score
from txl_jax.runs.build import build_for
from txl_jax.runs.weights import load_parameters


def test_bits_by_position_are_the_means_over_the_segments_of_the_same_bytes(tmp_path, monkeypatch):
    """B divides the targets, so that each position of a segment counts as often as the rows' lengths say."""
    monkeypatch.setattr(quickstart, "CURVE_BYTES", 25)
    changes = {"eval.batch_size": 2, "eval.segment_len": 5, "eval.mem_len": 7}
    config, corpus = drawn_run.on_text(tmp_path, drawn_run.letters(), **changes)
    run, _ = drawn_run.make(tmp_path / "run", config, corpus)
    found = quickstart.compare(config, corpus, run, tested=2.5)
    no_memory, first = {"eval.mem_len": 0, "eval.same_length": False}, corpus.test[:25]
    for (name, curve), more, tokens in zip(
        found.by_position.items(), (no_memory, {}), (corpus.test, first), strict=True
    ):
        components = build_for(config_tree.replace(config, more), corpus.vocabulary)
        nats = np.zeros(len(tokens), np.float32)
        _, params = load_parameters(components, run, log=print)
        totals = score.score(components, params, tokens, name=name, log=print, token_nats=nats)
        position = (np.arange(len(nats) - 1) % -(-(len(tokens) - 1) // 2)) % 5
        by_hand = [nats[1:25][position[:24] == each].mean() / np.log(2) for each in range(5)]
        assert curve == pytest.approx(by_hand, rel=1e-6)
        assert found.bits[name] == (2.5 if tokens is first else totals.bpc)
    assert list(found.bits)[:2] == list(quickstart.COMPRESSORS) and len(first) < len(corpus.test)
