"""Tests of the choice of an implementation: who can serve what, what "auto" takes, and what is refused in words."""

import dataclasses

import pytest

from txl_jax.errors import UserError
from txl_jax.ops.attention import Implementation, Problem, Tile, choice

LARGE = Problem("cpu", "cpu", "float32", 2, 8, 512, 1024, 64, 1024)
ON_TPU = dataclasses.replace(LARGE, platform="tpu", device_kind="TPU v5 lite", dtype="bfloat16")
ON_GPU = dataclasses.replace(LARGE, platform="gpu", device_kind="NVIDIA H200", dtype="bfloat16")
WRITTEN = [
    Implementation("reference"),
    Implementation("tiled", tile=Tile(128, 256)),
    Implementation("fused", "mosaic_roll", Tile(256, 512)),
    Implementation("fused", "cudnn"),
    Implementation("fused", "triton", Tile(16, 128), interpret=True),
]


def test_a_written_implementation_can_be_read():
    for implementation in WRITTEN:
        assert Implementation.parse(str(implementation)) == implementation
    assert [written.platform for written in WRITTEN] == [None, None, "tpu", "gpu", "gpu"]


@pytest.mark.parametrize(
    "text", ["", "tiled 128x", "reference  128x128", "tiled", "tiled 0x128", "fused 16x16", "fused triton", "other 8x8"]
)
def test_other_words_are_no_implementation(text):
    with pytest.raises(ValueError, match="no implementation"):
        Implementation.parse(text)


@pytest.mark.parametrize(("problem", "path"), [(LARGE, "tiled"), (ON_TPU, "fused"), (ON_GPU, "fused")])
def test_auto_writes_no_scores_of_large_problems(problem, path):
    implementation, reason = choice.choose("auto", problem)
    assert implementation.path == path and implementation.platform in (None, problem.platform) and reason
    assert choice.choose("auto", dataclasses.replace(problem, dtype="float64"))[0].path == "reference"


def test_where_kernels_refuse_the_next_path_is_taken_and_is_the_reason():
    old = dataclasses.replace(ON_TPU, device_kind="TPU v2")
    refusal = choice.refusal_of("fused", old)
    implementation, reason = choice.choose("auto", old)
    assert implementation.path == "tiled" and refusal in reason


def test_an_earlier_choice_is_kept_where_it_can_serve():
    tiled, fused = WRITTEN[1], WRITTEN[2]
    assert choice.resolve(tiled, LARGE) == tiled
    # A kernel is resolved on a machine that only compiles for it.
    assert choice.resolve(fused, dataclasses.replace(ON_TPU, platform="cpu", device_kind="cpu")) == fused
    assert not choice.can_serve(fused, LARGE) and choice.can_serve(fused, ON_TPU)
    tiny = dataclasses.replace(ON_TPU, segment_len=4, n_keys=8, n_positions=8)
    assert choice.resolve(fused, tiny).path == "reference"


def test_an_earlier_choice_of_a_kernel_is_kept_where_that_kernel_can_serve():
    """Of these two calls Triton can serve both, and may not have been installed when cuDNN was chosen."""
    cudnn = Implementation("fused", "cudnn", Tile(64, 64))
    assert choice.can_serve(cudnn, ON_GPU) and choice.resolve(cudnn, ON_GPU) == cudnn
    for changes in ({"dropout": True}, {"segment_len": 511}):
        problem = dataclasses.replace(ON_GPU, **changes)
        assert not choice.can_serve(cudnn, problem)
        assert choice.resolve(cudnn, problem).kernel == "triton"


@pytest.mark.parametrize("problem", [LARGE, ON_TPU, ON_GPU], ids=lambda problem: problem.platform)
def test_one_token_over_a_cache_is_the_references_whatever_was_asked_for(problem):
    one = dataclasses.replace(problem, segment_len=1, capacity=4096, n_keys=4097, n_positions=4097)
    for path in ("auto", "reference", "tiled", "fused"):
        assert choice.choose(path, one)[0].path == "reference"
        assert (choice.refusal_of(path, one) is None) == (path == "reference")
    for implementation in WRITTEN:
        assert choice.resolve(implementation, one).path == "reference"
        assert choice.can_serve(implementation, one) == (implementation.path == "reference")
    with pytest.raises(UserError, match="'flash'"):
        choice.choose("flash", one)
    assert choice.refusal_of("tiled", dataclasses.replace(one, capacity=None)) is None
