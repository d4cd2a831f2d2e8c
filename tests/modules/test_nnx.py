"""Tests of the model as an NNX module, through Flax's bridge (`nnx.bridge.ToNNX`)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from support import tiny
from txl_jax.config import DType
from txl_jax.modules.transformer_xl import TransformerXL

L = 5
M = 4
CLUSTERS = {"cutoffs": (4, 9), "div_val": 2, "d_embed": 8, "tie_projs": (False, True, True)}


def bridged(model: TransformerXL, segment, rngs: nnx.Rngs):
    """The model as a reader makes it an NNX module, with parameters of its own."""
    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    return nnx.bridge.lazy_init(nnx.bridge.ToNNX(model, rngs=rngs), segment, memory)


def params_of(core) -> dict:
    return nnx.to_pure_dict(nnx.state(core, nnx.Param))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(CLUSTERS, id="clusters"),
        pytest.param({"dtype": DType.BFLOAT16, "layer_norm": "pre"}, id="bfloat16"),
    ],
)
def test_nnx_computes_and_trains_as_linen_does(changes):
    """Hidden states, losses and memory, then two updates over a memory that is carried on."""
    model = tiny.make(**changes)
    tokens = tiny.text(2 * L + 1)
    core = bridged(model, tokens[:, :L], nnx.Rngs(0))
    optimizer = nnx.Optimizer(core, optax.adam(1e-2), wrt=nnx.Param)
    for path, variable in nnx.to_flat_state(nnx.state(core, nnx.Param)):
        assert variable[...].dtype == jnp.float32, path
        assert "out_sharding" not in variable.get_metadata(), path

    @nnx.jit
    def step(core, optimizer, inputs, targets, memory):
        def loss(core):
            hidden, after = core(inputs, memory)
            nll = core(hidden, targets, method=model.nll)
            return nll.mean(), (hidden, nll, after)

        (_, outputs), gradients = nnx.value_and_grad(loss, has_aux=True)(core)
        optimizer.update(core, gradients)
        return outputs, nnx.to_pure_dict(gradients)

    @jax.jit
    def linen_step(params, adam, inputs, targets, memory):
        def loss(params):
            hidden, after = model.apply({"params": params}, inputs, memory)
            nll = model.apply({"params": params}, hidden, targets, method=model.nll)
            return nll.mean(), (hidden, nll, after)

        (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, adam = optax.adam(1e-2).update(gradients, adam)
        return optax.apply_updates(params, updates), adam, outputs, gradients

    params = jax.tree.map(jnp.copy, params_of(core))
    adam = optax.adam(1e-2).init(params)
    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    losses = []
    for start in (0, L):
        inputs = tokens[:, start : start + L]
        targets = tokens[:, start + 1 : start + L + 1]
        outputs, gradients = step(core, optimizer, inputs, targets, memory)
        params, adam, expected, expected_gradients = linen_step(
            params, adam, inputs, targets, memory
        )

        hidden, nll, memory = outputs
        assert hidden.dtype == memory.hidden.dtype == model.config.dtype
        assert nll.dtype == jnp.float32
        jax.tree.map(np.testing.assert_array_equal, outputs, expected)
        jax.tree.map(np.testing.assert_array_equal, gradients, expected_gradients)
        jax.tree.map(np.testing.assert_array_equal, params_of(core), params)
        losses.append(float(nll.mean()))
    assert memory.valid.tolist() == [M] * tiny.B
    assert len(set(losses)) == 2


def test_nnx_takes_vectors_and_drops_out():
    """Vectors [B, L, D] create the layers only. Each call samples another dropout."""
    model = tiny.make(dropout__rate=0.5)
    vectors = np.random.default_rng(0).normal(size=(tiny.B, L, tiny.D)).astype(np.float32)
    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    core = bridged(model, vectors, nnx.Rngs(params=0, dropout=1))
    assert set(params_of(core)) == {"stack"}

    @nnx.jit
    def hidden_states(core):
        dropped = [core(vectors, memory, deterministic=False)[0] for _ in range(2)]
        return core(vectors, memory)[0], *dropped

    whole, first, second = hidden_states(core)
    expected, _ = model.apply({"params": params_of(core)}, vectors, memory)

    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
    for one, other in ((whole, first), (whole, second), (first, second)):
        assert np.abs(one - other).max() > 0.1


def test_parameters_are_plain_arrays_on_one_device():
    model = tiny.make(**CLUSTERS)
    memory = model.init_memory(batch_size=1, mem_len=0)

    params = jax.eval_shape(model.init, jax.random.key(0), tiny.text(2, rows=1), memory)["params"]

    leaves = jax.tree.leaves(params, is_leaf=lambda node: not isinstance(node, dict))
    assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
