"""Tests of the functions for `jax.export`: how the generation step draws; `jobs/test_export_model.py` has the rest."""

import jax
import numpy as np
import pytest

from txl_jax.inference.flat_functions import _draw

LOG_P = np.log(np.array([0.1, 0.4, 0.4, 0.1], np.float32))


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_with_the_probabilities_of_the_temperature(temperature):
    n = 4000
    keys = jax.random.key_data(jax.random.split(jax.random.key(0, impl="threefry2x32"), n))
    temperatures = np.full(n, temperature, np.float32)
    drawn = jax.jit(_draw)(np.tile(LOG_P, (n, 1)), keys, temperatures)
    expected = np.exp(LOG_P / temperature)
    expected /= expected.sum()
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / n, expected, atol=4 * 0.5 / n**0.5)


def test_temperature_zero_takes_the_lowest_id_of_the_likeliest_in_its_rows():
    keys = np.arange(200, dtype=np.uint32).reshape(100, 2)
    temperatures = np.tile(np.array([0, 1], np.float32), 50)
    drawn = np.asarray(jax.jit(_draw)(np.tile(LOG_P, (100, 1)), keys, temperatures))
    assert drawn.dtype == np.int32 and set(drawn[::2]) == {1} and len(set(drawn[1::2])) > 1
