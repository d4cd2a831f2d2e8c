"""Tests of the projections to heads that devices of a mesh share: numbers, and what is computed.

A product is a matmul of rows [memory; segment] with a kernel [D, H, E], or its gradient.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax.config import MeshConfig, NormPlace
from txl_jax.ops import head_projections
from txl_jax.sharding.mesh import abstract_mesh, use_mesh

B = 2
M = 4
L = 3
D = 6
H = 2
E = 5
# The arguments of a projection, by their index.
MEMORY = 0
SEGMENT = 1
KERNEL = 2


def normal(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape))


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(project, arguments, memory, segment, kernel):
    """Gradients by the arguments with these indices.

    They are of a sum in which every key has another weight.
    """

    def weighted_sum(*arrays):
        keys = project(*arrays)
        return jnp.sum(keys * jnp.arange(1.0, keys.size + 1).reshape(keys.shape))

    return jax.grad(weighted_sum, arguments)(memory, segment, kernel)


def test_members_of_an_ensemble_have_their_own_gradients(x64):
    """Under `vmap`, each member's gradient equals the gradient of its kernel by itself."""
    memory = normal(B, M, D)
    segment = normal(B, L, D)
    kernels = normal(4, D, H, E)

    def gradient(kernel):
        project = head_projections.project_with_one_kernel_gradient
        return gradients(project, (KERNEL,), memory, segment, kernel)[0]

    together = jax.jit(jax.vmap(gradient))(kernels)

    for i, kernel in enumerate(np.asarray(kernels)):
        np.testing.assert_allclose(
            together[i], gradient(kernel), rtol=1e-12, err_msg=f"ensemble member {i}"
        )


@pytest.mark.parametrize(
    "arguments",
    [(SEGMENT, KERNEL), (MEMORY, SEGMENT, KERNEL), (KERNEL,)],
    ids=["segment and kernel", "all arguments", "kernel"],
)
def test_the_gradient_in_one_product_is_that_of_two(arguments, x64):
    """The backward pass is told by which arguments gradients are taken.

    In a model it has none for the memory, unless a layer norm comes before attention.
    """
    arrays = (normal(B, M, D), normal(B, L, D), normal(D, H, E))

    in_one_product = gradients(
        head_projections.project_with_one_kernel_gradient, arguments, *arrays
    )
    # Without a mesh, memory and segment each have a product.
    in_two_products = gradients(head_projections.project_apart, arguments, *arrays)

    assert len(in_one_product) == len(in_two_products) == len(arguments)
    for i, argument in enumerate(arguments):
        np.testing.assert_allclose(
            in_one_product[i], in_two_products[i], rtol=1e-12, err_msg=f"argument {argument}"
        )


def matmuls_of_a_layer(mesh, norm):
    """Counts the matmuls of a layer, forward and backward, by the sorted sizes of their result.

    All layers are one scan, whose matmuls count once.
    """
    model = tiny.make(layer_norm=norm)
    tokens = jnp.zeros((8, L), jnp.int32)

    def loss(params, memory):
        hidden, _ = model.apply(
            {"params": params},
            tokens,
            memory,
            clamp_len=None,
            same_length=False,
            deterministic=True,
        )
        return hidden.sum()

    with use_mesh(mesh):
        params = tiny_run.params(model)
        memory = model.init_memory(batch_size=8, mem_len=7)
        program = jax.make_jaxpr(jax.grad(loss))(params, memory)

    counts = collections.Counter()
    for equation in tiny.equations(program):
        if equation.primitive.name == "dot_general":
            sizes = sorted(equation.outvars[0].aval.shape)
            counts[tuple(sizes)] += 1
    return counts


FSDP = abstract_mesh(MeshConfig(fsdp=2), 8)
GRADIENT_OF_MEMORY = tuple(sorted((8, 7, tiny.D)))
GRADIENT_OF_KERNEL = tuple(sorted((tiny.D, tiny.H, tiny.E)))


@pytest.mark.parametrize(("mesh", "kernels"), [(None, 7), (FSDP, 5)], ids=["one device", "fsdp"])
def test_fsdp_has_one_product_for_a_kernels_gradient_and_none_for_the_memorys(mesh, kernels):
    """The five kernels are for queries, keys, values, positions and the output.

    On one device, the kernels of keys and values have two products each, which makes seven.
    """
    counts = matmuls_of_a_layer(mesh, NormPlace.POST)

    assert counts[GRADIENT_OF_KERNEL] == kernels
    assert counts[GRADIENT_OF_MEMORY] == 0


@pytest.mark.parametrize("mesh", [None, FSDP], ids=["one device", "fsdp"])
def test_a_norm_before_attention_needs_the_gradient_of_the_memorys_rows(mesh):
    counts = matmuls_of_a_layer(mesh, NormPlace.PRE)

    # One product through the keys and one through the values.
    assert counts[GRADIENT_OF_MEMORY] == 2
