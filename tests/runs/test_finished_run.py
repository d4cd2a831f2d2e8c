"""Tests a run that has finished: started again, damaged, with other settings, scored, averaged and generated from."""

import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from support import runs
from support.runs import numbers
from txl_jax.config import config_tree
from txl_jax.runs import score, validation
from txl_jax.runs.build import Compilation, build
from txl_jax.runs.weights import load_parameters
from txl_jax.runtime.checkpoint import Checkpointer

STEPS = 24


@pytest.mark.full
def test_results_that_are_damaged_or_of_an_earlier_end_are_made_again(finished, config, corpus):
    """A run that goes on from an end leaves its results behind, if it is killed before the test scores."""
    workdir, outcome = finished
    before, path = numbers(workdir), Path(workdir.path, "results.json")
    earlier = json.dumps(outcome.results | {"steps": STEPS - 8, "test": {"loss": 0.0}}).encode()
    for content in (earlier, b"", b'{"steps": 24, "eval": 7}', b"\xff"):
        path.write_bytes(content)
        assert runs.train(config, corpus, workdir) == outcome
        assert json.loads(path.read_text()) == outcome.results and numbers(workdir) == before


def test_a_finished_run_is_neither_compiled_nor_scored_again(finished, config, corpus, capsys, monkeypatch):
    workdir, outcome = finished
    before = Path(workdir.path, "metrics.jsonl").read_bytes()
    monkeypatch.setattr(validation, "score_with_line", pytest.fail)
    monkeypatch.setattr(Compilation, "of", pytest.fail)
    assert runs.train(config, corpus, workdir) == outcome
    assert Path(workdir.path, "metrics.jsonl").read_bytes() == before
    assert re.search(r"(?m)^finished\b", capsys.readouterr().out)


@pytest.mark.full
def test_a_finished_run_is_scored_again_at_other_lengths(finished, config, corpus):
    workdir, outcome = finished
    again = runs.train(config_tree.replace(config, {"eval.mem_len": 3}), corpus, workdir)
    assert again.results["eval"]["mem_len"] == 3
    assert again.results["test"]["loss"] != outcome.results["test"]["loss"]


@pytest.mark.full
def test_a_damaged_best_checkpoint_costs_only_the_best(finished, config, corpus, capsys):
    workdir, _ = finished
    Path(workdir.path, "results.json").unlink()
    for path in Path(workdir.best).rglob("*"):
        if path.is_file() and path.name != "digests.json":
            path.write_bytes(path.read_bytes()[:-1] + b"#")
    outcome = runs.train(config, corpus, workdir)
    assert outcome.finished and outcome.results["best_valid"] is None
    assert workdir.best in capsys.readouterr().out
    assert runs.generate_text(config, workdir)


def test_evaluation_and_generation_use_the_best_parameters(finished, config, corpus):
    workdir, outcome = finished
    scored = score.evaluate_splits(config, corpus, workdir)
    assert scored["test"] == {k: v for k, v in outcome.results["test"].items() if k != "step"}
    assert scored["step"] == outcome.results["best_valid"]["step"]
    longer = config_tree.replace(config, {"generate.length": 30, "generate.samples": 2, "generate.prompt": "one "})
    first = runs.generate_text(longer, workdir)
    assert [len(text) for text in first] == [30, 30] and first[0] != first[1]
    assert runs.generate_text(longer, workdir) == first
    assert Path(workdir.path, "sample-seed0.txt").read_bytes().startswith(b"one " + first[0])


def test_the_best_parameters_are_loaded_where_later_ones_exist(finished, config, corpus):
    workdir, _ = finished
    parts = build(config, vocab_size=corpus.vocabulary.size)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 7, leaf.dtype), parts.abstract_state.params)
    with Checkpointer(workdir.best, keep=1, log=print) as best:
        best.save(STEPS - 18, {"params": params}, {})
    step, found = load_parameters(parts, workdir, log=print)
    assert step == STEPS - 18 and all((leaf == 7).all() for leaf in jax.tree.leaves(found))


def test_the_mean_of_the_newest_checkpoints_is_scored(finished, config, corpus):
    workdir, _ = finished
    parts = build(config, vocab_size=corpus.vocabulary.size)
    each = []
    with Checkpointer(workdir.latest, keep=2, log=print) as latest:
        for before in (None, STEPS):
            step, state, _ = latest.restore(parts.abstract_state, before=before)
            each.append(state.params)
    assert step == STEPS - 6
    averaged = build(config_tree.replace(config, {"eval.average_checkpoints": 2}), vocab_size=corpus.vocabulary.size)
    logged = []
    step, found = load_parameters(averaged, workdir, log=logged.append)
    assert step == STEPS and [re.findall(r"\d+", line) for line in logged] == [[str(STEPS - 6), str(STEPS)]]
    for a, b, mean in zip(*map(jax.tree.leaves, (*each, found)), strict=True):
        np.testing.assert_allclose(mean, (np.asarray(a) + np.asarray(b)) / 2, rtol=1e-6)
    more = build(config_tree.replace(config, {"eval.average_checkpoints": 3}), vocab_size=corpus.vocabulary.size)
    with pytest.raises(ValueError, match=r"average_checkpoints\D*\b3\b.*\b2\b"):
        load_parameters(more, workdir, log=logged.append)
