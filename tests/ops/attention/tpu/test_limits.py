"""Tests of which calls the TPU kernels serve, the numbers in their refusals, and their tiles."""

import dataclasses
import importlib.metadata

import pytest

from txl_jax.ops.attention.problem import AttentionCall, Tile
from txl_jax.ops.attention.tpu.geometry import default_tile, kernel_of, refusal, round_tile

# Training and evaluation of enwik8_24l.
PROBLEM = AttentionCall(
    platform="tpu",
    device_kind="TPU v5 lite",
    dtype="bfloat16",
    batch=4,
    n_head=8,
    segment_len=768,
    n_keys=1536,
    d_head=128,
    n_positions=1536,
)
CACHED = AttentionCall(
    platform="tpu",
    device_kind="TPU v4",
    dtype="float32",
    batch=1,
    n_head=8,
    segment_len=128,
    n_keys=3968,
    d_head=128,
    n_positions=1001,
    capacity=3840,
)
# Sizes of the published models: heads, L, K, E and P. In evaluation also R, and the tile.
TRAINING = {
    "enwik8_12l": (8, 512, 1024, 64, 1024),
    "enwik8_24l": (8, 768, 1536, 128, 1536),
    "wt103_base": (10, 150, 300, 41, 300),
    "wt103_large": (16, 384, 768, 64, 768),
}
EVALUATION = {
    "enwik8_12l": ((8, 80, 2240, 64, 821), 2160, Tile(80, 768)),
    "enwik8_24l": ((8, 128, 3968, 128, 1001), 3840, Tile(128, 1024)),
}
EVALUATION |= {
    "wt103_base": ((10, 64, 704, 41, 401), 640, Tile(64, 640)),
    "wt103_large": ((16, 128, 1792, 64, 1001), 1664, Tile(128, 896)),
}

on_all_kinds = pytest.mark.parametrize(
    "kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"]
)


def resized(problem, sizes, **changes):
    n_head, segment_len, n_keys, d_head, n_positions = sizes
    return dataclasses.replace(
        problem,
        n_head=n_head,
        segment_len=segment_len,
        n_keys=n_keys,
        d_head=d_head,
        n_positions=n_positions,
        **changes,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("preset", TRAINING)
@on_all_kinds
def test_training_of_the_published_models_is_served(kind, preset, dtype):
    problem = resized(PROBLEM, TRAINING[preset], device_kind=kind, dtype=dtype)

    assert refusal(problem) is None
    # The kernel "mosaic_roll" skews tiles by a rotation, which needs v5.
    expected = "mosaic_gather" if kind == "TPU v4" else "mosaic_roll"
    assert kernel_of(problem) == expected


@pytest.mark.parametrize("preset", EVALUATION)
@on_all_kinds
def test_evaluation_of_the_published_models_is_served(kind, preset):
    sizes, capacity, tile = EVALUATION[preset]
    problem = resized(CACHED, sizes, device_kind=kind, capacity=capacity)

    assert refusal(problem) is None
    assert default_tile(problem) == tile
    assert kernel_of(problem) == "mosaic_gather"


@pytest.mark.parametrize(
    ("problem", "changes", "words"),
    [
        pytest.param(PROBLEM, {"device_kind": "TPU v3"}, "TPU v3", id="old chip"),
        pytest.param(PROBLEM, {"dtype": "float64"}, "float64", id="float64"),
        pytest.param(
            PROBLEM,
            {"segment_len": 32, "n_keys": 64},
            "2048 pairs, below 32768",
            id="few pairs",
        ),
        # The memory of a core, VMEM, has 64 MiB on this device.
        pytest.param(
            PROBLEM,
            {"n_keys": 16384, "device_kind": "TPU v5", "dtype": "float32"},
            "TPU v5 has 64",
            id="many keys",
        ),
        # A v4 has 16 MiB.
        pytest.param(
            PROBLEM,
            {"n_keys": 4096, "device_kind": "TPU v4", "n_positions": 4096},
            "need 17 MiB",
            id="many keys on v4",
        ),
        pytest.param(
            PROBLEM, {"has_position_score": True}, "score per distance", id="position score"
        ),
        pytest.param(
            CACHED, {"has_position_score": True}, "score per distance", id="cache, position score"
        ),
        pytest.param(CACHED, {"cache_dtype": "float16"}, "float16", id="cache in float16"),
        pytest.param(CACHED, {"d_head": 320}, "320, above 256", id="cache, wide heads"),
        pytest.param(
            CACHED,
            {"segment_len": 32, "n_keys": 160},
            "5120 pairs, below 32768",
            id="cache, few pairs",
        ),
        # Of the 16 MiB of a v4, a cached kernel spares 2.
        pytest.param(
            CACHED,
            {"capacity": 8192, "n_keys": 8192 + 128, "n_positions": 8192 + 128},
            "18.2 MiB of VMEM, above 14.0",
            id="large cache",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_its_name_or_number(problem, changes, words):
    reason = refusal(dataclasses.replace(problem, **changes))

    assert reason is not None, "the kernels serve the call"
    assert words in reason


# The last version that cannot compile the kernels of its own time's jax, and one that can.
@pytest.mark.parametrize(("version", "is_named"), [("0.0.21.1", True), ("0.0.42.1", False)])
def test_a_libtpu_that_compiles_no_kernels_is_named(version, is_named, monkeypatch):
    # This function says which version of libtpu is installed.
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    reason = refusal(PROBLEM) or ""

    assert (f"libtpu is {version}" in reason) == is_named


def test_a_tile_is_rounded_to_registers_and_no_larger_than_the_scores():
    small = resized(PROBLEM, TRAINING["wt103_base"])

    # Multiples of 16 queries and 128 keys, for the 150 queries and 300 keys of wt103_base.
    assert round_tile(Tile(256, 512), small) == Tile(160, 384)
    assert round_tile(Tile(100, 200), PROBLEM) == Tile(112, 256)
