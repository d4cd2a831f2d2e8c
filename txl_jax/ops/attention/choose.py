"""The choice of an implementation of attention.

This is the one place that decides which implementations can serve a call, and which of them is
fastest.
"""

import dataclasses
from collections.abc import Collection

from txl_jax.errors import UserError
from txl_jax.ops.attention.problem import PATHS, REFERENCE, AttentionCall, Implementation, Tile
from txl_jax.ops.attention.tpu import geometry as tpu

AUTO = "auto"
# Reading the KV cache is all the work then, and the reference converts it while it reads.
_ONE_TOKEN = "a single token has nothing to tile"
_DOCUMENTS = (
    "only the reference and stored have a mask for documents that are kept apart (data.reset_at)"
)
_INFERENCE = "stored is for training: nothing is kept for gradients over a KV cache"
_MOST_STRIPS = 8
_FEWEST_PAIRS = 128 * 128  # Queries times keys, in training.
_FEWEST_SCORES = 1 << 21
_FEWEST_CACHED_KEYS = 512


def choose(
    path: str, problem: AttentionCall, without: Collection[str] = ()
) -> tuple[Implementation, str]:
    """Chooses an implementation by its path, or the fastest if the path is "auto".

    Returns (implementation, reason for the choice).

    Over a KV cache "stored" means the reference. "auto" takes no path of `without`, which failed on
    this device (`runs.attention_check`). Raises `UserError` if the path is unknown or cannot serve
    this call.
    """
    if path not in (AUTO, *PATHS):
        raise UserError(
            f"the attention path must be one of {AUTO}, {', '.join(PATHS)}, got {path!r}"
        )
    if problem.is_one_token:
        return REFERENCE, _ONE_TOKEN
    if path == AUTO:
        return _choose_fastest(problem, without)
    if path == "stored" and problem.cached:
        return REFERENCE, _INFERENCE
    refused = refusal(path, problem)
    if refused is not None:
        what = "attention over a KV cache" if problem.cached else "attention"
        raise UserError(
            f"{what} cannot be {path} (--model.attention, implementation=): {refused}. "
            f"Choose another, or {AUTO}."
        )
    return _make(path, problem), "by model.attention"


def refusal(path: str, problem: AttentionCall) -> str | None:
    """Returns why a path cannot serve a call, or None if it can.

    The reason includes the limit and the number found.
    """
    if path == "reference":
        return None
    if problem.is_one_token:
        return _ONE_TOKEN
    if path == "stored":
        return _INFERENCE if problem.cached else None
    if problem.documents:
        return _DOCUMENTS
    if path == "tiled":
        return None
    if problem.platform == "tpu":
        return tpu.refusal(problem)
    instead = ", where you can use stored" if problem.platform == "gpu" else ""
    return f"its kernels are for TPU, but the platform is {problem.platform}{instead}"


def can_serve(implementation: Implementation, problem: AttentionCall) -> bool:
    """Returns whether an earlier choice can serve a call, on the problem's own platform."""
    if implementation.interpret:  # By any platform, and at any size.
        return not problem.is_one_token and not problem.documents
    return refusal(implementation.path, problem) is None


def resolve(implementation: Implementation | str, problem: AttentionCall) -> Implementation:
    """Returns the implementation for a call.

    A path is resolved by `choose`. An earlier choice is kept if it can serve the call.

    An earlier choice was made for other lengths, or on a machine that only compiles for the device.
    If it cannot serve this call, "auto" decides. Raises `UserError` as `choose`.
    """
    if not isinstance(implementation, Implementation):
        return choose(implementation, problem)[0]
    if implementation.path == "fused" and problem.platform != "tpu":
        problem = dataclasses.replace(problem, platform="tpu", device_kind="")
    if can_serve(implementation, problem):
        return implementation
    return choose("stored" if implementation.path == "stored" else AUTO, problem)[0]


def _choose_fastest(problem: AttentionCall, without: Collection[str]) -> tuple[Implementation, str]:
    if problem.dtype == "float64":
        return REFERENCE, "float64 is for checks, and other paths are checked against the reference"
    instead = f"no kernels for the platform {problem.platform}"
    if problem.platform == "tpu":
        not_fused = "it failed here" if "fused" in without else refusal("fused", problem)
        if not_fused is None:
            return _make("fused", problem), f"kernels for {problem.device_kind}"
        instead = f"no kernel, because {not_fused}"
    if problem.platform in ("tpu", "gpu"):
        if problem.cached or "stored" in without:
            return REFERENCE, instead
        return _make(
            "stored", problem
        ), f"{instead}, and stored moves fewer scores than the reference"
    if problem.documents:
        return REFERENCE, _DOCUMENTS
    if not tiles_are_faster(problem):
        return REFERENCE, f"{instead}, and tiles are not faster at these sizes"
    return _make("tiled", problem), f"{instead}, and tiles are faster than whole scores"


def _make(path: str, problem: AttentionCall) -> Implementation:
    if path == "tiled":
        return Implementation("tiled", tile=default_tile(problem))
    if path == "fused":
        return Implementation(
            "fused", kernel=tpu.kernel_of(problem), tile=tpu.default_tile(problem)
        )
    return Implementation(path)


def default_tile(problem: AttentionCall) -> Tile:
    """Returns the tile of tiled attention for a call."""
    if problem.cached:
        # Whole evaluation on two cores of an AMD EPYC, batch 1, float32, the reference 1:
        # enwik8_12l 160 x 1024 1.15, 320 x 1024 1.17, 640 x 1024 1.13; four layers of enwik8_24l
        # 128 x 1024 1.08, 512 x 1024 1.12, 256 x 512 0.96, 512 x 2048 1.03, 1024 x 1024 1.10;
        # wt103_base 64 x 1024 0.98, 320 x 1024 1.04, 640 x 1024 1.05.
        return Tile(512, 1024)
    # Forward and backward on an AMD EPYC (2 cores), L = M = 512, E 64, the reference 152 ms: 128 x
    # 1024 108 to 111, 256 x 1024 108 to 119, 64 x 1024 123 to 130, 128 x 512 196, 512 x 1024 113 to
    # 140. A strip whose keys are one block needs no rescaling, and reads a fixed range. L = M =
    # 128, E 32, the reference 61 ms: 64 x 256 32 to 55, 128 x 256 40 to 60. Every strip is compiled
    # (about 0.5 s), so there are 8 at most.
    query = min(128, max(64, problem.segment_len // 2))
    return Tile(max(query, -(-problem.segment_len // _MOST_STRIPS)), 1024)


def tiles_are_faster(problem: AttentionCall) -> bool:
    """Returns whether tiles are faster than the reference on this call."""
    if problem.platform != "cpu":
        return False
    if problem.cached:
        return problem.n_keys >= _FEWEST_CACHED_KEYS
    # Processor time of forward and backward, divided by the reference's, on an AMD EPYC: L 32, K 64
    # 1.16, L 70, K 140 1.0, L 150, K 300 0.84, L 128, K 256 0.55, L 512, K 1024 0.50, L 768, K 1536
    # 0.75. With few rows the reference's scores stay in the last cache: L 150, K 300 and 10 heads
    # 1.03 with 4 rows, 0.75 with 16.
    n_pair = problem.segment_len * problem.n_keys
    return n_pair >= _FEWEST_PAIRS and problem.batch * problem.n_head * n_pair >= _FEWEST_SCORES
