"""Tests the quickstart's comparison."""

import numpy as np
import pytest

from experiments import quickstart
from support import drawn_run
from txl_jax.config import config_tree
from txl_jax.runs import score
from txl_jax.runs.build import build_for
from txl_jax.runs.trained import load_parameters


def test_bits_by_position_are_the_means_over_the_segments_of_the_same_bytes(tmp_path, monkeypatch):
    """B divides the targets, so that each position of a segment counts as often as the rows'
    lengths say.
    """
    monkeypatch.setattr(quickstart, "CURVE_BYTES", 25)
    changes = {"eval.batch_size": 2, "eval.segment_len": 5, "eval.mem_len": 7}
    config, corpus = drawn_run.on_text(tmp_path, drawn_run.letters(), **changes)
    run, _ = drawn_run.make(tmp_path / "run", config, corpus)
    found = quickstart.compare(config, corpus, run, tested=2.5)
    first = corpus.test[:25]
    for name, more in zip(
        found.by_position, ({"eval.mem_len": 0, "eval.same_length": False}, {}), strict=True
    ):
        components = build_for(config_tree.replace(config, more), corpus.vocabulary)
        nats = np.zeros(len(first), np.float32)
        _, params = load_parameters(components, run, log=print)
        score.score(components, params, first, name=name, log=print, token_nats=nats)
        by_hand = [nats[1:][np.arange(24) % 12 % 5 == each].mean() / np.log(2) for each in range(5)]
        assert found.by_position[name] == pytest.approx(by_hand, rel=1e-6)
        totals = score.score(components, params, corpus.test, name=name, log=print)
        assert found.bits[name] == (totals.bpc if more else 2.5)
    assert list(found.bits)[:2] == list(quickstart.COMPRESSORS) and len(first) < len(corpus.test)
