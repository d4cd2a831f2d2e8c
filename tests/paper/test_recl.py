"""Tests RECL: losses at exact contexts, the files, a stop, and refusals."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from support import tiny_run
from txl_jax.config import Encoding, Network
from txl_jax.paper import plots, recl
from txl_jax.paper.recl import Plan
from txl_jax.runs.score import Interrupted

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
    return recl.run(*group, dataclasses.replace(plan, out=str(folder)), **{"log": str, **others})


@functools.partial(jax.jit, static_argnums=0)
def last_nll(model, variables, texts):
    """The loss of the last token of each text, after those before it and no memory."""
    options = {"clamp_len": None, "same_length": False, "deterministic": True}
    hidden, _ = model.apply(variables, texts[:, :-1], model.init_memory(batch_size=len(texts), mem_len=0), **options)
    return model.apply(variables, hidden[:, -1:], texts[:, -1:], method=model.nll)[:, 0]


@pytest.mark.full
def test_losses_are_those_of_the_context_alone(group, tmp_path):
    lengths = run(group, tmp_path)
    members, corpus = group
    tokens = np.asarray(corpus.test)
    for member in members:
        parts = tiny_run.parts(**{k.replace(".", "__"): v for k, v in MODELS[member].items()}, model__dropout__rate=0.0)
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
    assert (tmp_path / "recl.csv").exists() and "| ours | " in (tmp_path / "recl.md").read_text()
    assert any(tmp_path.glob("*.png")) == plots.can_draw()
    with pytest.raises(ValueError, match=r"\bstride\D*\b3\b\D*\b2\b"):  # Losses of another plan do not count.
        run(group, tmp_path, dataclasses.replace(PLAN, stride=2))


@pytest.mark.full
def test_plans_and_groups_that_do_not_go_are_refused(group, tmp_path):
    for changes, pattern in (
        ({"lengths": (2, 8, 0)}, r"\b2,8,0\b"),
        ({"lengths": (5, 9, 5)}, r"\b5,9,5\b"),
        ({"ratios": (0.0,)}, r"\b0\.0\b"),
        ({"lengths": (100, 200, 100)}, r"\b200\b.*\b56\b"),
    ):
        with pytest.raises(ValueError, match=pattern):
            run(group, tmp_path, dataclasses.replace(PLAN, **changes))
    members, corpus = group
    with pytest.raises(Interrupted):
        run(group, tmp_path / "stopped", stop_requested=lambda: True)
    with pytest.raises(ValueError, match=r"\b1\b"):
        run(({"ours": members["ours"]}, corpus), tmp_path)
    with pytest.raises(ValueError, match="ours, ours"):
        dataclasses.replace(PLAN, workdirs=("a", "b"), names=("ours", "ours")).load_runs()
