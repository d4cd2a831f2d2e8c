"""Tests of the hash behind the masks of dropout: its definition, its bits, and its masks.

The statistics are p-values. They are below `SMALLEST`, 1e-6, if masks or bits are not random.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import full_but
from support.mask_statistics import SMALLEST, kept_p, p_value, pair_p, sums_p
from txl_jax.ops import random_masks

RATES = (0.05, 0.1, 0.5)
# Ten million numbers.
B = 20
L = 500
D = 1000


# Compiled as a whole, which takes less time than each of their operations by itself.
bits_of = jax.jit(random_masks.bits)
mask_of = jax.jit(random_masks.mask, static_argnums=2)
threshold_of_traced = jax.jit(random_masks.threshold)


def hash_of(seed, *indices):
    """The definition, in integers of any size."""
    full = 2**32 - 1

    def first_half(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D & full
        return x ^ (x >> 15)

    *leading, last = indices
    state = seed & full
    for axis, index in enumerate(leading):
        state = first_half(state ^ (index * 0x9E3779B1 * (2 * axis + 1) & full))
    state = first_half((state + last * 0xC2B2AE3D) & full) * 0x846CA68B & full
    return state ^ (state >> 16)


@pytest.mark.parametrize("lengths", [(5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_bits_and_masks_are_those_of_the_definition(seed, lengths):
    expected = np.zeros(lengths, np.uint32)
    for place in np.ndindex(lengths):
        expected[place] = hash_of(seed, *place)

    bits = bits_of(np.uint32(seed), *np.indices(lengths))
    mask = mask_of(np.uint32(seed), 0.3, lengths)

    assert bits.dtype == jnp.uint32
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(mask, expected >= 0.3 * 2**32)


def test_large_indices_and_negative_seeds_wrap_around():
    """All products and sums are taken modulo 2**32, as unsigned integers of 32 bits."""
    wrapped = bits_of(-1, np.int32(70_000), np.int32(2**31 - 1))
    assert int(wrapped) == hash_of(2**32 - 1, 70_000, 2**31 - 1)


def test_an_array_without_axes_has_the_index_0():
    assert int(bits_of(5)) == hash_of(5, 0)


def test_rank_is_a_part_of_the_definition_and_lengths_are_not():
    def mask(*shape):
        return np.asarray(mask_of(jnp.uint32(3), 0.5, shape))

    whole = mask(4, 6, 50)
    np.testing.assert_array_equal(mask(3, 5, 40), whole[:3, :5, :40])
    assert (mask(6, 50) != whole[0]).any()

    # Axes are told apart: a mask is not the same after a transposition.
    square = mask(50, 50)
    assert (square != square.T).any()


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.0, 0),
        (0.5, 2**31),
        (0.25, 2**30),
        # The largest float32 below 1, and 1, whose threshold must not wrap around to 0.
        (1 - 2**-24, 2**32 - 2**8),
        (1.0, 2**32 - 2**8),
    ],
)
def test_threshold_is_that_of_the_rate_traced_or_not(rate, expected):
    assert int(random_masks.threshold(rate)) == expected
    assert int(threshold_of_traced(rate)) == expected


@functools.cache
def large_mask(rate, seed=11):
    return np.asarray(mask_of(jnp.uint32(seed), rate, (B, L, D)))


@pytest.mark.parametrize("rate", RATES)
def test_the_kept_share_and_sums_along_each_axis_are_random(rate):
    mask = large_mask(rate)
    assert kept_p(mask, rate) > SMALLEST
    for axis in range(3):
        assert sums_p(mask, rate, axis) > SMALLEST, f"axis {axis}"


@pytest.mark.parametrize("rate", RATES)
def test_neighbours_are_independent(rate):
    """Next to each other or with one number between them, by position and by row of the batch.

    Masks of two seeds are independent too.
    """
    mask = large_mask(rate)

    def assert_independent(name, first, second):
        assert pair_p(first, second, rate) > SMALLEST, name

    assert_independent("next number", mask[..., 1:], mask[..., :-1])
    assert_independent("next but one", mask[..., 2:], mask[..., :-2])
    assert_independent("next position", mask[:, 1:], mask[:, :-1])
    assert_independent("next row", mask[1:], mask[:-1])
    assert_independent("next row and position", mask[1:, 1:], mask[:-1, :-1])
    assert_independent("next row, last position", mask[1:, :-1], mask[:-1, 1:])
    assert_independent("next position, last number", mask[:, 1:, :-1], mask[:, :-1, 1:])
    assert_independent("next seed", mask, large_mask(rate, seed=12))
    assert_independent("seed with another first bit", mask, large_mask(rate, seed=11 + 2**31))


def counters(kind, n):
    """The seed and the indices of n combinations. One of them counts up, the others stay.

    "word" has a single index, as the mask of dropped words has. "all" counts through the numbers
    of an array [.., 128, 128].
    """
    count = np.arange(n, dtype=np.int32)
    seed = np.uint32(77)
    if kind == "last":
        return seed, 5, 3, count
    if kind == "position":
        return seed, 5, count, 3
    if kind == "row":
        return seed, count, 5, 3
    if kind == "word":
        return seed, count
    if kind == "all":
        return seed, count // 2**14, count // 2**7 % 2**7, count % 2**7
    assert kind == "seed"
    return count.astype(np.uint32), 5, 3, 1


@pytest.mark.parametrize("n", full_but([2**18], [2**18, 10_000_000]))
@pytest.mark.parametrize("kind", ["last", "position", "row", "word", "all", "seed"])
def test_bits_are_fair_and_uncorrelated(kind, n):
    """Each of the 32 bits, pairs of bits of a number, pairs of bits of a number and of the next
    number, and the high half with the low half.
    """
    bits = np.asarray(bits_of(*counters(kind, n)))
    signs = np.empty((32, n), np.float32)
    for bit in range(32):
        signs[bit] = 1 - 2 * ((bits >> bit) & 1).astype(np.float32)

    # Sums of n signs are nearly normal with the variance n.
    scale = np.sqrt(n)
    sums = {
        "each bit": signs.sum(1) / scale,
        "two bits of a number": (signs @ signs.T)[np.triu_indices(32, 1)] / scale,
        "bits of two numbers": (signs[:, 1:] @ signs[:, :-1].T).ravel() / scale,
    }
    for name, normal in sums.items():
        assert p_value(normal) > SMALLEST, name
        # A single pair may stand out where the sum does not show it.
        largest = np.abs(normal).max()
        assert normal.size * p_value(largest) > SMALLEST, (name, largest)

    # Five neighbouring bits of the high half and five of the low half, from these bits on, make one
    # of 1024 cells.
    for high, low in itertools.product((16, 22, 27), (0, 6, 11)):
        cells = ((bits >> high) % 32) * 32 + (bits >> low) % 32
        expected = n / 1024
        deviations = (np.bincount(cells, minlength=1024) - expected) / np.sqrt(expected)
        # The cells sum to a constant, which takes one degree of freedom of 1024.
        assert p_value(deviations) > SMALLEST, (high, low)


def drop_by_constant(array, mask, rate):
    """Dropout by a mask that is a constant."""
    return jnp.where(mask, array / jnp.asarray(1 - rate, array.dtype), 0)


class Derivatives(NamedTuple):
    """The value of a function and its derivatives."""

    value: jax.Array
    gradient: jax.Array  # Reverse mode.
    tangent: jax.Array  # Forward mode.
    second: jax.Array  # Forward over reverse mode, of the sum of squares.


def derivatives(function, array, tangent, cotangent):
    value, pull_back = jax.vjp(function, array)
    squares = jax.grad(lambda array: jnp.sum(function(array) ** 2))
    return Derivatives(
        value=value,
        gradient=pull_back(cotangent)[0],
        tangent=jax.jvp(function, (array,), (tangent,))[1],
        second=jax.jvp(squares, (array,), (tangent,))[1],
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 1, 7)], ids=["whole mask", "shared by positions"])
def test_values_and_derivatives_are_those_of_a_mask_that_is_a_constant(dtype, shape):
    """Bit for bit."""
    numbers = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3, 5, 7)), dtype)
    # An array, a tangent and a cotangent.
    arrays = tuple(np.asarray(numbers))
    seed = jnp.uint32(9)
    rate = 0.3
    mask = mask_of(seed, rate, shape)

    def drop(array):
        return random_masks.drop(array, seed=seed, rate=rate, mask_shape=shape)

    def expected_drop(array):
        return drop_by_constant(array, mask, rate)

    results = jax.jit(functools.partial(derivatives, drop))(*arrays)
    expected = jax.jit(functools.partial(derivatives, expected_drop))(*arrays)

    for name in Derivatives._fields:
        result = getattr(results, name)
        assert result.dtype == dtype, name
        np.testing.assert_array_equal(result, getattr(expected, name), err_msg=name)
    dropped = np.asarray(results.value) == 0
    assert dropped.any()
    assert not dropped.all()


def kept_sizes(function):
    """The sizes of the arrays that the backward pass of a function of 1,500 numbers keeps."""
    pull_back = jax.eval_shape(lambda array: jax.vjp(function, array)[1], np.ones((30, 50)))
    return [leaf.size for leaf in jax.tree.leaves(pull_back)]


def test_the_backward_pass_keeps_the_seed_and_no_array():
    def drop(array):
        return random_masks.drop(array, seed=jnp.uint32(9), rate=0.3, mask_shape=array.shape)

    seed_size = 1
    assert kept_sizes(drop) == [seed_size]


def test_the_backward_pass_of_a_constant_mask_keeps_arrays():
    """So `kept_sizes` would show the test above an array that is kept."""
    mask = np.ones((30, 50), bool)

    assert max(kept_sizes(lambda array: drop_by_constant(array, mask, 0.3))) == mask.size
