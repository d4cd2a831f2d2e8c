"""Random masks from a counter-based hash: the mask of a number depends only on its index.

A mask is a function of a seed and of indices, and of nothing else. So the forward and the backward
pass, every mesh and every platform draw the same mask, and none of them stores it. A generator with
a state, or one keyed by the shape of the array like `jax.random.bernoulli`, has a mask per array,
costs about ten times the operations, and is too expensive to run twice.

The hash runs the multiply-xorshift rounds of Wellons's lowbias32
(https://nullprogram.com/blog/2018/07/31/): a short one for each leading axis, and a whole one per
number. It has integer operations only, so that compilers fuse it into the operation that reads the
mask, and it also works in kernels.

With a state of 32 bits, an array of n numbers has about n^2 / 2^33 pairs of numbers that share
their bits: each of 10 million numbers has one such twin with a probability of 0.2 %. They come in
runs, as a few pairs of rows share a stretch that is shifted along the last axis. Which rows these
are differs from seed to seed.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Version of all dropout masks, with those of attention probabilities. It is raised if the same seed
# gives other masks. A run records it (`dropout_masks` in config.json), because training that goes
# on with other masks is another experiment:
#
# 1  jax.random.bernoulli for activations, a counter hash for attention probabilities. Its records
#    have no such field.
# 2  A counter hash for all masks.
MASKS_VERSION = 2

# Factors that spread neighbouring indices over the 32 bits. They are odd. Leading axis i has
# 2 i + 1 times the first one, which is about 2^32 / golden ratio.
_LEADING = 0x9E3779B1
_LAST = np.uint32(0xC2B2AE3D)
_LARGEST = np.float32(2**32 - 2**8)  # The largest float32 below 2^32.


def drop(
    array: jax.Array, *, seed: Any, rate: float | jax.Array, mask_shape: Sequence[int]
) -> jax.Array:
    """Zeros random numbers of an array, and divides the others by 1 - rate.

    The backward pass computes the mask again. It keeps the seed, and neither mask nor array.

    Args:
      array: Any floats.
      seed: uint32 []. Sample another one for each use.
      rate: Fraction that is zeroed, at least 0 and below 1. A number or a traced scalar.
      mask_shape: Shape of the mask, which broadcasts to the array's.
    """

    def apply(array: jax.Array, seed: jax.Array) -> jax.Array:
        return scale_kept(array, mask(seed, rate, mask_shape), rate)

    return recomputed(apply)(array, seed)


def recomputed(function: Any) -> Any:
    """Returns a function that computes a mask again in the backward pass, instead of storing it.

    The compiler may still merge the two computations of a mask if they are in the same loop body,
    where it can judge which one is cheaper. Forbidding that would also keep the gradient from being
    fused with the mask.
    """
    return jax.checkpoint(function, prevent_cse=False)


def scale_kept(array: jax.Array, kept: jax.Array, rate: float | jax.Array) -> jax.Array:
    """Returns the kept numbers of an array divided by 1 - rate, and 0 for the others."""
    return jnp.where(kept, array / jnp.asarray(1 - rate, array.dtype), 0)


def mask(seed: Any, rate: float | jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns which numbers of an array are kept, bool.

    Whether a number is kept depends on the indices along all axes, whose number counts too: a mask
    [L, D] is not the first row of a mask [B, L, D]. It does not depend on the lengths of the axes.
    """
    # One index array per axis, [B, 1, 1], [1, L, 1] and [1, 1, D]. Whole arrays of indices would
    # be kept in memory where a compiler moves them out of the loop over layers.
    indices = []
    for axis, length in enumerate(shape):
        index_shape = [1] * len(shape)
        index_shape[axis] = length
        indices.append(jax.lax.broadcasted_iota(jnp.uint32, index_shape, axis))
    return is_kept(seed, rate, *indices)


def is_kept(seed: Any, rate: float | jax.Array, *indices: Any) -> jax.Array:
    """Returns whether the numbers at these indices are kept, bool. See `bits` for the indices."""
    return bits(seed, *indices) >= threshold(rate)


def threshold(rate: float | jax.Array) -> jax.Array:
    """Returns the uint32 below which random bits drop a number.

    It is rate * 2^32, computed from the rate in float32.
    """
    scaled = jnp.asarray(rate, jnp.float32) * np.float32(2**32)
    return jnp.minimum(scaled, _LARGEST).astype(jnp.uint32)


def bits(seed: Any, *indices: Any) -> jax.Array:
    """Returns 32 random bits for each combination of indices, as uint32.

    The arguments are integers that broadcast, one index for each axis of an array. The last one
    costs about 10 operations per combination, since the others are hashed before it is added.
    """
    # An array without axes has one number.
    *leading, last = indices or (0,)
    shared = as_uint32(seed)
    for axis, index in enumerate(leading):
        factor = np.uint32(_LEADING * (2 * axis + 1) % 2**32)
        shared = rounds(shared ^ (as_uint32(index) * factor), last=False)
    return rounds(shared + as_uint32(last) * _LAST, last=True)


def rounds(x: jax.Array, *, last: bool) -> jax.Array:
    """Mixes the bits of uint32 numbers: the whole lowbias32 if `last`, otherwise its first half."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    if not last:
        return x
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def as_uint32(x: Any) -> jax.Array:
    """Returns integers as uint32. Negative ones wrap around."""
    return jnp.asarray(x).astype(jnp.uint32)
