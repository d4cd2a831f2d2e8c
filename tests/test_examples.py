"""Tests that the scripts of docs/examples run, and that each model solves what the one without its part cannot."""

import runpy

import numpy as np
import pytest

import txl_jax
from support import ROOT, drawn_run


def example(name):
    return runpy.run_path(str(ROOT / "docs" / "examples" / f"{name}.py"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["document_embeddings", "memory_policy", "speech_encoder"])
def test_an_example_runs(name):
    found = example(name)["main"](2)
    assert len(found) == 2 and np.all(np.isfinite([*found.values()]))


@pytest.mark.full
def test_streamed_embeddings_are_means_of_the_hidden_states(tmp_path):
    model = txl_jax.load(drawn_run.of_words(tmp_path / "run").path)
    lines = drawn_run.TEXT[:400].splitlines(keepends=True)
    found = np.stack(list(example("document_embeddings")["stream"](model, lines, length=5)))
    [hidden] = model.hidden_states([b"".join(lines)])
    assert len(hidden) > 5 * 9
    expected = [hidden[first : first + 5].mean(axis=0) for first in range(0, len(hidden), 5)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.nightly(part="long")
@pytest.mark.parametrize(
    ("name", "least", "chance", "atol"),
    # A mean over 30 updates of some 5,500 episodes in all, whose standard deviation is 0.007; and over 30 of frames.
    [("memory_policy", 0.97, 0.5, 0.03), ("speech_encoder", 0.85, 0.125, 0.015)],
)
def test_only_the_whole_model_solves_the_task(name, least, chance, atol):
    whole, without = example(name)["main"]().values()
    assert whole > least and without == pytest.approx(chance, abs=atol)


@pytest.mark.nightly(part="long")
def test_memory_finds_the_topic_as_far_back_as_it_reaches():
    module = example("document_embeddings")
    within, without = module["main"]().values()
    reach, chance = module["CONFIG"].n_layer * module["MEM_LEN"] // module["PASSAGE"], 1 / module["TOPICS"]
    assert within[: reach + 1].min() > 0.95
    # For 128 documents, a fraction of 1 in 8 has a standard deviation of 0.03; topics are the same in all passages.
    assert within[reach + 1 :].mean() == pytest.approx(chance, abs=0.1)
    assert without[0] > 0.95 and without[1:].mean() == pytest.approx(chance, abs=0.1)
