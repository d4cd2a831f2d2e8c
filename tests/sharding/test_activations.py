"""Tests that the activations of a layer are pinned to where their rows, heads and inner width belong on a mesh."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest

from support import tiny
from txl_jax import sharding
from txl_jax.config import Encoding, MeshConfig
from txl_jax.inference import forward

MESH = sharding.abstract_mesh(MeshConfig(data=2, fsdp=2, tensor=2), 8)


def pinned(function, *arguments):
    """The mesh axes that a traced program pins arrays to, loops included, and how many arrays."""
    found = constraints(jax.make_jaxpr(function)(*arguments))
    return collections.Counter(tuple(equation.params["sharding"].spec) for equation in found)


def constraints(jaxpr):
    """The equations that pin something, of a program and of all that it calls."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "sharding_constraint":
            yield equation
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                yield from constraints(part)


def expected(rows, *, outputs=1, heads=4, inner=1):
    """Outputs [B, L, D]; queries, keys, values and what is attended [B, H, L, E]; inner states [B, L, F]."""
    return {(rows, None, None): outputs, (rows, "model", None, None): heads, (rows, None, "model"): inner}


@pytest.fixture
def model():
    return dataclasses.replace(tiny.make(), spread=sharding.spread(MESH))


@pytest.mark.parametrize(("batch_size", "rows"), [(8, ("data", "fsdp")), (6, None)])
def test_layers_of_training_and_of_reading(model, batch_size, rows):
    """Rows that do not divide, as the one row of a published evaluation, are whole."""
    tokens = jnp.zeros((batch_size, 2), jnp.int32)
    params = tiny.variables(model)["params"]
    flags = {"clamp_len": None, "same_length": False, "deterministic": True}
    memory = model.init_memory(batch_size=batch_size, mem_len=4)
    found = pinned(lambda *both: model.apply({"params": params}, *both, **flags), tokens, memory)
    assert found == expected(rows)  # In the loop over layers.
    weights = forward.prepare_params(params, model, segment_len=2, mem_len=4, clamp_len=0)
    ring = forward.init_memory(weights, model, batch_size=batch_size, mem_len=4, segment_len=2)
    found = pinned(lambda *both: forward.read(weights, model, *both, window=None), tokens, ring)
    assert found == expected(rows, outputs=tiny.N, heads=3 * tiny.N, inner=tiny.N)


def test_absolute_positions_too(model):
    model = dataclasses.replace(tiny.make(encoding=Encoding.VASWANI), spread=model.spread)
    tokens, memory = jnp.zeros((8, 2), jnp.int32), model.init_memory(batch_size=8, mem_len=4)
    flags = {"clamp_len": None, "same_length": False, "deterministic": True}
    variables = tiny.variables(model)
    assert pinned(lambda *both: model.apply(variables, *both, **flags), tokens, memory) == expected(("data", "fsdp"))


def test_one_device_pins_nothing():
    model, tokens = tiny.make(), jnp.zeros((8, 2), jnp.int32)
    variables, memory = tiny.variables(model), model.init_memory(batch_size=8, mem_len=4)
    flags = {"clamp_len": None, "same_length": False, "deterministic": True}
    assert not pinned(lambda *both: model.apply(variables, *both, **flags), tokens, memory)
