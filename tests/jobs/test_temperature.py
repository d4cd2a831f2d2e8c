"""Tests the temperature job: scores against logits divided by hand, what is chosen, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import drawn_run, tiny_run
from txl_jax.config import Network
from txl_jax.errors import UserError
from txl_jax.jobs import temperature
from txl_jax.jobs.temperature import Plan
from txl_jax.jobs.workdir import TextInfo

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=Network)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("temperature")
    config, corpus = drawn_run.on_text(folder, drawn_run.letters(), model__network=request.param)
    return config, corpus, *drawn_run.make(folder / "run", config, corpus)


def choose(run, temperatures):
    config, corpus, workdir, _ = run
    return temperature.run(
        config, corpus, workdir, Plan(tuple(temperatures)), trained_on=TextInfo.of(corpus), log=lambda line: None
    )


def by_hand(run, tokens, t):
    """Mean nats of a text from all logits, divided by t."""
    config, _, _, parts = run
    span, params = config.eval, tiny_run.params(parts.model)
    memory, total = parts.model.init_memory(batch_size=1, mem_len=span.mem_len), 0.0
    table = params["embedding"]["table_0"]
    for start in range(0, len(tokens) - 1, span.segment_len):
        part = tokens[start : start + span.segment_len + 1]
        hidden, memory = parts.model.apply(
            {"params": params},
            jnp.asarray(part[None, :-1]),
            memory,
            clamp_len=span.clamp_len,
            same_length=span.same_length,
            deterministic=True,
        )
        logits = (hidden[0] @ table.T + jnp.asarray(params["softmax"]["bias"])[None]) / t
        total -= float(jax.nn.log_softmax(logits)[np.arange(len(part) - 1), part[1:]].sum())
    return total / (len(tokens) - 1)


def test_scores_are_those_of_logits_divided(run):
    results = choose(run, [0.8, 2.0])
    assert list(results["valid"]) == ["0.8", "1", "2"]
    for t in (0.8, 1.0, 2.0):
        expected = by_hand(run, np.asarray(run[1].valid), t)
        assert results["valid"][f"{t:g}"]["loss"] == pytest.approx(expected, rel=1e-5)
    best = min((0.8, 1.0, 2.0), key=lambda t: results["valid"][f"{t:g}"]["loss"])
    assert results["best"] == best != 1.0
    assert set(results["test"]) == {"1", f"{best:g}"}
    expected = by_hand(run, np.asarray(run[1].test), best)
    assert results["test"][f"{best:g}"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert json.loads((run[2].path / "temperature.json").read_text()) == json.loads(json.dumps(results))
    with pytest.raises(UserError, match="temperature"):
        Plan(()).validate()
