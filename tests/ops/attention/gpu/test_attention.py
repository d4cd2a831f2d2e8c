"""The kernels for NVIDIA GPUs (interpreted) against the reference: values, and the gradients of all arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import full_but
from txl_jax.ops.attention import dispatch
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.gpu.attention import gpu_attention
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import REFERENCE, Tile

NAMES = ("query", "key", "value", "position_key", "content_bias", "position_bias", "position_score")
RELATIVE, SHAW, PLAIN, SCORES = NAMES[:6], NAMES[:4], NAMES[:3], (*NAMES[:3], NAMES[6])


def arguments(*, L, M, E, given=RELATIVE, causal=True, dtype=jnp.float32, B=2, H=2):
    n_positions = L + M if causal else 2 * L + M - 1
    shapes = [(B, H, L, E), *[(B, H, L + M, E)] * 2, (H, n_positions, E), *[(H, E)] * 2, (H, n_positions)]
    rng = np.random.default_rng(0)
    drawn = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in zip(NAMES, shapes, strict=True)}
    return {name: drawn[name] for name in given}


def with_gradients(function, given, visibility, dropout):
    @jax.jit
    def run(given, visibility, dropout):
        none = dict.fromkeys(NAMES[4:])
        output, pull = jax.vjp(
            lambda given: function(**{**none, **given}, visibility=visibility, dropout=dropout), given
        )
        cotangent = jnp.asarray(np.random.default_rng(1).normal(size=output.shape), output.dtype)
        return {"output": output, **pull(cotangent)[0]}

    return run(given, visibility, dropout)


def fused(**options):
    return lambda *args, **kwargs: gpu_attention(*args, **kwargs, interpret=True, **options)


def reference(*args, **kwargs):
    return dispatch.attention(*args, **kwargs, implementation=REFERENCE)


def check(given, visibility, dropout=None, *, tolerance=2e-5, **options):
    got = with_gradients(fused(**options), given, visibility, dropout)
    expected = with_gradients(reference, given, visibility, dropout)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        error = jnp.linalg.norm((got[name] - array).astype(jnp.float32)) / jnp.linalg.norm(array.astype(jnp.float32))
        assert error <= tolerance, f"{name}: {error}"
    return got


def dropout_of(rate, n_head=2, **first):
    return Dropout(rate=rate, seed=jnp.uint32(11), n_head=n_head, **first)


@pytest.mark.full
@pytest.mark.parametrize(
    ("L", "M", "E", "tile", "window"),
    [(21, 34, 41, (16, 32), None), (16, 24, 16, (16, 16), None), (40, 5, 16, (32, 16), 9)],
)
def test_causal_with_memory(L, M, E, tile, window):
    """Two bands of queries and one; tiles that do not divide L and K; part-filled memories."""
    valid = jnp.asarray([M, M // 3], jnp.int32)
    check(arguments(L=L, M=M, E=E), Visibility(valid, L, M, window), tile=Tile(*tile))


def test_both_sides_with_memory_and_padding():
    """A row without any key gets zeros and gives no gradients."""
    visibility = Visibility(jnp.asarray([5, 0]), 39, 5, 12, causal=False, lengths=jnp.asarray([30, 0]))
    given = arguments(L=39, M=5, E=16, causal=False)
    result = check(given, visibility, dropout_of(0.3), tile=Tile(16, 16))
    for name in ("output", "query", "key", "value"):
        assert not np.any(result[name][1]), name


ENCODINGS = {"shaw": SHAW, "none": PLAIN, "scores": SCORES, "all": NAMES}


@pytest.mark.parametrize("name", full_but(["all"], ENCODINGS))
def test_encodings(name):
    visibility = Visibility(jnp.asarray([12, 3]), 16, 12)
    check(arguments(L=16, M=12, E=16, given=ENCODINGS[name]), visibility, tile=Tile(16, 16))


def test_chunks_of_rows_and_a_part_of_a_larger_batch():
    """A chunk of two rows and the third, with the dropout masks of these rows and heads among others."""
    given, visibility = arguments(L=16, M=12, E=16, B=3), Visibility(jnp.asarray([12, 3, 0]), 16, 12)
    dropout = dropout_of(0.2, n_head=8, first_row=5, first_head=2)
    row_bytes = 2 * 16 * 40 * 4
    check(given, visibility, dropout, tile=Tile(16, 16), table_bytes=2 * row_bytes)


@pytest.mark.full
def test_bfloat16():
    visibility = Visibility(jnp.asarray([12, 7]), 16, 12)
    given = arguments(L=16, M=12, E=41, dtype=jnp.bfloat16)
    check(given, visibility, dropout_of(0.1), tile=Tile(16, 16), tolerance=2e-2)


@pytest.mark.full
def test_members_of_an_ensemble_have_their_own_rates_seeds_and_memories():
    given = arguments(L=16, M=8, E=16)
    members = jax.tree.map(lambda x: jnp.stack([x, -x]), given)
    visibility = Visibility(jnp.asarray([[8, 3], [0, 5]]), 16, 8)
    dropout = Dropout(rate=jnp.asarray([0.1, 0.4]), seed=jnp.asarray([3, 4], jnp.uint32), n_head=2)
    axes = Dropout(rate=0, seed=0, n_head=2, first_row=None, first_head=None)

    def loss(function, given, visibility, dropout):
        return jnp.sum(function(**given, visibility=visibility, dropout=dropout) ** 2)

    def gradients(function):
        def of_member(given, visibility, dropout):
            return jax.grad(jax.checkpoint(lambda given: loss(function, given, visibility, dropout)))(given)

        return jax.jit(jax.vmap(of_member, in_axes=(0, 0, axes)))(members, visibility, dropout)

    got, expected = gradients(fused(tile=Tile(16, 16), table_bytes=1)), gradients(reference)
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=2e-5 * float(jnp.max(jnp.abs(array))), err_msg=name)
