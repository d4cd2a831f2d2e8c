"""Tests of the choice of an implementation: who can serve what, what "auto" takes, and what is refused in words."""

import dataclasses

import pytest

from txl_jax.errors import UserError
from txl_jax.ops.attention import Implementation, Problem, Tile, choice
from txl_jax.ops.attention.problem import PATHS

LARGE = Problem("cpu", "cpu", "float32", 2, 8, 512, 1024, 64, 1024)
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


def test_a_written_implementation_can_be_read_and_kernels_that_are_gone_are_known():
    for implementation in WRITTEN:
        assert Implementation.parse(str(implementation)) == implementation
    for gone in ("fused triton 64x64", "fused cudnn"):
        assert Implementation.parse(gone) is None


@pytest.mark.parametrize(
    "text",
    ["", "tiled 128x", "reference  128x128", "tiled", "tiled 0x128", "fused 16x16", "fused mosaic_roll", "other 8x8"],
)
def test_other_words_are_no_implementation(text):
    with pytest.raises(ValueError, match="no implementation"):
        Implementation.parse(text)


@pytest.mark.parametrize(("problem", "path"), [(LARGE, "tiled"), (ON_TPU, "fused"), (ON_GPU, "stored")])
def test_auto_takes_the_path_of_the_platform_and_the_reference_in_float64(problem, path):
    implementation, reason = choice.choose("auto", problem)
    assert implementation.path == path and reason
    assert choice.choose("auto", dataclasses.replace(problem, dtype="float64"))[0].path == "reference"


def test_an_earlier_choice_is_kept_where_it_can_serve():
    tiled, fused = WRITTEN[1], WRITTEN[2]
    assert choice.resolve(tiled, LARGE) == tiled
    # A kernel is resolved on a machine that only compiles for it.
    assert choice.resolve(fused, dataclasses.replace(ON_TPU, platform="cpu", device_kind="cpu")) == fused
    assert not choice.can_serve(fused, LARGE) and choice.can_serve(fused, ON_TPU)
    tiny = dataclasses.replace(ON_TPU, segment_len=4, n_keys=8, n_positions=8)
    assert choice.resolve(fused, tiny).path == "stored"


@pytest.mark.parametrize(
    ("problem", "changes", "path"),
    [
        (ON_TPU, {"device_kind": "TPU v2"}, "stored"),
        (ON_TPU, {"segment_len": 32, "n_keys": 64}, "stored"),
        (ON_TPU, {"documents": True}, "stored"),
        (ON_TPU, CACHED | {"d_head": 320}, "reference"),
        (ON_GPU, {}, "stored"),
        (ON_GPU, {"dtype": "float32"}, "stored"),
        (ON_GPU, {"documents": True}, "stored"),
        (ON_GPU, CACHED, "reference"),
        (LARGE, {"documents": True}, "reference"),
        (LARGE, {"segment_len": 4, "n_keys": 8}, "reference"),
    ],
)
def test_where_no_kernel_serves_auto_takes_stored_on_accelerators_and_the_reference_elsewhere(problem, changes, path):
    problem = dataclasses.replace(problem, **changes)
    implementation, reason = choice.choose("auto", problem)
    assert implementation.path == path
    if problem.platform == "tpu":
        assert choice.refusal("fused", problem) in reason


def test_on_a_gpu_fused_is_refused_with_what_there_is():
    for problem in (ON_GPU, dataclasses.replace(ON_GPU, **CACHED)):
        with pytest.raises(UserError, match=r"platform is gpu\b.*\bstored\b"):
            choice.choose("fused", problem)


@pytest.mark.parametrize("problem", [LARGE, ON_TPU, ON_GPU], ids=lambda problem: problem.platform)
def test_stored_over_a_cache_is_the_reference(problem):
    stored, cached = Implementation("stored"), dataclasses.replace(problem, **CACHED)
    for given in (problem, dataclasses.replace(problem, documents=True, dtype="float64")):
        assert choice.choose("stored", given)[0] == choice.resolve(stored, given) == stored
    assert choice.choose("stored", cached)[0] == choice.resolve(stored, cached) == choice.REFERENCE
    assert not choice.can_serve(stored, cached)


@pytest.mark.parametrize("problem", [LARGE, ON_TPU, ON_GPU], ids=lambda problem: problem.platform)
def test_one_token_over_a_cache_is_the_references_whatever_was_asked_for(problem):
    one = dataclasses.replace(problem, segment_len=1, capacity=4096, n_keys=4097, n_positions=4097)
    for path in ("auto", *PATHS):
        assert choice.choose(path, one)[0].path == "reference"
        assert (choice.refusal(path, one) is None) == (path == "reference")
    for implementation in WRITTEN:
        assert choice.resolve(implementation, one).path == "reference"
        assert choice.can_serve(implementation, one) == (implementation.path == "reference")
    with pytest.raises(UserError, match="'flash'"):
        choice.choose("flash", one)
    assert choice.refusal("tiled", dataclasses.replace(one, capacity=None)) is None
