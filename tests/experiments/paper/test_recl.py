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
    """Returns losses [models, positions] by context length, of one model for each stop.

    At 100 tokens positions have 4 or 2 nats, so the hardest tenth of them are positions of 4. A
    model's losses fall by 0.02 nats every hundred tokens of context up to its stop.
    """
    hard = np.array([4.0, 2.0, 4.0, 2.0, 2.0, 2.0, 4.0, 2.0, 2.0, 2.0])
    by_length = {}
    for length in LENGTHS:
        useful = np.minimum(length, stops) - LENGTHS[0]
        by_length[length] = hard - 0.02 * useful[:, None] / 100
    return by_length


@pytest.mark.parametrize(("ratio", "first"), [(0.1, 300), (0.5, 300), (1.0, 300), (1.0, None)])
def test_a_model_whose_gain_stops_at_a_known_length_or_never(ratio, first):
    """The first model stops at `first` or, for None, not within the lengths. The second stops at
    700. Both do so at any fraction of the hardest positions.
    """
    of_first, of_second = recl.gains(losses(first or 5000, 700), ratio=ratio)
    assert recl.effective_length(of_first) == first
    assert recl.effective_length(of_second) == 700


def test_baseline_and_hardest_positions_are_the_groups():
    """Either model is the better one somewhere, and each would choose another position as its
    hardest.
    """
    by_length = {
        100: np.array([[3.0, 5.0, 1.0], [4.0, 1.0, 6.0]]),
        200: np.array([[2.9, 4.0, 1.0], [2.0, 0.9, 5.0]]),
    }
    # The baseline is the better model's loss with the shorter context: 3, 1 and 1. A tenth of three
    # positions is one, the first, which is the hardest.
    [[first], [second]] = recl.gains(by_length, ratio=0.1)
    assert (first.context, first.longer) == (100, 200)
    assert first.relative == pytest.approx(1 - math.exp(2.9 - 3))
    assert second.relative == pytest.approx(1 - math.exp(-1))
    assert first.perplexity == pytest.approx(math.exp(3) - math.exp(2.9))


def test_each_length_has_its_own_baseline():
    """The baseline at 400 tokens is the first model's, which stopped at 300. From 500 on it is the
    second model's own, whose gains then count in full.
    """
    by_length = losses(300, 300)
    for length in LENGTHS:
        by_length[length][1] += 0.005 - 0.02 * max(length - 400, 0) / 100
    _, steps = recl.gains(by_length, ratio=1.0)
    assert steps[3].context == 400
    # The second model goes from 0.005 above the baseline, which counts as no loss more, to 0.015
    # below it.
    assert steps[3].relative == pytest.approx(1 - math.exp(-0.015), rel=1e-6)
    assert steps[4].relative == pytest.approx(1 - math.exp(-0.02), rel=1e-6)


PLAN = Plan(lengths=(2, 8, 3), stride=3, batch_size=4)  # Contexts of 2, 5 and 8 tokens.
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
    """Compares the group, with results in a directory."""
    return recl.compare(*group, dataclasses.replace(plan, out=str(folder)), **others)


@functools.partial(jax.jit, static_argnums=0)
def last_nll(model, variables, texts):
    """Returns the loss of the last token of each text, after the others and without memory."""
    memory = model.init_memory(batch_size=len(texts), mem_len=0)
    hidden, _ = model.apply(
        variables,
        texts[:, :-1],
        memory,
        clamp_len=None,
        same_length=False,
        deterministic=True,
    )
    return model.apply(variables, hidden[:, -1:], texts[:, -1:], method=model.nll)[:, 0]


@pytest.mark.full
def test_losses_are_those_of_the_context_alone_and_are_kept(group, tmp_path, monkeypatch):
    lengths = run(group, tmp_path)
    members, corpus = group
    tokens = np.asarray(corpus.test)
    # Every third token has a loss, from the first one with the longest context of 8 on.
    n_loss = len(range(8, len(tokens), 3))
    for member in members:
        changes = {name.replace(".", "__"): value for name, value in MODELS[member].items()}
        parts = tiny_run.parts(**changes, model__dropout__rate=0.0)
        model = parts.model.clone(vocab_size=corpus.vocabulary.size)
        variables = {"params": tiny_run.params(model)}
        for context in PLAN.contexts:
            stored = np.load(tmp_path / "losses" / member / f"{context}.npy")
            assert len(stored) == n_loss
            places = [0, 5, n_loss - 1]
            texts = []
            for place in places:
                end = 8 + 3 * place
                texts.append(tokens[end - context : end + 1])
            expected = last_nll(model, variables, np.stack(texts))
            message = f"{member} with {context} tokens of context"
            np.testing.assert_allclose(stored[places], expected, rtol=2e-5, err_msg=message)

    assert list(lengths) == list(MODELS)
    for member, of_ratios in lengths.items():
        assert len(of_ratios) == len(recl.RATIOS) == 3, member
    record = json.loads((tmp_path / "recl.json").read_text())
    assert record["recl"] == lengths
    assert record["tokens"] == n_loss
    assert "| ours | " in (tmp_path / "recl.md").read_text()
    with open(tmp_path / "recl.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for step, row in zip(record["gains"], rows, strict=True):
        assert {name: str(value) for name, value in step.items()} == row
    assert any(tmp_path.glob("*.png")) == plots.can_draw()

    # Nothing is computed again: there is no function for it.
    monkeypatch.setattr(recl, "context_losses", None)
    assert run(group, tmp_path) == lengths
    # The losses of another plan do not count.
    with pytest.raises(ValueError, match=r"\bstride\D*\b3\b\D*\b2\b"):
        run(group, tmp_path, dataclasses.replace(PLAN, stride=2))


@pytest.mark.full
def test_plans_and_groups_that_cannot_be_compared_are_refused(group, tmp_path):
    """A text of 56 tokens without one of 200, a single run, names that are equal, and names that
    would lead out of --out. A stop is not an error of the plan, and is passed on.
    """
    with pytest.raises(ValueError, match=r"\b56\b.*\b200\b"):
        run(group, tmp_path, dataclasses.replace(PLAN, lengths=(100, 200, 100)))
    with pytest.raises(Interrupted):
        run(group, tmp_path / "stopped", stop_requested=lambda: True)
    with pytest.raises(ValueError, match=r"\b1\b"):
        dataclasses.replace(PLAN, workdirs=("a",)).load_runs()
    with pytest.raises(ValueError, match="ours, ours"):
        dataclasses.replace(PLAN, workdirs=("a", "b"), names=("ours", "ours")).load_runs()
    for name in ("../outside", "/outside", "..", ".", ".hidden", "a/b", ""):
        with pytest.raises(ValueError, match=r"\bnames\b.*--out"):
            dataclasses.replace(PLAN, workdirs=("a", "b"), names=("ours", name)).load_runs()
