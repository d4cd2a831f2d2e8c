"""Tests of what the kernels for NVIDIA GPUs serve, and by which kernel."""

import dataclasses

import pytest

from txl_jax.ops.attention.gpu import limits
from txl_jax.ops.attention.problem import Problem, Tile

TRAINING = Problem("gpu", "NVIDIA H200", "bfloat16", 4, 8, 768, 1536, 128, 1536)
LARGE = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA A100X", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA B200")
SMALL = ("NVIDIA GeForce RTX 4090", "NVIDIA RTX A1000", "NVIDIA RTX 2000 Ada Generation", "NVIDIA GeForce RTX 2050")
CACHED = dataclasses.replace(TRAINING, segment_len=128, capacity=3840, n_keys=3968)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"platform": "cpu", "device_kind": "cpu"}, "platform is cpu"),
        ({"device_kind": "Tesla T4"}, "GPU is Tesla T4"),
        *(({"device_kind": f"NVIDIA {old}"}, "capability 8.0") for old in ("GeForce RTX 2080 Ti", "T4G", "T400 4GB")),
        ({"device_kind": "AMD Instinct MI300X"}, "GPU is AMD"),
        ({"dtype": "float32"}, "type is float32"),
        ({"d_head": 160}, "head width is 160, above 128"),
    ],
)
def test_refusals_name_the_limit_and_the_number(changed, words):
    assert words in limits.refusal(dataclasses.replace(TRAINING, **changed))


@pytest.mark.parametrize("problem", [TRAINING, CACHED, dataclasses.replace(TRAINING, d_head=41, dropout=True)])
@pytest.mark.parametrize("kind", [*LARGE, *SMALL, ""])
def test_served_by_triton(problem, kind):
    problem = dataclasses.replace(problem, device_kind=kind)
    assert limits.refusal(problem) is None
    assert limits.kernel_of(problem) == "triton"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"dropout": True}, "dropout on probabilities"),
        ({"d_head": 41}, "head width is 41, and must be a multiple of 8"),
        ({"segment_len": 767}, "L is 767 and K 1536"),
        ({"segment_len": 767, "capacity": 800}, None),
    ],
)
def test_without_triton_by_cudnn(monkeypatch, changed, words):
    monkeypatch.setattr(limits, "_has_triton", lambda: False)
    problem = dataclasses.replace(TRAINING, **changed)
    refusal = limits.refusal(problem)
    assert limits.kernel_of(problem) == "cudnn"
    if words is None:
        assert refusal is None
    else:
        assert "no Pallas on Triton (Triton)" in refusal and words in refusal


@pytest.mark.parametrize(
    ("changed", "tile"),
    [
        ({}, (128, 64)),
        ({"segment_len": 150}, (64, 64)),
        ({"segment_len": 20}, (32, 64)),
        *(({"device_kind": kind}, (128, 64)) for kind in LARGE),
        *(({"device_kind": kind}, (64, 32)) for kind in SMALL),
        ({"device_kind": "NVIDIA GeForce RTX 4090", "d_head": 64}, (64, 64)),
    ],
)
def test_tiles_are_powers_of_two_that_the_queries_fill(changed, tile):
    assert limits.default_tile(dataclasses.replace(TRAINING, **changed)) == Tile(*tile)
    assert limits.default_tile(CACHED) == Tile(64, 64)
