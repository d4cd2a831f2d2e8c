"""Tests of what the TPU kernels serve and refuse, by numbers, and of their tiles."""

import dataclasses
import importlib.metadata
import itertools

import pytest

from txl_jax.ops.attention.problem import AttentionCall, Tile
from txl_jax.ops.attention.tpu.geometry import default_tile, kernel_of, refusal, round_tile

PROBLEM = AttentionCall("tpu", "TPU v5 lite", "bfloat16", 4, 8, 768, 1536, 128, 1536)
CACHED = AttentionCall("tpu", "TPU v4", "float32", 1, 8, 128, 3968, 128, 1001, capacity=3840)
# Sizes of the published models: heads, L, K, E and P of training, and with R of evaluation.
TRAINING = {
    "enwik8_12l": (8, 512, 1024, 64, 1024),
    "enwik8_24l": (8, 768, 1536, 128, 1536),
    "wt103_base": (10, 150, 300, 41, 300),
    "wt103_large": (16, 384, 768, 64, 768),
}
EVALUATION = {
    "enwik8_12l": ((8, 80, 2240, 64, 821), 2160, Tile(80, 768)),
    "enwik8_24l": ((8, 128, 3968, 128, 1001), 3840, Tile(128, 1024)),
    "wt103_base": ((10, 64, 704, 41, 401), 640, Tile(64, 640)),
    "wt103_large": ((16, 128, 1792, 64, 1001), 1664, Tile(128, 896)),
}


def resized(problem, sizes, **changes):
    names = ("n_head", "segment_len", "n_keys", "d_head", "n_positions")
    return dataclasses.replace(problem, **dict(zip(names, sizes, strict=True)), **changes)


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"])
def test_the_published_models_are_served(kind):
    for sizes, dtype in itertools.product(TRAINING.values(), ("bfloat16", "float32")):
        problem = resized(PROBLEM, sizes, device_kind=kind, dtype=dtype)
        rotates = kind != "TPU v4"  # The rotation needs v5.
        assert (refusal(problem), kernel_of(problem)) == (
            None,
            "mosaic_roll" if rotates else "mosaic_gather",
        )
    for sizes, capacity, tile in EVALUATION.values():
        problem = resized(CACHED, sizes, device_kind=kind, capacity=capacity)
        assert (refusal(problem), default_tile(problem), kernel_of(problem)) == (
            None,
            tile,
            "mosaic_gather",
        )


@pytest.mark.parametrize(
    ("problem", "changes", "words"),
    [
        (PROBLEM, {"device_kind": "TPU v3"}, "TPU v3"),
        (PROBLEM, {"dtype": "float64"}, "float64"),
        (PROBLEM, {"segment_len": 32, "n_keys": 64}, "2048 pairs, below 32768"),
        (PROBLEM, {"n_keys": 16384, "device_kind": "TPU v5", "dtype": "float32"}, "TPU v5 has 64"),
        (PROBLEM, {"n_keys": 4096, "device_kind": "TPU v4", "n_positions": 4096}, "need 17 MiB"),
        (PROBLEM, {"has_position_score": True}, "score per distance"),
        (CACHED, {"has_position_score": True}, "score per distance"),
        (CACHED, {"cache_dtype": "float16"}, "float16"),
        (CACHED, {"d_head": 320}, "320, above 256"),
        (CACHED, {"segment_len": 32, "n_keys": 160}, "5120 pairs, below 32768"),
        (
            CACHED,
            {"capacity": 8192, "n_keys": 8320, "n_positions": 8320},
            "18.2 MiB of VMEM, above 14.0",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_with_the_number(problem, changes, words):
    assert words in refusal(dataclasses.replace(problem, **changes))


def test_a_libtpu_that_compiles_no_kernels_is_named(monkeypatch):
    for version, refused in (("0.0.21.1", True), ("0.0.42.1", False)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version)  # noqa: B023
        assert (f"libtpu is {version}" in (refusal(PROBLEM) or "")) is refused


def test_a_tile_is_rounded_to_registers_and_no_larger_than_the_scores():
    assert round_tile(Tile(256, 512), resized(PROBLEM, TRAINING["wt103_base"])) == Tile(160, 384)
    assert round_tile(Tile(100, 200), PROBLEM) == Tile(112, 256)
