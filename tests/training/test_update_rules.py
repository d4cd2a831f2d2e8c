"""Tests of the update rules against optax on unstacked layers and against numpy, and of their state."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from txl_jax import sharding
from txl_jax.config import ExperimentConfig, MeshConfig, OptimizerConfig, OptimizerName, TrainConfig
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
# On a mesh with fsdp and tensor; a bias of the vocabulary is whole.
SPECS = {
    "table_0": PartitionSpec(("tensor",), ("fsdp",)),
    "content": PartitionSpec("tensor", None),
    "query": PartitionSpec(None, "fsdp", "tensor", None),
    "output": PartitionSpec(None, "tensor", None, "fsdp"),
    "inner_kernel": PartitionSpec(None, "fsdp", "tensor"),
    "inner_bias": PartitionSpec(None, "tensor"),
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


def sharded_state(name):
    """The mesh axes of the state's arrays that are not whole on each device, by field and by name of the parameter."""
    boxed = jax.tree.map_with_path(lambda path, leaf: nn.LogicallyPartitioned(leaf, AXES[path[-1].key]), drawn(0))
    state = jax.eval_shape(make_optimizer(config_of(name)).init, boxed)
    shardings = sharding.param_shardings(sharding.abstract_mesh(MeshConfig(data=1, fsdp=2, tensor=2), 4), state)
    found = {}
    pairs = zip(jax.tree.leaves_with_path(shardings), jax.tree.leaves(nn.unbox(state)), strict=True)
    for (path, placed), array in pairs:
        placed.shard_shape(array.shape)  # It divides.
        field = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)][-1]
        if any(placed.spec):
            found[f"{field} {path[-1].key}"] = placed.spec
    return found


def test_moments_are_sharded_as_their_parameters():
    both = {f"{field} {name}": spec for name, spec in SPECS.items() for field in ("mu", "nu")}
    assert sharded_state(OptimizerName.ADAM) == sharded_state(OptimizerName.LAMB) == both
    assert sharded_state(OptimizerName.LION) == {f"mu {name}": spec for name, spec in SPECS.items()}
    matrices = ("query", "output", "inner_kernel")
    assert sharded_state(OptimizerName.MUON).items() == both.items() - {
        (f"nu {name}", SPECS[name]) for name in matrices
    }
    # Rows, columns and placeholders are whole.
    assert sharded_state(OptimizerName.ADAFACTOR) == {f"v {name}": SPECS[name] for name in ("content", "inner_bias")}
