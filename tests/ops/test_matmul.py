"""Tests the product of rows and a matrix, in each of its forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.ops.matmul import multiply_by_rows, project, transpose


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("rows", "n"), [((), 7), ((1, 1), 6), ((1,), 1), ((2, 4), 6)])
def test_project_is_the_product(rows, n, is_transposed, x64):
    rng = np.random.default_rng(0)
    inputs, kernel = rng.normal(size=(*rows, n)), rng.normal(size=(n, 3, 2, 4))
    matrix = transpose(jnp.asarray(kernel)) if is_transposed else jnp.asarray(kernel)
    assert matrix.shape == kernel.shape
    found = project(jnp.asarray(inputs), matrix)
    np.testing.assert_allclose(found, np.tensordot(inputs, kernel, 1), rtol=0, atol=1e-13)


@pytest.mark.parametrize("rows", [(), (2, 1), (257,)])
def test_products_with_the_rows_of_a_table_and_their_gradients(rows, x64):
    rng = np.random.default_rng(0)
    states, table, of_products = rng.normal(size=(*rows, 7)), rng.normal(size=(5, 7)), rng.normal(size=(*rows, 5))

    def products(states, table):
        return multiply_by_rows(states, table, jnp.dtype(jnp.float64))

    found, pull_back = jax.vjp(products, jnp.asarray(states), jnp.asarray(table))
    np.testing.assert_allclose(found, states @ table.T, rtol=0, atol=1e-13)
    of_states, of_table = pull_back(jnp.asarray(of_products))
    np.testing.assert_allclose(of_states, of_products @ table, rtol=0, atol=1e-13)
    expected = of_products.reshape(-1, 5).T @ states.reshape(-1, 7)
    np.testing.assert_allclose(of_table, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 300])
def test_narrow_states_are_multiplied_into_a_wide_type(rows):
    states, table = jnp.ones((rows, 3), jnp.bfloat16), jnp.full((2, 3), 1.0078125, jnp.bfloat16)
    assert project(states, table.T).dtype == jnp.bfloat16
    found = multiply_by_rows(states, table, jnp.dtype(jnp.float32))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, np.full((rows, 2), 3.0234375, np.float32))
