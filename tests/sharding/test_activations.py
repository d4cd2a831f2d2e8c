"""Tests the ambient mesh, and that it constrains a layer's activations to where rows, heads and inner width belong."""

import collections
import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from txl_jax import sharding
from txl_jax.config import MeshConfig
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain

MESH = sharding.abstract_mesh(MeshConfig(data=2, fsdp=2, tensor=2), 8)
FLAGS = {"clamp_len": None, "same_length": False, "deterministic": True}


def constrained(function, *arguments):
    """The mesh axes that a traced program constrains arrays to, loops included, and how many arrays."""
    found = tiny.equations(jax.make_jaxpr(function)(*arguments))
    specs = (each.params["sharding"].spec for each in found if each.primitive.name == "sharding_constraint")
    return collections.Counter(map(tuple, specs))


def expected(rows, *, outputs=1, heads=4, inner=1):
    """Outputs [B, L, D]; queries, keys, values and what is attended [B, H, L, E]; inner states [B, L, F]."""
    return {(rows, None, None): outputs, (rows, "tensor", None, None): heads, (rows, None, "tensor"): inner}


@pytest.mark.parametrize(("batch_size", "rows"), [(8, ("data", "fsdp")), (6, None)])
def test_layers_of_training_and_of_inference(batch_size, rows):
    """Rows that do not divide, as the one row of a published evaluation, are replicated."""
    model, tokens = tiny.make(), jnp.zeros((batch_size, 2), jnp.int32)
    with sharding.use_mesh(MESH):
        variables, memory = tiny.variables(model), model.init_memory(batch_size=batch_size, mem_len=4)
        found = constrained(lambda *both: model.apply(variables, *both, **FLAGS), tokens, memory)
        assert found == expected(rows)  # In the loop over layers.
        weights = prepare_params(variables["params"], model, segment_len=2, mem_len=4, clamp_len=0)
        ring = forward.init_cache(weights, batch_size=batch_size, mem_len=4, segment_len=2)
        found = constrained(lambda *both: forward.forward(weights, *both), tokens, ring)
    assert found == expected(rows, outputs=tiny.N, heads=3 * tiny.N, inner=tiny.N)


def on_thread(function):
    """Returns the result of the function, called on a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_one_device_is_left_alone():
    mesh = sharding.make_mesh(MeshConfig(data=1))
    jitted = jax.jit(lambda x: x + 1)
    assert sharding.bind_mesh(mesh, jitted) is jitted
    with sharding.use_mesh(mesh):
        assert sharding.ambient_mesh() is None
    model, tokens = tiny.make(), jnp.zeros((8, 2), jnp.int32)
    variables, memory = tiny.variables(model), model.init_memory(batch_size=8, mem_len=4)
    assert not constrained(lambda *both: model.apply(variables, *both, **FLAGS), tokens, memory)


def test_a_thread_has_a_mesh_in_bound_functions_only():
    def shards():
        return sharding.num_batch_shards(), sharding.num_vocab_shards()

    shards.lower = shards.eval_shape = shards
    bound, x = sharding.bind_mesh(MESH, shards), np.arange(8.0)
    with sharding.use_mesh(MESH):
        assert shards() == (4, 2) and sharding.vocab_axis() == "tensor"
        assert on_thread(sharding.ambient_mesh) is None and on_thread(shards) == (1, 1)
        assert on_thread(lambda: constrain(x, axes.BATCH)) is x  # The array itself.
    assert on_thread(lambda: (bound(), bound.lower(), bound.eval_shape())) == ((4, 2),) * 3
