"""Tiles, `stored` and TPU kernels (interpreted) against the reference: values and all gradients."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.attention_arrays import NAMES, draw
from support.cases import nightly_but
from txl_jax.ops.attention import Implementation, ProbabilityDropout, Tile, Visibility, attention
from txl_jax.ops.attention.problem import REFERENCE
from txl_jax.ops.attention.tiled import training

H = 2
SHAW, ABSOLUTE, SCORES = NAMES[:4], NAMES[:3], (*NAMES[:3], "position_score")
ROWS = {"valid": [17, 2, 0, 5]}
PADDED = {"causal": False, "lengths": [13, 5, 1, 0], "valid": [17, 3, 0, 0]}


def tiled(query, key):
    return Implementation("tiled", tile=Tile(query, key))


def tpu(query=16, key=128, kernel="mosaic_gather"):
    return Implementation("fused", kernel, Tile(query, key), interpret=True)


UNEVEN, SMALL, WHOLE = tiled(5, 11), tiled(4, 8), tiled(6, 64)
STORED = Implementation("stored")
# Rows see all M slots, heads have the width 8, and there are u, v and position keys, if nothing
# else is said.
QUICK = {
    "tiled: part-filled, whole rows": {"by": WHOLE, **ROWS},
    "tiled: window": {"by": UNEVEN, "window": 7, **ROWS},
    "tiled: one query": {"by": SMALL, "L": 1},
    "tiled: all terms": {"by": SMALL, "names": NAMES},
    "tiled: no positions": {"by": UNEVEN, "names": ABSOLUTE},
    "tiled: dropout, rows in groups": {"by": tiled(4, 9), "rate": 0.3, **ROWS},
    "tiled: both sides, lengths": {"by": UNEVEN, **PADDED},
    "stored: window, part-filled, dropout": {"by": STORED, "window": 7, **ROWS, "rate": 0.3},
    "stored: all terms": {"by": STORED, "names": NAMES, "rate": 0.3},
    "stored: scores only": {"by": STORED, "names": SCORES, "window": 5},
    "stored: no positions": {"by": STORED, "names": ABSOLUTE, "rate": 0.3},
    "stored: both sides, lengths": {"by": STORED, **PADDED, "names": NAMES, "rate": 0.3},
    "stored: documents": {"by": STORED, **ROWS, "documents": True},
    "tpu: uneven tiles": {
        "by": tpu(kernel="mosaic_roll"),
        "L": 40,
        "M": 100,
        "valid": [100, 5],
        "E": 16,
    },
    "tpu: two strips, dropout": {"by": tpu(160, 256), "L": 150, "M": 30, "E": 41, "rate": 0.3},
    "tpu: window and memory": {
        "by": tpu(),
        "L": 40,
        "M": 130,
        "valid": [130, 60],
        "window": 70,
        "rate": 0.5,
    },
    "tpu: wide heads": {"by": tpu(32), "L": 24, "M": 8, "E": 160},
    "tpu: no positions": {
        "by": tpu(),
        "L": 40,
        "M": 100,
        "valid": [70, 0],
        "names": ABSOLUTE,
        "rate": 0.2,
    },
    "tpu: Shaw's terms": {"by": tpu(), "L": 40, "M": 100, "names": SHAW, "rate": 0.2},
    "tpu: both sides, padding": {
        "by": tpu(),
        "L": 140,
        "M": 0,
        "causal": False,
        "lengths": [131, 0],
        "rate": 0.1,
    },
}
# These join two of the kinds above, or tile them otherwise. More are in tests/test_golden.py.
MORE = {
    "tiled: window of one key": {"by": UNEVEN, "window": 1},
    "tiled: dropout, whole rows": {"by": WHOLE, "rate": 0.3},
    "tiled: both sides, whole rows": {"by": WHOLE, **PADDED, "names": NAMES},
    "tiled: both sides, window, no memory": {"by": SMALL, **PADDED, "window": 4, "M": 0},
    "tiled: lengths of a causal segment": {"by": UNEVEN, **PADDED, "causal": True},
    "stored: no memory, u only": {"by": STORED, "M": 0, "E": 41, "names": NAMES[:5]},
    "stored: both sides, window": {"by": STORED, "causal": False, "window": 4, "names": SCORES},
    "reference: both sides, lengths": {"by": REFERENCE, **PADDED},
    "tpu: one query, u only": {"by": tpu(), "L": 1, "M": 3, "names": NAMES[:5]},
    "tpu: one key": {"by": tpu(), "L": 1, "M": 0},
    "tpu: both sides, window": {"by": tpu(), "L": 40, "M": 100, "causal": False, "window": 20},
    "tpu: all terms": {"by": tpu(), "L": 40, "M": 100, "valid": [100, 40], "E": 64, "rate": 0.2},
}
CASES = QUICK | MORE
OF_EACH = {
    "tiled": "tiled: part-filled, whole rows",
    "stored": "stored: all terms",
    "tpu": "tpu: one key",
}


def make(case, dtype=jnp.float32):
    """Returns (implementation, arrays by name, visibility, dropout)."""
    segment_len, mem_len, width = (
        case.get(name, default) for name, default in (("L", 13), ("M", 17), ("E", 8))
    )
    options = {name: case[name] for name in ("window", "causal") if name in case}
    valid = case.get("valid", [mem_len] * 2)
    if "lengths" in case:
        options["lengths"] = jnp.asarray(case["lengths"], jnp.int32)
    if "documents" in case:
        starts = jnp.arange(len(valid) * segment_len, dtype=jnp.int32) % segment_len // 4 * 4
        options["document_start"] = starts.reshape(len(valid), -1)
    visibility = Visibility(jnp.asarray(valid, jnp.int32), segment_len, mem_len, **options)
    rate = case.get("rate")
    dropout = (
        None
        if rate is None
        else ProbabilityDropout(rate, jnp.uint32(5), first_row=3, first_head=1, n_head=7)
    )
    return (
        case["by"],
        draw(visibility, H, width, names=case.get("names", NAMES[:6]), dtype=dtype),
        visibility,
        dropout,
    )


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(implementation, arrays, visibility, dropout):
    options = {"visibility": visibility, "dropout": dropout, "implementation": implementation}
    out, pull = jax.vjp(lambda arrays: attention(**arrays, **options), arrays)
    weights = np.random.default_rng(4).normal(size=out.shape)
    return {"out": out, **pull(jnp.asarray(weights, out.dtype))[0]}


def assert_close(found, expected, by):
    """Compares the result and each gradient, by the largest difference relative to the largest
    value.
    """
    tolerance, least = (2e-5, 0.1) if by.path == "fused" else (2e-6, 1)
    for name, array in expected.items():
        got, want = (np.asarray(part, np.float64) for part in (found[name], array))
        wide = tolerance if found[name].dtype == jnp.float32 else 2e-2  # bfloat16 has 8 bits.
        np.testing.assert_allclose(
            got, want, rtol=0, atol=wide * max(np.abs(want).max(), least), err_msg=name
        )


def check(name, dtype=jnp.float32):
    """Compares with the reference in float32.

    What sees nothing or is not seen has no value and no gradient at all.
    """
    by, arrays, visibility, dropout = make(CASES[name], dtype)
    found = value_and_gradients(by, arrays, visibility, dropout)
    assert {array.dtype for array in found.values()} == {jnp.dtype(dtype)}
    exact = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    assert_close(found, value_and_gradients(REFERENCE, exact, visibility, dropout), by)
    mask = visibility.mask()
    blind, unseen = (np.asarray(~mask.any(axis))[:, None].repeat(H, 1) for axis in (2, 1))
    assert not np.any(found["out"][blind]) and not np.any(found["query"][blind])
    assert not np.any(found["key"][unseen]) and not np.any(found["value"][unseen])


@pytest.mark.parametrize("name", nightly_but(QUICK, CASES))
def test_values_and_gradients_equal_the_references(name, monkeypatch):
    if "groups" in name:  # Of two rows.
        monkeypatch.setattr(training, "_CPU_SCORES", 2 * 4 * 9)
    check(name)


PADDED_CASES = [name for name in CASES if name.endswith(": both sides, lengths")]
NARROW = [
    *((f"{path}: all terms", "bfloat16") for path in ("tiled", "stored", "tpu")),
    *itertools.product(PADDED_CASES, ["float16", "bfloat16"]),
]


@pytest.mark.parametrize(("name", "dtype"), NARROW)
def test_narrow_types(name, dtype):
    check(name, dtype)


@pytest.mark.parametrize("name", OF_EACH.values(), ids=OF_EACH)
def test_members_of_an_ensemble_have_their_own_weights_seeds_and_rates(name):
    by, arrays, visibility, _ = make(CASES[name])
    members = jax.tree.map(lambda array: jnp.stack([array, array * 0.5, -array]), arrays)
    valid = jnp.stack([visibility.valid, visibility.valid // 2, visibility.valid // 4])
    seeds, rates = jnp.arange(3, dtype=jnp.uint32), jnp.asarray([0.1, 0.0, 0.6])

    def of_member(implementation, arrays, valid, seed, rate):
        dropout = ProbabilityDropout(rate=rate, seed=seed, n_head=7)
        return value_and_gradients(implementation, arrays, visibility.replace(valid=valid), dropout)

    found = jax.jit(jax.vmap(functools.partial(of_member, by)))(members, valid, seeds, rates)
    for i in range(3):
        one = jax.tree.map(lambda array, i=i: array[i], (members, valid, seeds, rates))
        assert_close(
            jax.tree.map(lambda array, i=i: array[i], found), of_member(REFERENCE, *one), by
        )


@pytest.mark.parametrize("causal", nightly_but([True], [True, False]))
def test_tiles_never_hold_the_scores(causal):
    batch, n_head, length, width = 2, 3, 96, 8
    visibility = Visibility(jnp.full(batch, length, jnp.int32), length, length, causal=causal)
    n_keys, n_positions = visibility.n_keys, visibility.n_positions
    arrays = draw(visibility, n_head, width, names=SHAW)
    compiled = value_and_gradients.lower(tiled(16, 48), arrays, visibility, None).compile()
    sizes = [
        np.prod([int(n) for n in found.split(",")])
        for found in re.findall(r"\[([\d,]+)\]", compiled.as_text())
    ]
    assert max(sizes) <= batch * n_head * max(n_keys, n_positions) * width
    assert max(sizes) < batch * n_head * length * n_keys / 4
