"""Tests RECL: gains and lengths of losses made by hand, losses at exact contexts, the files, a
stop, and refusals.
"""

import csv
import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest

from experiments.paper import recl
from experiments.paper.recl import Plan
from support import tiny_run
from txl_jax import plots
from txl_jax.config import Encoding, Network
from txl_jax.runs.scoring_progress import Interrupted

LENGTHS = range(100, 1000, 100)


def losses(*stops: int) -> dict[int, np.ndarray]:
    """Losses of one model per stop, which fall by 0.02 nats a hundred tokens up to it, at positions
    of 4 and 2 nats.
    """
    hard = np.array([4.0, 2.0, 4.0, 2.0, 2.0, 2.0, 4.0, 2.0, 2.0, 2.0])
    return {
        length: np.stack([hard - 0.02 * (min(length, stop) - LENGTHS[0]) / 100 for stop in stops])
        for length in LENGTHS
    }


@pytest.mark.parametrize(("ratio", "first"), [(0.1, 300), (0.5, 300), (1.0, 300), (1.0, None)])
def test_a_model_whose_gain_stops_at_a_known_length_or_never(ratio, first):
    found = recl.gains(losses(first or 5000, 700), ratio=ratio)
    assert [recl.effective_length(steps) for steps in found] == [first, 700]


def test_baseline_and_hardest_positions_are_the_groups():
    """Either model is the better one somewhere, and each would choose another position as its
    hardest.
    """
    found = {
        100: np.array([[3.0, 5.0, 1.0], [4.0, 1.0, 6.0]]),
        200: np.array([[2.9, 4.0, 1.0], [2.0, 0.9, 5.0]]),
    }
    # Baselines 3, 1 and 1, so the first position is the hardest.
    [[first], [second]] = recl.gains(found, ratio=0.1)
    assert (first.context, first.longer) == (100, 200)
    assert first.relative == pytest.approx(
        1 - math.exp(2.9 - 3)
    ) and second.relative == pytest.approx(1 - math.exp(-1))
    assert first.perplexity == pytest.approx(math.exp(3) - math.exp(2.9))


def test_the_baseline_is_taken_anew_at_each_length():
    """The first model stops at 300; behind it the second goes on, and from 300 on its gains count
    in full.
    """
    found = losses(300, 300)
    for length in LENGTHS:
        found[length][1] += 0.005 - 0.02 * max(length - 400, 0) / 100
    _, steps = recl.gains(found, ratio=1.0)
    assert steps[3].context == 400
    # From 0.005 above to 0.015 below.
    assert steps[3].relative == pytest.approx(1 - math.exp(-0.015), rel=1e-6)
    assert steps[4].relative == pytest.approx(1 - math.exp(-0.02), rel=1e-6)


PLAN = Plan(lengths=(2, 8, 3), stride=3, batch_size=4)
MODELS = {
    "ours": {"model.encoding": Encoding.RELATIVE},
    "LSTM": {"model.network": Network.LSTM},
    "vanilla": {"model.encoding": Encoding.VASWANI},
}


@pytest.fixture(scope="module")
def group(make_run, tmp_path_factory):
    """(members, corpus)."""
    members = {}
    for name, changes in MODELS.items():
        _, corpus, members[name] = make_run(tmp_path_factory.mktemp(name), changes)
    return members, corpus


def run(group, folder, plan=PLAN, **others):
    return recl.compare(*group, dataclasses.replace(plan, out=str(folder)), **others)


@functools.partial(jax.jit, static_argnums=0)
def last_nll(model, variables, texts):
    """The loss of the last token of each text, after those before it and no memory."""
    options = {"clamp_len": None, "same_length": False, "deterministic": True}
    hidden, _ = model.apply(
        variables, texts[:, :-1], model.init_memory(batch_size=len(texts), mem_len=0), **options
    )
    return model.apply(variables, hidden[:, -1:], texts[:, -1:], method=model.nll)[:, 0]


@pytest.mark.full
def test_losses_are_those_of_the_context_alone_and_are_kept(group, tmp_path, monkeypatch):
    lengths = run(group, tmp_path)
    members, corpus = group
    tokens = np.asarray(corpus.test)
    for member in members:
        parts = tiny_run.parts(
            **{k.replace(".", "__"): v for k, v in MODELS[member].items()}, model__dropout__rate=0.0
        )
        model = parts.model.clone(vocab_size=corpus.vocabulary.size)
        variables = {"params": tiny_run.params(model)}
        for context in PLAN.contexts:
            found = np.load(tmp_path / "losses" / member / f"{context}.npy")
            assert len(found) == len(range(8, len(tokens), 3))
            places = [0, 5, len(found) - 1]
            texts = np.stack([tokens[8 + 3 * k - context : 8 + 3 * k + 1] for k in places])
            np.testing.assert_allclose(found[places], last_nll(model, variables, texts), rtol=2e-5)

    assert list(lengths) == list(MODELS) and all(len(found) == 3 for found in lengths.values())
    record = json.loads((tmp_path / "recl.json").read_text())
    assert record["recl"] == lengths and record["tokens"] == len(range(8, 56, 3))
    assert "| ours | " in (tmp_path / "recl.md").read_text()
    with open(tmp_path / "recl.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [{name: str(value) for name, value in step.items()} for step in record["gains"]] == rows
    assert any(tmp_path.glob("*.png")) == plots.can_draw()
    monkeypatch.setattr(recl, "context_losses", None)  # Nothing is computed again.
    assert run(group, tmp_path) == lengths
    # Losses of another plan do not count.
    with pytest.raises(ValueError, match=r"\bstride\D*\b3\b\D*\b2\b"):
        run(group, tmp_path, dataclasses.replace(PLAN, stride=2))


@pytest.mark.full
def test_plans_and_groups_that_do_not_go_are_refused(group, tmp_path):
    with pytest.raises(ValueError, match=r"\b56\b.*\b200\b"):
        run(group, tmp_path, dataclasses.replace(PLAN, lengths=(100, 200, 100)))
    with pytest.raises(Interrupted):
        run(group, tmp_path / "stopped", stop_requested=lambda: True)
    with pytest.raises(ValueError, match=r"\b1\b"):
        dataclasses.replace(PLAN, workdirs=("a",)).load_runs()
    with pytest.raises(ValueError, match="ours, ours"):
        dataclasses.replace(PLAN, workdirs=("a", "b"), names=("ours", "ours")).load_runs()
    # It would lead out of --out.
    for name in ("../outside", "/outside", "..", ".", ".hidden", "a/b", ""):
        with pytest.raises(ValueError, match=r"\bnames\b.*--out"):
            dataclasses.replace(PLAN, workdirs=("a", "b"), names=("ours", name)).load_runs()
