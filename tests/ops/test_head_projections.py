"""Tests the projections to heads that devices of a mesh share: numbers, and what is computed."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from txl_jax.config import MeshConfig, NormPlace
from txl_jax.ops import head_projections
from txl_jax.sharding.mesh import abstract_mesh, use_mesh

B, M, L, D, H, E = 2, 4, 3, 6, 2, 5


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


def weighted_sum(project, memory, segment, kernel):
    """A sum in which every key has a weight of its own."""
    keys = project(memory, segment, kernel)
    return jnp.sum(keys * jnp.arange(1.0, keys.size + 1).reshape(keys.shape))


def test_members_of_an_ensemble_have_their_own_gradients(x64):
    kernels = normal(4, D, H, E)
    arrays = normal(B, M, D), normal(B, L, D)

    def gradient(kernel):
        project = head_projections.project_with_one_kernel_gradient
        return jax.grad(weighted_sum, 3)(project, *arrays, kernel)

    together = jax.vmap(gradient)(kernels)
    for kernel, found in zip(kernels, together, strict=True):
        np.testing.assert_allclose(found, gradient(kernel), rtol=1e-12)


@pytest.mark.parametrize("arguments", [(1, 2), (0, 1, 2), (2,)])
def test_the_gradient_in_one_product_is_that_of_two(arguments, x64):
    arrays = normal(B, M, D), normal(B, L, D), normal(D, H, E)
    found, expected = (
        jax.grad(weighted_sum, tuple(1 + index for index in arguments))(project, *arrays)
        for project in (
            head_projections.project_with_one_kernel_gradient,
            head_projections.project_apart,
        )
    )
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12)


def products_of_a_layer(mesh, norm):
    """Counts the matmuls of a layer, forward and backward, by the sorted sizes of their result."""
    model = tiny.make(layer_norm=norm)
    tokens = jnp.zeros((8, L), jnp.int32)
    options = {"clamp_len": None, "same_length": False, "deterministic": True}

    def loss(params, memory):
        return model.apply({"params": params}, tokens, memory, **options)[0].sum()

    with use_mesh(mesh):
        params = tiny.variables(model)["params"]
        memory = model.init_memory(batch_size=8, mem_len=7)
        program = jax.make_jaxpr(jax.grad(loss))(params, memory)
    return collections.Counter(
        tuple(sorted(equation.outvars[0].aval.shape))
        for equation in tiny.equations(program)
        if equation.primitive.name == "dot_general"
    )


FSDP = abstract_mesh(MeshConfig(fsdp=2), 8)
GRADIENT_OF_MEMORY = tuple(sorted((8, 7, tiny.D)))
GRADIENT_OF_KERNEL = tuple(sorted((tiny.D, tiny.H, tiny.E)))


@pytest.mark.parametrize(("mesh", "kernels"), [(None, 7), (FSDP, 5)])
def test_fsdp_has_one_product_for_a_kernels_gradient_and_none_for_the_memorys(mesh, kernels):
    """The kernels of queries, keys, values, positions and the output. On one device, those of keys
    and values have two products each.
    """
    products = products_of_a_layer(mesh, NormPlace.POST)
    assert products[GRADIENT_OF_KERNEL] == kernels
    assert products[GRADIENT_OF_MEMORY] == 0


@pytest.mark.parametrize("mesh", [None, FSDP])
def test_a_norm_before_attention_needs_the_gradient_of_the_memorys_rows(mesh):
    products = products_of_a_layer(mesh, NormPlace.PRE)
    assert products[GRADIENT_OF_MEMORY] == 2
