"""cuDNN's attention with position scores as a bias (XLA's in its place) against the reference."""

import jax.numpy as jnp
import pytest

from ops.attention.gpu import test_attention as training
from ops.attention.gpu import test_cached as cached
from support.cases import full_but
from txl_jax.ops.attention.cached import CachedVisibility
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.gpu.attention import gpu_attention
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Tile

OPTIONS = {"tile": Tile(128, 64), "kernel": "cudnn"}


@pytest.mark.full
@pytest.mark.parametrize("given", [training.RELATIVE, training.SHAW, training.PLAIN, training.SCORES, training.NAMES])
def test_encodings_and_chunks(given):
    visibility = Visibility(jnp.asarray([12, 3, 0]), 21, 12, 9)
    training.check(training.arguments(L=21, M=12, E=16, given=given, B=3), visibility, table_bytes=1, **OPTIONS)


def test_both_sides_and_padding():
    visibility = Visibility(jnp.asarray([5, 0, 2]), 20, 5, causal=False, lengths=jnp.asarray([20, 0, 3]))
    training.check(training.arguments(L=20, M=5, E=16, causal=False, B=3), visibility, **OPTIONS)


def test_chunks_and_a_rest():
    """Two rows of 3, then the last."""
    visibility = Visibility(jnp.asarray([12, 3, 0]), 21, 12)
    size = 2 * (2 * 21 * 33 * 4)
    training.check(training.arguments(L=21, M=12, E=16, B=3), visibility, table_bytes=size, **OPTIONS)


@pytest.mark.parametrize(
    ("keys", "scores", "clamp"),
    full_but([(True, True, 5)], [(True, True, 5), (True, False, None), (False, False, None)]),
)
def test_cached(keys, scores, clamp):
    visibility = CachedVisibility(jnp.asarray([48, 9, 1]), jnp.int32(20), 8, 48, 30)
    given = cached.arguments(L=8, R=48, E=16, B=3, clamp=clamp, keys=keys, scores=scores)
    cached.check(given, visibility, table_bytes=1, **OPTIONS)


def test_dropout_is_refused():
    given = {name: array for name, array in training.arguments(L=8, M=8, E=16, B=2).items() if array is not None}
    with pytest.raises(ValueError, match=r"dropout.*\bcuDNN\b.*\bauto\b"):
        gpu_attention(
            **given,
            visibility=Visibility(jnp.asarray([8, 3]), 8, 8),
            dropout=Dropout(0.5, jnp.uint32(7), 2),
            interpret=True,
            **OPTIONS,
        )
