"""Tests of what the TPU kernels refuse, by numbers, and their tiles."""

import dataclasses
import importlib.metadata

import pytest

from txl_jax.ops.attention.problem import Problem, Tile
from txl_jax.ops.attention.tpu import limits
from txl_jax.ops.attention.tpu.geometry import round_tile
from txl_jax.ops.attention.tpu.limits import default_tile, kernel_of, refusal

GENERATIONS = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
PRESETS = {
    "enwik8_12l": (8, 512, 64),
    "enwik8_24l": (8, 768, 128),
    "wt103_base": (10, 150, 41),
    "wt103_large": (16, 384, 64),
}


def problem_of(preset="enwik8_24l", **options):
    n_head, length, width = PRESETS[preset]
    facts = {"platform": "tpu", "device_kind": "TPU v5 lite", "dtype": "bfloat16", "batch": 4, "n_head": n_head}
    sizes = {"segment_len": length, "n_keys": 2 * length, "d_head": width, "n_positions": 2 * length}
    return Problem(**{**facts, **sizes, **options})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device_kind", GENERATIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_training_shapes_of_the_published_models_are_served(preset, device_kind, dtype):
    assert refusal(problem_of(preset, device_kind=device_kind, dtype=dtype)) is None


REFUSED = {
    "TPU v4 and later, and the device is TPU v3": {"device_kind": "TPU v3"},
    "and the type is float64": {"dtype": "float64"},
    "no score per distance": {"has_position_score": True, "capacity": 768, "segment_len": 768},
    "32 queries and 64 keys are 2048 pairs, below 32768": {"segment_len": 32, "n_keys": 64, "n_positions": 64},
    "16384 keys of width 128 need .* MiB of VMEM .* TPU v5 has 64": {
        "n_keys": 16384,
        "device_kind": "TPU v5",
        "dtype": "float32",
        "n_positions": 16384,
    },
    "4096 keys of width 128 need 17 MiB of VMEM .* TPU v4 has 16": {
        "n_keys": 4096,
        "device_kind": "TPU v4",
        "n_positions": 4096,
    },
}


@pytest.mark.parametrize(("message", "options"), REFUSED.items(), ids=REFUSED)
def test_what_the_kernels_cannot_do_is_refused_with_the_number(message, options):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refusal(problem_of(**options)))


def test_an_old_libtpu_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.21.1")
    assert "libtpu is 0.0.21.1" in str(refusal(problem_of()))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.42.1")
    assert refusal(problem_of()) is None


def test_a_compiler_that_refuses_every_kernel_is_named(monkeypatch):
    def fail(device):
        raise RuntimeError("Unsupported version: expected <= 7 but got 8\nmore")

    monkeypatch.setattr("txl_jax.ops.attention.tpu.trial.compile_trial", fail)
    limits._trial_refusal.cache_clear()
    assert str(limits._trial_refusal()).endswith("compile no kernels (Unsupported version: expected <= 7 but got 8)")
    limits._trial_refusal.cache_clear()


@pytest.mark.parametrize(
    ("preset", "device_kind", "dtype", "tile"),
    [
        ("enwik8_12l", "TPU v5 lite", "bfloat16", Tile(512, 1024)),
        ("enwik8_24l", "TPU v5 lite", "bfloat16", Tile(384, 1536)),
        ("enwik8_24l", "TPU v4", "bfloat16", Tile(256, 1536)),
        ("enwik8_24l", "TPU v4", "float32", Tile(256, 512)),
        ("wt103_base", "TPU v4", "bfloat16", Tile(160, 384)),
        ("wt103_large", "TPU v6 lite", "float32", Tile(192, 384)),
    ],
)
def test_tiles_are_equal_parts_that_fit_into_vmem(preset, device_kind, dtype, tile):
    assert default_tile(problem_of(preset, device_kind=device_kind, dtype=dtype)) == tile


def test_a_tile_is_rounded_to_registers_and_no_larger_than_the_scores():
    assert round_tile(Tile(256, 512), segment_len=150, n_keys=300) == Tile(160, 384)
    assert round_tile(Tile(100, 200), segment_len=768, n_keys=1536) == Tile(112, 256)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "mosaic_gather"),
        ("TPU v5 lite", "mosaic_roll"),
        ("TPU v5", "mosaic_roll"),
        ("TPU7x", "mosaic_roll"),
        ("a chip", "mosaic_gather"),
    ],
)
def test_the_rotation_needs_tpu_v5(kind, name):
    assert kernel_of(dataclasses.replace(problem_of(), device_kind=kind)) == name


# Heads, E, L, R, P.
CACHES = {
    "enwik8_12l": (8, 64, 80, 2160, 821),
    "enwik8_24l": (8, 128, 128, 3840, 1001),
    "wt103_base": (10, 41, 64, 640, 401),
    "wt103_large": (16, 64, 128, 1664, 1001),
}


def cached_problem_of(preset="enwik8_24l", **options):
    n_head, width, segment_len, capacity, n_positions = CACHES[preset]
    facts = {"platform": "tpu", "device_kind": "TPU v4", "dtype": "float32", "batch": 1, "n_head": n_head}
    sizes = {"segment_len": segment_len, "n_keys": capacity + segment_len, "d_head": width, "capacity": capacity}
    return Problem(**{**facts, **sizes, "n_positions": n_positions, **options})


@pytest.mark.parametrize(
    ("preset", "tile"),
    [
        ("enwik8_12l", Tile(80, 768)),
        ("enwik8_24l", Tile(128, 1024)),
        ("wt103_base", Tile(64, 640)),
        ("wt103_large", Tile(128, 896)),
    ],
)
@pytest.mark.parametrize("device_kind", GENERATIONS)
def test_evaluation_shapes_of_the_published_models_are_served(preset, tile, device_kind):
    problem = cached_problem_of(preset, device_kind=device_kind)
    assert refusal(problem) is None
    assert (default_tile(problem), kernel_of(problem)) == (tile, "mosaic_gather")


REFUSED_CACHES = {
    "reads a cache of float32 or bfloat16, and its type is float16": {"cache_dtype": "float16"},
    "the head width is 320, above 256": {"d_head": 320},
    "no score per distance": {"has_position_score": True, "capacity": 768, "segment_len": 768},
    "32 queries and 160 keys are 5120 pairs, below 32768": {"segment_len": 32, "n_keys": 160},
    "8320 position keys of width 128 need 18.2 MiB of VMEM, above 14.0": {
        "capacity": 8192,
        "n_keys": 8320,
        "n_positions": 8320,
    },
}


@pytest.mark.parametrize(("message", "options"), REFUSED_CACHES.items(), ids=REFUSED_CACHES)
def test_what_the_kernel_of_the_cache_cannot_do_is_refused_with_the_number(message, options):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refusal(cached_problem_of(**options)))
