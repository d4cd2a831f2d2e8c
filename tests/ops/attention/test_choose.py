"""Tests of the choice of an implementation: who can serve what, what "auto" takes, and what is
refused in words.
"""

import dataclasses

import pytest

from txl_jax.errors import UserError
from txl_jax.ops.attention import AttentionCall, Implementation, Tile, choose
from txl_jax.ops.attention.problem import PATHS

LARGE = AttentionCall("cpu", "cpu", "float32", 2, 8, 512, 1024, 64, 1024)
ON_TPU = dataclasses.replace(LARGE, platform="tpu", device_kind="TPU v5 lite", dtype="bfloat16")
ON_GPU = dataclasses.replace(LARGE, platform="gpu", device_kind="NVIDIA H200", dtype="bfloat16")
CACHED = {"segment_len": 128, "capacity": 3840, "n_keys": 3968, "n_positions": 1001}
WRITTEN = [
    Implementation("reference"),
    Implementation("tiled", tile=Tile(128, 256)),
    Implementation("fused", "mosaic_roll", Tile(256, 512)),
    Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True),
    Implementation("stored"),
]


def test_implementations_are_written_and_read():
    for implementation in WRITTEN:
        assert Implementation.parse(str(implementation)) == implementation
    wrong = (
        "",
        "tiled 128x",
        "reference  128x128",
        "tiled",
        "tiled 0x128",
        "fused 16x16",
        "fused mosaic_roll",
    )
    for text in (*wrong, "other 8x8"):
        with pytest.raises(ValueError, match="not an attention implementation"):
            Implementation.parse(text)


@pytest.mark.parametrize(
    ("problem", "changes", "path"),
    [
        *((problem, {"dtype": "float64"}, "reference") for problem in (LARGE, ON_TPU, ON_GPU)),
        (LARGE, {}, "tiled"),
        (ON_TPU, {}, "fused"),
        (ON_TPU, {"device_kind": "TPU v2"}, "stored"),
        (ON_TPU, {"segment_len": 32, "n_keys": 64}, "stored"),
        (ON_TPU, {"documents": True}, "stored"),
        (ON_TPU, {"has_position_score": True}, "stored"),
        (ON_TPU, CACHED | {"d_head": 320}, "reference"),
        (ON_GPU, {}, "stored"),
        (ON_GPU, {"dtype": "float32"}, "stored"),
        (ON_GPU, {"documents": True}, "stored"),
        (ON_GPU, CACHED, "reference"),
        (LARGE, {"documents": True}, "reference"),
        (LARGE, {"segment_len": 4, "n_keys": 8}, "reference"),
    ],
)
def test_auto_takes_the_path_of_the_platform_or_says_why_not(problem, changes, path):
    problem = dataclasses.replace(problem, **changes)
    implementation, reason = choose.choose("auto", problem)
    assert implementation.path == path and reason
    if problem.platform == "tpu" and path == "stored":
        assert choose.refusal("fused", problem) in reason


@pytest.mark.parametrize(
    ("problem", "without", "path"),
    [
        (ON_TPU, ["fused"], "stored"),
        (ON_TPU, ["fused", "stored"], "reference"),
        (ON_GPU, ["stored"], "reference"),
        (dataclasses.replace(ON_TPU, **CACHED), ["fused"], "reference"),
    ],
)
def test_auto_takes_the_next_path_after_those_that_failed(problem, without, path):
    assert choose.choose("auto", problem, without)[0] == Implementation(path)


@pytest.mark.parametrize("problem", [LARGE, ON_TPU, ON_GPU], ids=lambda problem: problem.platform)
def test_stored_and_one_token_over_a_cache_are_the_references(problem):
    stored, cached = Implementation("stored"), dataclasses.replace(problem, **CACHED)
    for given in (problem, dataclasses.replace(problem, documents=True, dtype="float64")):
        assert choose.choose("stored", given)[0] == choose.resolve(stored, given) == stored
    assert choose.choose("stored", cached)[0] == choose.resolve(stored, cached) == choose.REFERENCE
    assert not choose.can_serve(stored, cached)
    one = dataclasses.replace(problem, segment_len=1, capacity=4096, n_keys=4097, n_positions=4097)
    for path in ("auto", *PATHS):
        assert choose.choose(path, one)[0].path == "reference"
        assert (choose.refusal(path, one) is None) == (path == "reference")
    for implementation in WRITTEN:
        assert choose.resolve(implementation, one).path == "reference"
        assert choose.can_serve(implementation, one) == (implementation.path == "reference")
    with pytest.raises(UserError, match="'flash'"):
        choose.choose("flash", one)
    if problem is ON_GPU:
        for given in (problem, cached):
            with pytest.raises(UserError, match=r"platform is gpu\b.*\bstored\b"):
                choose.choose("fused", given)
    assert choose.refusal("tiled", dataclasses.replace(one, capacity=None)) is None
