"""Tests of the update rules against optax on unstacked layers and against numpy, and of their state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from txl_jax.config import ExperimentConfig, OptimizerConfig, OptimizerName, TrainConfig
from txl_jax.runtime.checkpoint import Checkpointer
from txl_jax.sharding import axes
from txl_jax.training.optimizer import make_optimizer

RATE, STEPS = 0.1, 3
N, D, H, E, F, V = 2, 128, 4, 33, 130, 140  # Sides of 128 and more are factored by Adafactor.
SHAPES = {
    "embedding": {"table_0": (V, D)},
    "softmax": {"bias": (V,)},
    "stack": {
        "biases": {"content": (H, E)},
        "layers": {
            "attention": {"query": (N, D, H, E), "output": (N, H, E, D)},
            "feed_forward": {"inner_kernel": (N, D, F), "inner_bias": (N, F)},
        },
    },
}
AXES = {
    "table_0": (axes.VOCAB, axes.CLUSTER_EMBED),
    "bias": (axes.VOCAB,),
    "content": (axes.HEADS, axes.HEAD_DIM),
    "query": (axes.LAYERS, axes.EMBED, axes.HEADS, axes.HEAD_DIM),
    "output": (axes.LAYERS, axes.HEADS, axes.HEAD_DIM, axes.EMBED),
    "inner_kernel": (axes.LAYERS, axes.EMBED, axes.INNER),
    "inner_bias": (axes.LAYERS, axes.INNER),
}


def config_of(name, **own):
    """A config of a constant learning rate, without clipping."""
    optimizer = OptimizerConfig(name=name, learning_rate=RATE, min_lr_ratio=1.0, clip_norm=1e9, **own)
    return ExperimentConfig(optimizer=optimizer, train=TrainConfig(steps=10))


def drawn(seed, *, scale=1.0):
    """A tree of numbers of `SHAPES`, in the type of the test."""
    rng = np.random.default_rng(seed)
    is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731  # A name for one expression.
    return jax.tree.map(lambda shape: jnp.asarray(scale * rng.normal(size=shape), float), SHAPES, is_leaf=is_shape)


def unstacked(tree):
    """The tensors by name, one for each layer, and attention's as matrices."""
    found = {"table": tree["embedding"]["table_0"], "bias": tree["softmax"]["bias"], "u": tree["stack"]["biases"]}
    for i in range(N):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], tree["stack"]["layers"])
        attention = layer["attention"]
        found[f"query {i}"] = attention["query"].reshape(D, H * E)
        found[f"output {i}"] = attention["output"].reshape(H * E, D)
        found[f"feed_forward {i}"] = layer["feed_forward"]
    return found


def updated(optimizer, params):
    """The parameters after each of some updates by drawn gradients."""

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, found = optimizer.init(params), []
    for i in range(STEPS):
        grads = drawn(i + 1, scale=0.1)
        grads = grads if "stack" in params else unstacked(grads)
        params, state = step(params, state, grads)
        found.append(params)
    return found


def is_decayed(params):
    """Mask of the decay, in the tree of `unstacked`: matrices."""
    return {
        name: {"inner_kernel": True, "inner_bias": False} if "feed_forward" in name else name not in ("bias", "u")
        for name in params
    }


PEERS = {
    OptimizerName.LAMB: lambda: optax.lamb(RATE, eps=1e-8, weight_decay=0.3, mask=is_decayed),
    OptimizerName.ADAFACTOR: lambda: optax.adafactor(RATE, weight_decay_rate=0.3 * RATE, weight_decay_mask=is_decayed),
    OptimizerName.LION: lambda: optax.lion(RATE, weight_decay=0.3, mask=is_decayed),
}


@pytest.mark.parametrize("name", PEERS)
def test_updates_are_those_of_optax_on_each_layers_matrices(name, x64):
    params = drawn(0)
    params["softmax"]["bias"] *= 0  # As it begins.
    found = updated(make_optimizer(config_of(name, weight_decay=0.3)), params)
    expected = updated(PEERS[name](), unstacked(params))
    for mine, theirs in zip(found, expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), unstacked(mine), theirs)


def orthogonalized(matrix):
    """Five steps of Newton and Schulz, as Jordan et al. give them."""
    x = matrix / np.linalg.norm(matrix)
    x = x if matrix.shape[0] <= matrix.shape[1] else x.T
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def test_muon_orthogonalizes_each_layers_matrices_and_adam_moves_the_rest(x64):
    params, grads = drawn(0), drawn(1)
    optimizer = make_optimizer(config_of(OptimizerName.MUON))
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    found, grads = unstacked(updates), unstacked(grads)
    for i in range(N):
        pairs = {name: (found[f"{name} {i}"], grads[f"{name} {i}"]) for name in ("query", "output")}
        pairs["kernel"] = tuple(tree[f"feed_forward {i}"]["inner_kernel"] for tree in (found, grads))
        for mine, gradient in pairs.values():
            expected = -RATE * 0.2 * np.sqrt(max(gradient.shape)) * orthogonalized(np.asarray(gradient))
            np.testing.assert_allclose(mine, expected, rtol=1e-8, atol=1e-10)
            assert np.sqrt(np.mean(np.square(mine))) == pytest.approx(0.2 * RATE, rel=0.25)
        by_adam = found[f"feed_forward {i}"]["inner_bias"], grads[f"feed_forward {i}"]["inner_bias"]
        np.testing.assert_allclose(by_adam[0], -RATE * np.sign(by_adam[1]), rtol=1e-5)
    np.testing.assert_allclose(found["table"], -RATE * np.sign(grads["table"]), rtol=1e-3)


@pytest.mark.full
def test_restored_states_continue_bit_for_bit(tmp_path):
    def config(name):
        return config_of(name, weight_decay=0.0 if name is OptimizerName.ADAM else 0.3)

    optimizers = {name.value: make_optimizer(config(name)) for name in OptimizerName}

    @jax.jit
    def step(states, grads):
        def of_one(optimizer, params, state):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return {name: of_one(optimizers[name], *state) for name, state in states.items()}

    states = {name: (params := drawn(0), optimizer.init(params)) for name, optimizer in optimizers.items()}
    states = step(step(states, drawn(1)), drawn(2))
    with Checkpointer(tmp_path, keep=1, log=print) as checkpoints:
        checkpoints.save(2, states, {})
        _, restored, _ = checkpoints.restore(states)
    assert jax.tree.structure(restored) == jax.tree.structure(states)
    jax.tree.map(np.testing.assert_array_equal, step(restored, drawn(3)), step(states, drawn(3)))


def axes_of_state(name):
    """The axis names of the state's boxes, by field and by name of the parameter."""
    boxed = jax.tree.map_with_path(
        lambda path, leaf: nn.LogicallyPartitioned(leaf, AXES[path[-1].key]), drawn(0), is_leaf=lambda x: x is None
    )
    state = jax.eval_shape(make_optimizer(config_of(name)).init, boxed)
    found = {}
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731  # As above.
    for path, leaf in jax.tree.leaves_with_path(state, is_leaf=is_box):
        field = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-1]
        if is_box(leaf):
            assert len(leaf.names) == leaf.value.ndim
            found[f"{field} {path[-1].key}"] = leaf.names
    return found


def test_a_moment_has_the_axes_of_its_parameter():
    both = {f"{field} {name}": names for name, names in AXES.items() for field in ("mu", "nu")}
    assert axes_of_state(OptimizerName.ADAM) == axes_of_state(OptimizerName.LAMB) == both
    first = {f"mu {name}": names for name, names in AXES.items()}
    assert axes_of_state(OptimizerName.LION) == first
    matrices = ("query", "output", "inner_kernel")
    assert axes_of_state(OptimizerName.MUON).items() == both.items() - {(f"nu {name}", AXES[name]) for name in matrices}


def test_rows_and_columns_of_adafactor_have_the_axis_that_they_keep():
    layers, embed, heads, inner = axes.LAYERS, axes.EMBED, axes.HEADS, axes.INNER
    assert axes_of_state(OptimizerName.ADAFACTOR) == {
        "v_row query": (layers, embed),  # 128 x 132: v_row is the mean over the longer side.
        "v_col query": (layers, heads),
        "v_row output": (layers, embed),
        "v_col output": (layers, heads),
        "v_row inner_kernel": (layers, embed),
        "v_col inner_kernel": (layers, inner),
        "v_row table_0": (axes.CLUSTER_EMBED,),
        "v_col table_0": (axes.VOCAB,),
        **{f"v {name}": AXES[name] for name in ("bias", "content", "inner_bias")},
    }
