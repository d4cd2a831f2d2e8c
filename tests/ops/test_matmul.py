"""Tests the product of rows and a matrix, in both of its forms."""

import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.ops.matmul import project


@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (2,), (3, 1), (2, 4)])
@pytest.mark.parametrize("n", [1, 6, 7])
@pytest.mark.parametrize("columns", [(5,), (3, 2, 4)])
def test_project_is_the_product(rows, n, columns, x64):
    rng = np.random.default_rng(0)
    inputs, kernel = rng.normal(size=(*rows, n)), rng.normal(size=(n, *columns))
    found = project(jnp.asarray(inputs), jnp.asarray(kernel))
    np.testing.assert_allclose(found, np.tensordot(inputs, kernel, 1), rtol=0, atol=1e-13)


def test_the_type_is_that_of_the_inputs():
    assert project(jnp.ones((1, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)).dtype == jnp.bfloat16
