"""Tests the ambient mesh: a thread has none of its own, and a model raises instead of running unconstrained."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from txl_jax import sharding
from txl_jax.config import MeshConfig
from txl_jax.errors import UserError
from txl_jax.sharding import axes
from txl_jax.sharding.activations import constrain

MESH = sharding.abstract_mesh(MeshConfig(data=2, fsdp=2, tensor=2), 8)


def on_thread(function):
    """Returns the result of the function, called on a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def shape_of_hidden():
    """Traces a model for eight devices."""
    model = tiny.make().clone(num_devices=8)
    tokens, memory = jnp.zeros((8, 2), jnp.int32), model.init_memory(batch_size=8, mem_len=4)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens, memory)
    return jax.eval_shape(lambda v: model.apply(v, tokens, memory)[0], variables).shape


def test_a_thread_has_no_mesh_of_its_own():
    x = np.arange(8.0)
    with sharding.use_mesh(MESH):
        assert sharding.num_batch_shards() == 4
        assert sharding.num_vocab_shards() == 2
        assert sharding.vocab_axis() == "tensor"
        assert on_thread(sharding.ambient_mesh) is None
        assert on_thread(lambda: (sharding.num_batch_shards(), sharding.num_vocab_shards())) == (1, 1)
        assert on_thread(lambda: constrain(x, axes.BATCH)) is x  # The array itself.


def test_a_model_for_several_devices_raises_without_its_mesh():
    with sharding.use_mesh(MESH):
        assert shape_of_hidden() == (8, 2, tiny.D)
        with pytest.raises(UserError, match=r"8 devices .* ambient mesh has 1"):
            on_thread(shape_of_hidden)
        with pytest.raises(UserError, match=r"1 devices .* ambient mesh has 8"):
            sharding.check_ambient_mesh(1)

    def entered():
        with sharding.use_mesh(MESH):
            return shape_of_hidden()

    assert on_thread(entered) == (8, 2, tiny.D)


def test_one_device_is_left_alone():
    mesh = sharding.make_mesh(MeshConfig(data=1))
    jitted = jax.jit(lambda x: x + 1)
    assert sharding.bind_mesh(mesh, jitted) is jitted
    with sharding.use_mesh(mesh):
        assert sharding.ambient_mesh() is None
        sharding.check_ambient_mesh(1)


def test_bound_functions_enter_their_mesh_on_any_thread(on_eight_devices):
    found = on_eight_devices("-m", "support.eight_devices", "few", JAX_ENABLE_X64="1")["thread"]
    assert found == {"bare": [1, 1.0], "bound": [[2, 2], 4.0], "lowered": 8, "shape": [8, 4]}
