"""Tiles, `stored` and TPU kernels (interpreted) against the reference: values and all gradients."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.attention_arrays import NAMES, draw_on_host
from support.cases import nightly_but
from txl_jax.ops.attention import Implementation, ProbabilityDropout, Tile, Visibility, attention
from txl_jax.ops.attention.problem import REFERENCE
from txl_jax.ops.attention.tiled import training

H = 2
# Arrays of a call: up to the position keys, without positions, and up to the biases u and v.
SHAW = NAMES[:4]
ABSOLUTE = NAMES[:3]
ALL_BUT_SCORE = NAMES[:6]
ONLY_SCORE = (*ABSOLUTE, "position_score")


def tiled(query, key):
    return Implementation("tiled", tile=Tile(query, key))


def tpu(query=16, key=128, kernel="mosaic_gather"):
    return Implementation("fused", kernel, Tile(query, key), interpret=True)


# The 13 queries of a case are 3 strips of `UNEVEN`, and 2 strips of the other tiles. The 30 keys
# fit into one tile of `WHOLE`.
UNEVEN = tiled(5, 11)
SMALL = tiled(7, 8)
WHOLE = tiled(7, 64)
STORED = Implementation("stored")


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of attention, and the implementation that is compared with the reference."""

    implementation: Implementation
    names: tuple[str, ...] = ALL_BUT_SCORE  # The arrays of the call.
    segment_len: int = 13
    mem_len: int = 17
    width: int = 8
    valid: tuple[int, ...] | None = None  # Filled slots of each row, or None for two full rows.
    window: int | None = None
    causal: bool = True
    lengths: tuple[int, ...] | None = None
    has_documents: bool = False
    rate: float | None = None  # Dropout rate.


# Fields of a case with four rows, of which two have a part of the slots.
ROWS = {"valid": (17, 2, 0, 5)}
PADDED = {"causal": False, "lengths": (13, 5, 1, 0), "valid": (17, 3, 0, 0)}

QUICK = {}
QUICK["tiled: part-filled, whole rows"] = Case(WHOLE, **ROWS)
QUICK["tiled: window"] = Case(UNEVEN, window=7, **ROWS)
QUICK["tiled: one query"] = Case(SMALL, segment_len=1)
QUICK["tiled: all terms"] = Case(SMALL, NAMES)
QUICK["tiled: no positions"] = Case(tiled(7, 11), ABSOLUTE)
GROUPED = tiled(7, 9)
QUICK["tiled: dropout, rows in groups"] = Case(GROUPED, rate=0.3, **ROWS)
QUICK["tiled: both sides, lengths"] = Case(tiled(7, 11), **PADDED)

QUICK["stored: window, part-filled, dropout"] = Case(STORED, window=7, rate=0.3, **ROWS)
QUICK["stored: all terms"] = Case(STORED, NAMES, rate=0.3)
QUICK["stored: scores only"] = Case(STORED, ONLY_SCORE, window=5)
QUICK["stored: no positions"] = Case(STORED, ABSOLUTE, rate=0.3)
QUICK["stored: both sides, lengths"] = Case(STORED, NAMES, rate=0.3, **PADDED)
QUICK["stored: documents"] = Case(STORED, has_documents=True, **ROWS)

QUICK["tpu: uneven tiles"] = Case(
    tpu(kernel="mosaic_roll"), segment_len=40, mem_len=100, width=16, valid=(100, 5)
)
QUICK["tpu: two strips, dropout"] = Case(
    tpu(160, 256), segment_len=150, mem_len=30, width=41, rate=0.3
)
QUICK["tpu: window and memory"] = Case(
    tpu(), segment_len=40, mem_len=130, valid=(130, 60), window=70, rate=0.5
)
QUICK["tpu: wide heads"] = Case(tpu(32), segment_len=24, mem_len=8, width=160)
QUICK["tpu: no positions"] = Case(
    tpu(), ABSOLUTE, segment_len=40, mem_len=100, valid=(70, 0), rate=0.2
)
QUICK["tpu: Shaw's terms"] = Case(tpu(), SHAW, segment_len=40, mem_len=100, rate=0.2)
QUICK["tpu: both sides, padding"] = Case(
    tpu(), segment_len=140, mem_len=0, causal=False, lengths=(131, 0), rate=0.1
)

# These join two of the kinds above, or tile them otherwise. More are in tests/test_golden.py.
MORE = {}
MORE["tiled: window of one key"] = Case(UNEVEN, window=1)
MORE["tiled: dropout, whole rows"] = Case(WHOLE, rate=0.3)
MORE["tiled: both sides, whole rows"] = Case(WHOLE, NAMES, **PADDED)
MORE["tiled: both sides, window, no memory"] = Case(
    SMALL, window=4, mem_len=0, causal=False, lengths=(13, 5, 1, 0), valid=(17, 3, 0, 0)
)
MORE["tiled: lengths of a causal segment"] = Case(
    UNEVEN, lengths=(13, 5, 1, 0), valid=(17, 3, 0, 0)
)

MORE["stored: no memory, u only"] = Case(STORED, NAMES[:5], mem_len=0, width=41)
MORE["stored: both sides, window"] = Case(STORED, ONLY_SCORE, causal=False, window=4)
MORE["reference: both sides, lengths"] = Case(REFERENCE, **PADDED)

MORE["tpu: one query, u only"] = Case(tpu(), NAMES[:5], segment_len=1, mem_len=3)
MORE["tpu: one key"] = Case(tpu(), segment_len=1, mem_len=0)
MORE["tpu: both sides, window"] = Case(tpu(), segment_len=40, mem_len=100, causal=False, window=20)
# All terms that the kernels support, which have no position scores.
MORE["tpu: all terms"] = Case(
    tpu(), segment_len=40, mem_len=100, valid=(100, 40), width=64, rate=0.2
)

CASES = QUICK | MORE


class Call(NamedTuple):
    """Arguments of a call of attention."""

    arrays: dict[str, np.ndarray]
    visibility: Visibility
    dropout: ProbabilityDropout | None


def make(case: Case, dtype="float32") -> Call:
    valid = case.valid
    if valid is None:
        valid = (case.mem_len, case.mem_len)
    lengths = None
    if case.lengths is not None:
        lengths = jnp.asarray(case.lengths, jnp.int32)
    document_start = None
    if case.has_documents:
        # Documents of four tokens, which begin elsewhere in each row.
        shape = (len(valid), case.segment_len)
        starts = np.arange(math.prod(shape), dtype=np.int32) % case.segment_len // 4 * 4
        document_start = jnp.asarray(starts.reshape(shape))
    visibility = Visibility(
        jnp.asarray(valid, jnp.int32),
        case.segment_len,
        case.mem_len,
        window=case.window,
        causal=case.causal,
        lengths=lengths,
        document_start=document_start,
    )

    dropout = None
    if case.rate is not None:
        # As on a device of a mesh, whose rows and heads are some of a larger batch and model.
        dropout = ProbabilityDropout(case.rate, jnp.uint32(5), first_row=3, first_head=1, n_head=7)
    arrays = draw_on_host(visibility, H, case.width, names=case.names, dtype=dtype)
    return Call(arrays, visibility, dropout)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(implementation, arrays, visibility, dropout):
    """The result as "out", and a gradient for each array, in one dictionary."""

    def attend(arrays):
        return attention(
            **arrays, visibility=visibility, dropout=dropout, implementation=implementation
        )

    out, pull_back = jax.vjp(attend, arrays)
    weights = np.random.default_rng(4).normal(size=out.shape)
    (gradients,) = pull_back(jnp.asarray(weights, out.dtype))
    return {"out": out, **gradients}


# Compiled as a whole, which takes less time than each of its operations by itself.
mask_of = jax.jit(Visibility.mask)


def assert_close(results, expected, implementation):
    """Compares the result and each gradient, by the largest difference relative to the largest
    value, or to `smallest_scale` if all values are smaller.
    """
    if implementation.path == "fused":
        float32_tolerance = 2e-5
        smallest_scale = 0.1
    else:
        float32_tolerance = 2e-6
        smallest_scale = 1
    for name, expected_array in expected.items():
        # Of the narrow types, bfloat16 has 8 bits, and float16 more.
        is_wide = results[name].dtype == jnp.float32
        tolerance = float32_tolerance if is_wide else 2e-2
        expected_array = np.asarray(expected_array, np.float64)
        scale = max(np.abs(expected_array).max(), smallest_scale)
        np.testing.assert_allclose(
            np.asarray(results[name], np.float64),
            expected_array,
            rtol=0,
            atol=tolerance * scale,
            err_msg=name,
        )


def check(name, dtype="float32"):
    """Compares with the reference in float32.

    A query that sees nothing, and a key that is not seen, have no value and no gradient at all.
    """
    implementation = CASES[name].implementation
    arrays, visibility, dropout = make(CASES[name], dtype)

    results = jax.device_get(value_and_gradients(implementation, arrays, visibility, dropout))

    for array, result in results.items():
        assert result.dtype == jnp.dtype(dtype), array
    exact = jax.tree.map(lambda array: np.asarray(array, np.float32), arrays)
    expected = value_and_gradients(REFERENCE, exact, visibility, dropout)
    assert_close(results, expected, implementation)

    mask = np.asarray(mask_of(visibility))
    is_blind = ~mask.any(axis=2)
    is_unseen = ~mask.any(axis=1)
    for head in range(H):
        assert not np.any(results["out"][:, head][is_blind])
        assert not np.any(results["query"][:, head][is_blind])
        assert not np.any(results["key"][:, head][is_unseen])
        assert not np.any(results["value"][:, head][is_unseen])


@pytest.mark.parametrize("name", nightly_but(QUICK, CASES))
def test_values_and_gradients_equal_the_references(name, monkeypatch):
    if "groups" in name:
        # The most scores of a block on a CPU: two of the four rows in this case's tiles.
        tile = GROUPED.tile
        monkeypatch.setattr(training, "_CPU_SCORES", 2 * tile.query * tile.key)
    check(name)


NARROW = [
    ("tiled: all terms", "bfloat16"),
    ("stored: all terms", "bfloat16"),
    ("tpu: all terms", "bfloat16"),
    ("tiled: both sides, lengths", "float16"),
    ("tiled: both sides, lengths", "bfloat16"),
    ("stored: both sides, lengths", "float16"),
    ("stored: both sides, lengths", "bfloat16"),
    ("reference: both sides, lengths", "float16"),
    ("reference: both sides, lengths", "bfloat16"),
]


@pytest.mark.parametrize(("name", "dtype"), NARROW)
def test_narrow_types(name, dtype):
    check(name, dtype)


# A case of each path.
OF_PATHS = {
    "tiled": "tiled: part-filled, whole rows",
    "stored": "stored: all terms",
    "tpu": "tpu: one key",
}


class Member(NamedTuple):
    """The arguments that differ between the members of an ensemble."""

    arrays: dict[str, np.ndarray]
    valid: np.ndarray
    seed: np.ndarray
    rate: np.ndarray


@pytest.mark.parametrize("name", OF_PATHS.values(), ids=OF_PATHS)
def test_members_of_an_ensemble_have_their_own_weights_seeds_and_rates(name):
    implementation = CASES[name].implementation
    arrays, visibility, _ = make(CASES[name])
    valid = np.asarray(visibility.valid)
    half = np.float32(0.5)
    members = Member(
        arrays=jax.tree.map(lambda array: np.stack([array, array * half, -array]), arrays),
        valid=np.stack([valid, valid // 2, valid // 4]),
        seed=np.arange(3, dtype=np.uint32),
        rate=np.asarray([0.1, 0.0, 0.6], np.float32),
    )

    def of_member(implementation, member):
        # Seed and rate are traced under `vmap`.
        dropout = ProbabilityDropout(rate=member.rate, seed=member.seed, n_head=7)
        return value_and_gradients(
            implementation, member.arrays, visibility.replace(valid=member.valid), dropout
        )

    together = jax.jit(jax.vmap(functools.partial(of_member, implementation)))(members)

    together = jax.device_get(together)
    for i in range(3):
        member = jax.tree.map(lambda array, i=i: array[i], members)
        results = jax.tree.map(lambda array, i=i: array[i], together)
        assert_close(results, of_member(REFERENCE, member), implementation)


@pytest.mark.parametrize("causal", nightly_but([True], [True, False]))
def test_tiles_never_hold_the_scores(causal):
    batch = 2
    n_head = 3
    length = 96
    width = 8
    visibility = Visibility(jnp.full(batch, length, jnp.int32), length, length, causal=causal)
    n_keys = visibility.n_keys
    arrays = draw_on_host(visibility, n_head, width, names=SHAW)

    lowered = value_and_gradients.lower(tiled(32, 48), arrays, visibility, None)
    text = lowered.compile().as_text()

    # Of all arrays in the program, the largest may be keys, values or position keys.
    sizes = []
    for shape in set(re.findall(r"\[([\d,]+)\]", text)):
        sizes.append(math.prod(map(int, shape.split(","))))
    assert max(sizes) <= batch * n_head * max(n_keys, visibility.n_positions) * width
    assert max(sizes) < batch * n_head * length * n_keys / 4
