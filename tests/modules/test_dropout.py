"""Tests dropout: masks and who shares them, expectations, and rates that are traced; anchors have
its places.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but
from txl_jax.config import DType, Network
from txl_jax.modules.dropout import dropout
from txl_jax.modules.embedding import Embedding
from txl_jax.modules.recurrent import RecurrentModel
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.training import member_axis

RNGS = {"dropout": jax.random.key(0)}
DRAWING = {"clamp_len": None, "same_length": False, "deterministic": False}
L = 40
config = tiny.model_config


@pytest.mark.parametrize("locked", [False, True])
def test_locked_masks_are_shared_by_positions_and_not_by_rows(locked):
    drop = dropout(config(dropout__locked=locked), 0.4, deterministic=False)
    found = np.asarray(drop.apply({}, jnp.ones((50, L, 60)), rngs=RNGS))
    assert set(np.unique(found)) == {0.0, np.float32(1 / 0.6)}
    assert found.mean() == pytest.approx(1, abs=0.03)
    assert (found == found[:, :1]).all() == locked
    assert (found[0] != found[1]).any()
    # Position codes have no rows.
    codes = np.asarray(drop.apply({}, jnp.ones((L, 60)), rngs=RNGS))
    assert (codes == codes[:1]).all() == locked


def test_whole_words_are_dropped_at_all_their_positions():
    embedding = Embedding(config(dropout__embedding=0.5), tiny.V)
    tokens = jnp.asarray(tiny.text(L))
    variables = {"params": {"table_0": jnp.ones((tiny.V, tiny.D))}}
    whole = embedding.apply(variables, tokens)
    found = np.asarray(embedding.apply(variables, tokens, deterministic=False, rngs=RNGS))
    after, seen = np.asarray(tokens)[:, 1:], found[:, 1:]
    kept = {int(token): seen[after == token] for token in np.unique(after)}
    for rows in kept.values():
        assert (rows == rows[0, 0]).all() and rows[0, 0] in (0.0, 2 * whole[0, 0, 0])
    assert {float(rows[0, 0]) for rows in kept.values()} == {0.0, float(2 * whole[0, 0, 0])}
    # But where they begin a segment, they stay as they are.
    first = embedding.apply(variables, jnp.arange(tiny.V)[:, None], deterministic=False, rngs=RNGS)
    np.testing.assert_array_equal(first, jnp.broadcast_to(whole[0, 0, 0], first.shape))


def model_of(network, **changes):
    build = TransformerXL if network is Network.TRANSFORMER_XL else RecurrentModel
    return build(config(network=network, **changes), tiny.V)


@pytest.mark.parametrize("network", full_but([Network.QRNN], Network))
def test_traced_rates_are_those_of_the_config(network, x64):
    """Vmapped over models with other rates, each of all six: what each would give whose config has
    them.
    """
    model = model_of(network, dtype=DType.FLOAT64, dropout__rate=0.9)
    memory = model.init_memory(batch_size=tiny.B, mem_len=3)
    params = tiny_run.params(model)
    rngs = {"dropout": jax.random.key(0, impl="rbg")}  # Which compiles faster.

    def hidden(model):
        return model.apply({"params": params}, tiny.text(5), memory, rngs=rngs, **DRAWING)[0]

    settings = [
        dict(zip(member_axis.RATES, np.arange(6) / 10 + shift, strict=True)) for shift in (0.1, 0.2)
    ]
    traced = jax.tree.map(lambda *numbers: jnp.asarray(numbers), *settings)
    found = jax.jit(jax.vmap(lambda rates: hidden(member_axis.with_rates(model, rates))))(traced)
    of_config = {f"dropout__{name}": float(rate) for name, rate in settings[1].items()}
    of_own = model_of(network, dtype=DType.FLOAT64, **of_config)
    expected = jax.jit(functools.partial(hidden, of_own))()
    np.testing.assert_allclose(found[1], expected, rtol=1e-12, atol=1e-12)
    assert np.abs(found[0] - found[1]).max() > 0.01


def test_scoring_leaves_nothing_out():
    rates = {f"dropout__{name}": 0.5 for name in ("rate", "attention", "embedding", "qkv")}
    plain, dropped = tiny.make(), tiny.make(**rates)
    variables, memory = tiny.variables(plain), plain.init_memory(batch_size=tiny.B, mem_len=3)
    np.testing.assert_array_equal(
        *(tiny.encoder(of)(variables, tiny.text(5), memory)[0] for of in (plain, dropped))
    )
