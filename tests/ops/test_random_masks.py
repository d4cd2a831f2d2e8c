"""Tests the hash behind the masks of dropout: its definition, its bits, and the masks it makes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import full_but
from support.mask_statistics import SMALLEST, kept_p, p_value, pair_p, sums_p
from txl_jax.ops import random_masks

RATES = (0.05, 0.1, 0.5)
B, L, D = 20, 500, 1000  # Ten million numbers.


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


@pytest.mark.parametrize("lengths", [(5,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_bits_and_masks_are_those_of_the_definition(seed, lengths):
    grid = np.indices(lengths)
    expected = [hash_of(seed, *map(int, place)) for place in grid.reshape(len(lengths), -1).T]
    bits = random_masks.bits(np.uint32(seed), *grid)
    assert bits.dtype == jnp.uint32
    np.testing.assert_array_equal(np.asarray(bits).ravel(), np.asarray(expected, np.uint32))

    mask = random_masks.mask(np.uint32(seed), 0.3, lengths)
    kept = [number >= 0.3 * 2**32 for number in expected]
    np.testing.assert_array_equal(np.asarray(mask).ravel(), kept)


def test_large_indices_and_negative_seeds_wrap_around():
    found = random_masks.bits(-1, np.int32(70_000), np.int32(2**31 - 1))
    assert int(found) == hash_of(2**32 - 1, 70_000, 2**31 - 1)
    assert int(random_masks.bits(5)) == hash_of(5, 0)


def test_rank_is_a_part_of_the_definition_and_lengths_are_not():
    mask = functools.partial(random_masks.mask, jnp.uint32(3), 0.5)
    whole = np.asarray(mask((4, 6, 50)))
    np.testing.assert_array_equal(mask((3, 5, 40)), whole[:3, :5, :40])
    assert (mask((6, 50)) != whole[0]).any()
    # Axes are told apart: a mask is not the same after a transposition.
    assert (np.asarray(mask((50, 50))) != np.asarray(mask((50, 50))).T).any()


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(0.0, 0), (0.5, 2**31), (0.25, 2**30), (1 - 2**-24, 2**32 - 2**8), (1.0, 2**32 - 2**8)],
)
def test_threshold_is_that_of_the_rate_traced_or_not(rate, expected):
    assert int(random_masks.threshold(rate)) == expected
    assert int(jax.jit(random_masks.threshold)(rate)) == expected


@functools.cache
def mask_of(rate, seed=11):
    made = jax.jit(lambda seed: random_masks.mask(seed, rate, (B, L, D)))(jnp.uint32(seed))
    return np.asarray(made)


@pytest.mark.parametrize("rate", RATES)
def test_the_kept_share_and_sums_along_each_axis_are_random(rate):
    mask = mask_of(rate)
    assert kept_p(mask, rate) > SMALLEST
    for axis in range(3):
        assert sums_p(mask, rate, axis) > SMALLEST, axis


@pytest.mark.parametrize("rate", RATES)
def test_neighbours_are_independent(rate):
    """In a row of numbers, at one and two places between them, by position and by row of the batch;
    and two seeds.
    """
    mask = mask_of(rate)
    pairs = {
        "next number": (mask[..., 1:], mask[..., :-1]),
        "next but one": (mask[..., 2:], mask[..., :-2]),
        "next position": (mask[:, 1:], mask[:, :-1]),
        "next row": (mask[1:], mask[:-1]),
        "next row and position": (mask[1:, 1:], mask[:-1, :-1]),
        "next row, last position": (mask[1:, :-1], mask[:-1, 1:]),
        "next position, last number": (mask[:, 1:, :-1], mask[:, :-1, 1:]),
        "next seed": (mask, mask_of(rate, seed=12)),
        "seed with another first bit": (mask, mask_of(rate, seed=11 + 2**31)),
    }
    for name, (first, second) in pairs.items():
        assert pair_p(first, second, rate) > SMALLEST, name


def counters(kind, n):
    """Bits of n combinations of indices."""
    index = np.arange(n)
    indices = {
        "last": (5, 3, index),
        "position": (5, index, 3),
        "row": (index, 5, 3),
        "word": (index,),
        "all": (index // 2**14, index // 2**7 % 2**7, index % 2**7),
    }
    if kind == "seed":
        return np.asarray(random_masks.bits(np.asarray(index, np.uint32), 5, 3, 1))
    return np.asarray(random_masks.bits(np.uint32(77), *indices[kind]))


@pytest.mark.parametrize("n", full_but([2**18], [2**18, 10_000_000]))
@pytest.mark.parametrize("kind", ["last", "position", "row", "word", "all", "seed"])
def test_bits_are_fair_and_uncorrelated(kind, n):
    """Each of 32, each pair of one number's, each pair of one number's and the next one's, and the
    high and low halves.
    """
    bits = counters(kind, n)
    signs = np.empty((32, bits.size), np.float32)
    for bit in range(32):
        signs[bit] = 1 - 2 * ((bits >> bit) & 1).astype(np.float32)
    scale = np.sqrt(bits.size)

    fair = signs.sum(1) / scale
    same = (signs @ signs.T)[np.triu_indices(32, 1)] / scale
    following = (signs[:, 1:] @ signs[:, :-1].T).ravel() / scale
    for name, normal in {"fair": fair, "same": same, "following": following}.items():
        assert p_value(normal) > SMALLEST, name
        # A single pair may stand out where the sum does not show it.
        largest = np.abs(normal).max()
        assert normal.size * p_value(largest) > SMALLEST, (name, largest)

    # Five bits of the high half and five of the low one, for each place of the five.
    for high, low in itertools.product((16, 22, 27), (0, 6, 11)):
        cells = ((bits >> high) % 32) * 32 + (bits >> low) % 32
        expected = bits.size / 1024
        deviations = (np.bincount(cells, minlength=1024) - expected) / np.sqrt(expected)
        # The cells sum to a constant, which takes one degree of freedom of 1024.
        assert p_value(deviations) > SMALLEST, (high, low)


def constant(array, kept, rate):
    return jnp.where(kept, array / jnp.asarray(1 - rate, array.dtype), 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (3, 1, 7)])
def test_values_and_derivatives_are_those_of_a_mask_that_is_a_constant(dtype, shape):
    """Bit for bit; of reverse mode, forward mode, and of a second derivative."""
    numbers = np.random.default_rng(0).normal(size=(3, 3, 5, 7))
    array, tangent, gradient = (jnp.asarray(each, dtype) for each in numbers)
    seed, rate = jnp.uint32(9), 0.3
    kept = random_masks.mask(seed, rate, shape)

    def derivatives(function):
        value, pull_back = jax.vjp(function, array)
        pushed = jax.jvp(function, (array,), (tangent,))[1]
        squares = jax.grad(lambda array: jnp.sum(function(array) ** 2))
        second = jax.jvp(squares, (array,), (tangent,))[1]
        return value, pull_back(gradient)[0], pushed, second

    def drop(array):
        return random_masks.drop(array, seed=seed, rate=rate, mask_shape=shape)

    found = jax.jit(lambda: derivatives(drop))()
    expected = jax.jit(lambda: derivatives(lambda array: constant(array, kept, rate)))()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, other)
    assert (np.asarray(found[0]) == 0).any() and (np.asarray(found[0]) != 0).any()


def test_the_backward_pass_keeps_the_seed_and_no_array():
    def drop(array):
        return random_masks.drop(array, seed=jnp.uint32(9), rate=0.3, mask_shape=array.shape)

    _, pull_back = jax.vjp(drop, jnp.ones((30, 50)))
    kept = jax.tree.leaves(pull_back)
    assert [leaf.size for leaf in kept] == [1] * len(kept)
    # A mask as a constant is one array, which is what this test would see.
    _, stored = jax.vjp(
        lambda array: constant(array, jnp.ones((30, 50), bool), 0.3), jnp.ones((30, 50))
    )
    assert max(leaf.size for leaf in jax.tree.leaves(stored)) == 1500
