"""Tests that embedding and softmax hand the right tables and projections to the clusters, however they are tied."""

import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles, tiny

CASES = {
    "full": {},
    "full, untied": {"tie_weight": False},
    "d_embed": {"d_embed": 8},
    "d_embed, tied projection": {"d_embed": 8, "tie_projs": (True,)},
    "div_val 1": {"cutoffs": (4, 11)},
    "div_val 1, mixed projections": {"cutoffs": (4, 11), "d_embed": 8, "tie_projs": (False, True, True)},
    "div_val 2, mixed projections": {"cutoffs": (4, 11), "div_val": 2, "tie_projs": (False, True, False)},
    "div_val 4, untied": {"cutoffs": (4, 11), "d_embed": 16, "div_val": 4, "tie_weight": False},
    "div_val 4, untied tables, tied projections": {
        "cutoffs": (4, 11), "d_embed": 16, "div_val": 4, "tie_weight": False, "tie_projs": (True, True, True)
    },
}  # fmt: skip


def split(table: np.ndarray, cutoffs) -> list[np.ndarray]:
    return np.split(table, list(cutoffs))


def clusters_of(config, params) -> tuple[list[oracles.Cluster], list[oracles.Cluster]]:
    """Weights of the input and of the output side, tied as in the config."""
    embedding, softmax = params["embedding"], params["softmax"]
    many, projected = config.div_val > 1, config.div_val > 1 or config.embed_width != config.d_model

    def tables(owner):
        return (
            [owner[f"table_{c}"] for c in range(config.n_cluster)] if many else split(owner["table_0"], config.cutoffs)
        )

    biases, inputs, outputs = split(softmax["bias"], config.cutoffs), [], []
    in_tables, out_tables = tables(embedding), tables(embedding if config.tie_weight else softmax)
    for c in range(config.n_cluster):
        projection = embedding[f"projection_{c if many else 0}"] if projected else None
        tied = config.tie_projs[c] if config.tie_projs else False
        inputs.append(oracles.Cluster(in_tables[c], None, projection))
        own = softmax[f"projection_{c}"] if projected and not tied else projection
        outputs.append(oracles.Cluster(out_tables[c], biases[c], own))
    return inputs, outputs


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_embedding_and_losses_match_loops_over_tokens(changes, x64):
    model = tiny.make(dtype="float64", **changes)
    variables, config = tiny.variables(model), model.config
    params = {
        group: {k: np.asarray(v) for k, v in variables["params"][group].items()} for group in ("embedding", "softmax")
    }
    inputs, outputs = clusters_of(config, params)
    tokens = np.arange(tiny.V)[None]

    embedded = model.apply(variables, jnp.asarray(tokens), method=lambda m, t: m.embedding(t))
    expected = oracles.embed(tokens, inputs, config.cutoffs, tiny.D) * tiny.D**0.5
    np.testing.assert_allclose(embedded, expected, rtol=0, atol=1e-12)

    hidden = np.random.default_rng(0).normal(size=(1, tiny.V, tiny.D))
    tails = [params["softmax"].get(name) for name in ("tail_table", "tail_bias")]
    nll = model.apply(variables, jnp.asarray(hidden), jnp.asarray(tokens), method=model.nll)
    expected = oracles.adaptive_nll(hidden, tokens, outputs, *tails, config.cutoffs)
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-12)
