"""States with every kind of leaf, and comparing checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np


def make_state(seed=0):
    """Every kind of leaf that a run has; the memory of a model without recurrence is the empty one."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "params": {"q": jax.random.normal(keys[0], (3, 5)), "layers": [jax.random.normal(keys[1], (2,)), jnp.ones(7)]},
        "memory": {"hidden": jax.random.normal(keys[2], (2, 3, 4), jnp.bfloat16), "valid": jnp.arange(3) + seed},
        "empty": jnp.zeros((2, 3, 0, 4), jnp.bfloat16),
        "step": jnp.int32(seed),
    }


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def step_names(directory):
    return sorted(path.name for path in directory.iterdir())
