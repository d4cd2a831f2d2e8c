"""Tests of the choice of an implementation: which calls each can serve, what "auto" takes, and
errors.
"""

import dataclasses

import pytest

from txl_jax.errors import UserError
from txl_jax.ops.attention import AttentionCall, Implementation, Tile, choose
from txl_jax.ops.attention.problem import PATHS

# Large enough for tiles and kernels: M and L are 512.
LARGE = AttentionCall(
    platform="cpu",
    device_kind="cpu",
    dtype="float32",
    batch=2,
    n_head=8,
    segment_len=512,
    n_keys=1024,
    d_head=64,
    n_positions=1024,
)
ON_TPU = dataclasses.replace(LARGE, platform="tpu", device_kind="TPU v5 lite", dtype="bfloat16")
ON_GPU = dataclasses.replace(LARGE, platform="gpu", device_kind="NVIDIA H200", dtype="bfloat16")
# Fields of a call over a KV cache, with distances that are clamped at 1,000.
CACHED = {"segment_len": 128, "capacity": 3840, "n_keys": 3840 + 128, "n_positions": 1001}
# One of each path, both kernels of "fused", and an interpreted kernel.
IMPLEMENTATIONS = [
    Implementation("reference"),
    Implementation("tiled", tile=Tile(128, 256)),
    Implementation("fused", "mosaic_roll", Tile(256, 512)),
    Implementation("fused", "mosaic_gather", Tile(16, 128), interpret=True),
    Implementation("stored"),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_an_implementation_is_read_from_its_string(implementation):
    assert Implementation.parse(str(implementation)) == implementation


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("tiled 128x", id="half a tile"),
        pytest.param("reference  128x128", id="two spaces"),
        pytest.param("tiled", id="tiled without a tile"),
        pytest.param("tiled 0x128", id="a tile without queries"),
        pytest.param("fused 16x16", id="fused without a kernel"),
        pytest.param("fused mosaic_roll", id="a kernel without a tile"),
        pytest.param("other 8x8", id="an unknown path"),
    ],
)
def test_a_string_that_is_not_an_implementation_is_an_error(text):
    with pytest.raises(ValueError, match="not an attention implementation"):
        Implementation.parse(text)


@pytest.mark.parametrize(
    ("problem", "changes", "path"),
    [
        pytest.param(LARGE, {"dtype": "float64"}, "reference", id="CPU, float64"),
        pytest.param(ON_TPU, {"dtype": "float64"}, "reference", id="TPU, float64"),
        pytest.param(ON_GPU, {"dtype": "float64"}, "reference", id="GPU, float64"),
        pytest.param(LARGE, {}, "tiled", id="CPU"),
        pytest.param(ON_TPU, {}, "fused", id="TPU"),
        pytest.param(ON_TPU, {"device_kind": "TPU v2"}, "stored", id="old TPU"),
        pytest.param(ON_TPU, {"segment_len": 32, "n_keys": 64}, "stored", id="TPU, small"),
        pytest.param(ON_TPU, {"documents": True}, "stored", id="TPU, documents"),
        pytest.param(ON_TPU, {"has_position_score": True}, "stored", id="TPU, position score"),
        pytest.param(ON_TPU, CACHED | {"d_head": 320}, "reference", id="TPU, cache, wide heads"),
        pytest.param(ON_GPU, {}, "stored", id="GPU"),
        pytest.param(ON_GPU, {"dtype": "float32"}, "stored", id="GPU, float32"),
        pytest.param(ON_GPU, {"documents": True}, "stored", id="GPU, documents"),
        pytest.param(ON_GPU, CACHED, "reference", id="GPU, cache"),
        pytest.param(LARGE, {"documents": True}, "reference", id="CPU, documents"),
        pytest.param(LARGE, {"segment_len": 4, "n_keys": 8}, "reference", id="CPU, small"),
    ],
)
def test_auto_takes_the_path_of_the_platform_or_says_why_not(problem, changes, path):
    """Every choice has a reason. If a TPU gets no kernel, the reason has the kernels' refusal."""
    problem = dataclasses.replace(problem, **changes)

    implementation, reason = choose.choose("auto", problem)

    assert implementation.path == path
    assert reason
    if problem.platform == "tpu" and path == "stored":
        assert choose.refusal("fused", problem) in reason


@pytest.mark.parametrize(
    ("problem", "without", "path"),
    [
        pytest.param(ON_TPU, ["fused"], "stored", id="TPU"),
        pytest.param(ON_TPU, ["fused", "stored"], "reference", id="TPU, two failed"),
        pytest.param(ON_GPU, ["stored"], "reference", id="GPU"),
        pytest.param(
            dataclasses.replace(ON_TPU, **CACHED), ["fused"], "reference", id="TPU, cache"
        ),
    ],
)
def test_auto_takes_the_next_path_after_those_that_failed(problem, without, path):
    implementation, _ = choose.choose("auto", problem, without)

    assert implementation == Implementation(path)


on_all_platforms = pytest.mark.parametrize(
    "problem", [LARGE, ON_TPU, ON_GPU], ids=lambda problem: problem.platform
)


def one_token(problem):
    """The call, changed to a single token over a KV cache of 4,096 slots."""
    return dataclasses.replace(problem, segment_len=1, capacity=4096, n_keys=4097, n_positions=4097)


@on_all_platforms
@pytest.mark.parametrize(
    "changes", [{}, {"documents": True, "dtype": "float64"}], ids=["plain", "documents, float64"]
)
def test_stored_serves_training(problem, changes):
    problem = dataclasses.replace(problem, **changes)
    stored = Implementation("stored")

    assert choose.choose("stored", problem)[0] == stored
    assert choose.resolve(stored, problem) == stored


@on_all_platforms
def test_stored_over_a_cache_is_the_reference(problem):
    cached = dataclasses.replace(problem, **CACHED)
    stored = Implementation("stored")

    assert choose.choose("stored", cached)[0] == choose.REFERENCE
    assert choose.resolve(stored, cached) == choose.REFERENCE
    assert not choose.can_serve(stored, cached)


@on_all_platforms
@pytest.mark.parametrize("path", PATHS)
def test_one_token_over_a_cache_is_computed_by_the_reference(problem, path):
    reason = choose.refusal(path, one_token(problem))

    assert choose.choose(path, one_token(problem))[0].path == "reference"
    assert (reason is None) == (path == "reference")


@on_all_platforms
def test_auto_takes_the_reference_for_one_token_over_a_cache(problem):
    """And "auto" itself counts as refused, as every path other than the reference."""
    assert choose.choose("auto", one_token(problem))[0].path == "reference"
    assert choose.refusal("auto", one_token(problem)) is not None


@on_all_platforms
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_only_the_reference_can_serve_one_token_over_a_cache(problem, implementation):
    is_reference = implementation.path == "reference"

    assert choose.resolve(implementation, one_token(problem)).path == "reference"
    assert choose.can_serve(implementation, one_token(problem)) == is_reference


@on_all_platforms
def test_tiles_serve_one_token_without_a_cache(problem):
    in_training = dataclasses.replace(one_token(problem), capacity=None)

    assert choose.refusal("tiled", in_training) is None


@on_all_platforms
def test_a_path_that_does_not_exist_is_an_error_with_its_name(problem):
    with pytest.raises(UserError, match="'flash'"):
        choose.choose("flash", one_token(problem))


@pytest.mark.parametrize("changes", [{}, CACHED], ids=["training", "cache"])
def test_fused_on_a_gpu_is_an_error_that_names_stored(changes):
    with pytest.raises(UserError, match=r"platform is gpu\b.*\bstored\b"):
        choose.choose("fused", dataclasses.replace(ON_GPU, **changes))
