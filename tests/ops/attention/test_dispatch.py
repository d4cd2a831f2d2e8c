"""Tests of the one entry to attention: it gives what the reference functions give, bit for bit, and refuses the rest.

Position scores without position keys, which no other test of attention has, are compared with a loop here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles
from txl_jax.errors import UserError
from txl_jax.ops.attention import (
    CachedVisibility,
    Dropout,
    Visibility,
    attention,
    cached_attention,
    dot_product_attention,
    relative_attention,
)

B, H, L, M, E = 2, 3, 4, 6, 5
VISIBILITY = Visibility(jnp.asarray([M, 2]), L, M, 7)


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.fixture(name="inputs")
def _inputs():
    return arrays((B, H, L, E), (B, H, M + L, E), (B, H, M + L, E))


def test_without_position_keys_it_is_dot_product_attention(inputs):
    expected = dot_product_attention(*inputs, visibility=VISIBILITY)
    np.testing.assert_array_equal(attention(*inputs, visibility=VISIBILITY, implementation="reference"), expected)


def test_with_position_keys_it_is_relative_attention(inputs):
    key, score, u, v = arrays((H, M + L, E), (H, M + L), (H, E), (H, E))
    terms = {"content_bias": u, "position_bias": v, "position_score": score}
    expected = relative_attention(*inputs, key, **terms, visibility=VISIBILITY)
    found = attention(*inputs, key, **terms, visibility=VISIBILITY, implementation="reference")
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - attention(*inputs, visibility=VISIBILITY)).max() > 0.01


@pytest.mark.parametrize("valid", [[M, 2], [0, M]])
def test_position_scores_alone_match_a_loop_over_pairs(valid, x64):
    rng, visibility = np.random.default_rng(1), Visibility(jnp.asarray(valid), L, M, 7)
    inputs = [rng.normal(size=(B, H, n, E)) for n in (L, M + L, M + L)]
    score, without = rng.normal(size=(H, M + L)), (np.zeros((H, M + L, E)), np.zeros((H, E)), np.zeros((H, E)))
    expected = oracles.relative_attention(*inputs, *without, mask=visibility.mask(), position_score=score)
    found = attention(*inputs, position_score=jnp.asarray(score), visibility=visibility)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_position_scores_alone_are_those_beside_position_keys_of_zeros(x64):
    """Values and gradients, those of the scores included."""
    rng = np.random.default_rng(1)
    inputs = [jnp.asarray(rng.normal(size=(B, H, n, E))) for n in (L, M + L, M + L)]
    weights, score = rng.normal(size=(B, H, L, E)), jnp.asarray(rng.normal(size=(H, M + L)))

    def weighted_sum(inputs, score, position_key=None):
        return jnp.sum(weights * attention(*inputs, position_key, position_score=score, visibility=VISIBILITY))

    step = jax.value_and_grad(weighted_sum, argnums=(0, 1))
    found, expected = step(inputs, score), step(inputs, score, jnp.zeros((H, M + L, E)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)
    assert np.abs(found[1][1]).max() > 0.01


@pytest.mark.parametrize("name", ["content_bias", "position_bias"])
def test_biases_without_position_keys_are_refused(inputs, name):
    [bias, score] = arrays((H, E), (H, M + L))
    with pytest.raises(ValueError, match=rf"{name}\b.*\bposition_key\b"):
        attention(*inputs, **{name: bias}, position_score=score, visibility=VISIBILITY)


def changed(**changes):
    """Arguments of a call, some of them changed; a function changes the argument that is there."""
    query, key, value, position_key, u, v = arrays(
        (B, H, L, E), (B, H, M + L, E), (B, H, M + L, E), (H, M + L, E), (H, E), (H, E)
    )
    given = {"query": query, "key": key, "value": value, "position_key": position_key}
    given |= {"content_bias": u, "position_bias": v, "visibility": VISIBILITY}
    return given | {name: new(given[name]) if callable(new) else new for name, new in changes.items()}


def sees(**changes):
    return lambda old: old.replace(**changes)


def as_type(dtype):
    return lambda old: old.astype(dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": lambda old: old.tolist()}, r"query\b.*\blist\b"),
        ({"query": lambda old: old[0]}, r"query\b.*\(3, 4, 5\).*\[B, H, L, E\]"),
        ({"query": lambda old: old[:, :, :0], "visibility": sees(segment_len=0)}, r"\(2, 3, 0, 5\)"),
        ({"query": lambda old: old.swapaxes(1, 2)}, r"\(2, 4, 3, 5\).*\b3\b.*segment_len is 4"),
        ({"key": lambda old: old[:, :, 1:]}, r"key\b.*\(2, 3, 9, 5\).*M 6.*\(2, 3, 10, 5\)"),
        ({"value": lambda old: old[..., 1:]}, r"value\b.*\(2, 3, 10, 4\).*\(2, 3, 10, 5\)"),
        ({"position_key": lambda old: old.swapaxes(0, 1)}, r"position_key\b.*\(10, 3, 5\).*\(3, 10, 5\)"),
        ({"visibility": sees(causal=False)}, r"position_key\b.*causal=False.*\(3, 13, 5\)"),
        ({"content_bias": lambda old: old[0]}, r"content_bias\b.*\(5,\).*\(3, 5\)"),
        ({"position_score": np.zeros((H, M), np.float32)}, r"position_score\b.*\(3, 6\).*\(3, 10\)"),
        ({name: as_type(int) for name in ("query", "key", "value")}, r"query\b.*\bint32\b.*floating"),
        ({"value": as_type("bfloat16")}, r"value\b.*\bbfloat16\b.*\bfloat32\b"),
        ({"position_key": as_type("float16")}, r"position_key\b.*\bfloat16\b.*\bfloat32\b"),
        ({"visibility": sees(window=0)}, r"window is 0\b.*\b1\b"),
        ({"visibility": sees(valid=M)}, r"valid is int\b.*\[2\]"),
        ({"visibility": sees(valid=np.zeros(B))}, r"valid is float64 \[2\].*int32 \[2\]"),
        ({"visibility": sees(lengths=np.ones((B, L), bool))}, r"lengths is bool \[2, 4\].*int32 \[2\]"),
        ({"visibility": sees(lengths=np.ones(1, int))}, r"lengths is int64 \[1\].*int32 \[2\]"),
        ({"key": lambda old: old[:, :, : L - 1], "visibility": sees(mem_len=-1)}, r"mem_len is -1\b.*\b0\b"),
        ({"dropout": (np.float32(1), 7)}, r"rate of dropout is 1\.0\b"),
        ({"dropout": Dropout(0.5, jnp.uint32(7), H - 1)}, r"n_head is 2\b.*\b3 heads\b"),
        ({"dropout": 0.5}, r"dropout is 0\.5\b.*\(rate, seed\)"),
        ({"dropout": (1.0, 7)}, r"rate of dropout is 1\.0\b"),
        ({"dropout": (-0.1, 7)}, r"rate of dropout is -0\.1\b"),
        ({"dropout": (0.5, jax.random.key(0))}, r"seed of dropout is key.*uint32"),
        ({"dropout": (0.5, jax.random.PRNGKey(0))}, r"seed of dropout is uint32 \[2\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(changes, words):
    attention(**changed())
    with pytest.raises(ValueError, match=words):
        attention(**changed(**changes))


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        ("fused", r"cannot be fused.*\bcpu\b.*\bauto\b"),
        ("flash", r"'flash'.*\bauto, reference, tiled, fused\b"),
        (None, r"\bNone\b.*\bauto, reference, tiled, fused\b"),
    ],
)
def test_a_path_that_cannot_serve_is_refused_in_one_sentence(implementation, words):
    with pytest.raises(UserError, match=words):
        attention(**changed(), implementation=implementation)


def test_a_refusal_names_the_kv_cache():
    own, visibility = arrays(*[(B, H, L, E)] * 3), CachedVisibility(jnp.asarray([M, 2]), jnp.int32(0), L, M)
    with pytest.raises(UserError, match=r"over a KV cache cannot be fused.*\bcpu\b"):
        cached_attention(*own, arrays((B, H, E, M), (B, H, M, E)), None, visibility, implementation="fused")


def cached(**changes):
    """Arguments of a call over a KV cache, some of them changed."""
    names = ("query", "key", "value", "stored_key", "stored_value", "position_query", "position_key", "position_score")
    shapes = [(B, H, L, E)] * 3 + [(B, H, E, M), (B, H, M, E), (B, H, L, E), (H, E, M + L), (H, M + L)]
    given = dict(zip(names, arrays(*shapes), strict=True))
    given["visibility"] = CachedVisibility(jnp.asarray([M, 2]), jnp.int32(0), L, M, 7)
    given |= {name: new(given[name]) if callable(new) else new for name, new in changes.items()}
    heads, ring, position = ([given[name] for name in names[a:b]] for a, b in ((0, 3), (3, 5), (5, 8)))
    return (*heads, tuple(ring), tuple(position), given["visibility"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": lambda old: old.tolist()}, r"query\b.*\blist\b"),
        ({"query": lambda old: old[0]}, r"query\b.*\(3, 4, 5\)"),
        ({"visibility": sees(segment_len=3)}, r"\(2, 3, 4, 5\).*segment_len is 3"),
        ({"value": lambda old: old[..., 1:]}, r"value\b.*\(2, 3, 4, 4\).*\(2, 3, 4, 5\)"),
        ({"stored_key": lambda old: old.swapaxes(2, 3)}, r"stored key\b.*\(2, 3, 6, 5\).*R 6.*\(2, 3, 5, 6\)"),
        ({"visibility": sees(capacity=5)}, r"stored key\b.*R 5\b"),
        ({"position_query": lambda old: old[:1]}, r"position query\b.*\(1, 3, 4, 5\)"),
        ({"position_key": lambda old: old.swapaxes(1, 2)}, r"position key\b.*\(3, 10, 5\).*\(3, 5, 5\)"),
        ({"position_score": lambda old: old[:, 1:]}, r"position score\b.*\(3, 9\).*\(3, 10\)"),
        ({"position_key": as_type("bfloat16")}, r"position key\b.*\bbfloat16\b.*\bfloat32\b"),
        ({"stored_value": as_type(int)}, r"stored value\b.*\bint32\b.*floating"),
        ({"visibility": sees(valid=jnp.zeros(3, int))}, r"valid is int32 \[3\].*int32 \[2\]"),
        ({"visibility": sees(write_index=0)}, r"write_index is int\b.*int32 \[\]"),
        ({"visibility": sees(window=0)}, r"window is 0\b"),
    ],
)
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_what_does_not_fit_a_cache_is_refused_in_one_sentence(implementation, changes, words):
    cached_attention(*cached(stored_key=as_type("bfloat16"), position_score=as_type("bfloat16")))
    with pytest.raises(ValueError, match=words):
        cached_attention(*cached(**changes), implementation=implementation)


def test_a_seed_is_an_integer_of_any_kind():
    masked = [attention(**changed(), dropout=(0.5, seed)) for seed in (7, 7 - 2**32, np.uint32(7), jnp.int32(7))]
    for other in masked[1:]:
        np.testing.assert_array_equal(other, masked[0])
    assert np.abs(masked[0] - attention(**changed(), dropout=(0.5, 8))).max() > 0.01


@pytest.mark.parametrize("causal", [True, False])
def test_more_slots_and_tokens_than_there_are_mean_all(causal):
    def seen(valid, lengths):
        return Visibility(jnp.asarray(valid), 3, 2, causal=causal, lengths=jnp.asarray(lengths)).mask()

    np.testing.assert_array_equal(seen([9, -1], [9, -1]), seen([2, 0], [3, 0]))
