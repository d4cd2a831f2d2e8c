"""The choice of an implementation of attention: here alone is decided who can serve what, and who is the fastest."""

import dataclasses

from txl_jax.errors import UserError
from txl_jax.ops.attention.problem import PATHS, REFERENCE, Implementation, Problem
from txl_jax.ops.attention.tiled import limits as tiled
from txl_jax.ops.attention.tpu import geometry as tpu

AUTO = "auto"
_STORED = Implementation("stored")
# Reading the KV cache is all the work then, and the reference converts it while it reads.
_ONE_TOKEN = "one token at a time has nothing to tile"
_DOCUMENTS = "documents that are kept apart (data.reset_at) are masked by the reference and by stored alone"
_INFERENCE = "stored is for training: nothing is kept for gradients over a KV cache"


def choose(path: str, problem: Problem) -> tuple[Implementation, str]:
    """Chooses an implementation: (implementation, the reason for it).

    Args:
      path: One of `PATHS`, or "auto" for what is expected to be the fastest of those that can serve.
      problem: The call. Over a KV cache "stored" means the reference.

    Raises:
      UserError: If the path is unknown or cannot serve this call.
    """
    if path not in (AUTO, *PATHS):
        raise UserError(f"the path of attention is {path!r}; it must be of {AUTO}, {', '.join(PATHS)}")
    if problem.is_one_token:
        return REFERENCE, _ONE_TOKEN
    if path == AUTO:
        return _choose_fastest(problem)
    if path == "stored" and problem.cached:
        return REFERENCE, _INFERENCE
    refused = refusal(path, problem)
    if refused is not None:
        what = "attention over a KV cache" if problem.cached else "attention"
        raise UserError(
            f"{what} cannot be {path} (--model.attention, implementation=): {refused}; choose another, or {AUTO}"
        )
    return _make(path, problem), "by model.attention"


def refusal(path: str, problem: Problem) -> str | None:
    """Returns why a path cannot serve a call, with the limit and the given number, or None if it can."""
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
    instead = ", which has stored in their place" if problem.platform == "gpu" else ""
    return f"its kernels are for TPU, and the platform is {problem.platform}{instead}"


def can_serve(implementation: Implementation, problem: Problem) -> bool:
    """Returns whether an earlier choice can serve a call, on the problem's own platform."""
    if implementation.interpret:  # By any platform, and at any size.
        return not problem.is_one_token and not problem.documents
    return refusal(implementation.path, problem) is None


def resolve(implementation: Implementation | str, problem: Problem) -> Implementation:
    """Returns the implementation of a call: for a path the choice, for an earlier choice that one where it can serve.

    An earlier choice was made for other lengths, or on a machine that only compiles for the device. If it cannot serve
    this call, "auto" decides.

    Raises:
      UserError: If `choose` does.
    """
    if not isinstance(implementation, Implementation):
        return choose(implementation, problem)[0]
    if implementation.path == "fused" and problem.platform != "tpu":
        problem = dataclasses.replace(problem, platform="tpu", device_kind="")
    if can_serve(implementation, problem):
        return implementation
    return choose("stored" if implementation.path == "stored" else AUTO, problem)[0]


def _choose_fastest(problem: Problem) -> tuple[Implementation, str]:
    if problem.dtype == "float64":
        return REFERENCE, "float64 is for checks, and this is what others are checked against"
    instead = f"no kernels for the platform {problem.platform}"
    if problem.platform == "tpu":
        not_fused = refusal("fused", problem)
        if not_fused is None:
            return _make("fused", problem), f"kernels for {problem.device_kind}"
        instead = f"no kernel, as {not_fused}"
    if problem.platform in ("tpu", "gpu"):
        if problem.cached:
            return REFERENCE, instead
        return _STORED, f"{instead}; it moves fewer scores than the reference"
    if problem.documents:
        return REFERENCE, _DOCUMENTS
    if not tiled.is_faster(problem):
        return REFERENCE, f"{instead}; tiles are not faster at these sizes"
    return _make("tiled", problem), f"{instead}; tiles are faster than whole scores"


def _make(path: str, problem: Problem) -> Implementation:
    if path == "tiled":
        return Implementation("tiled", tile=tiled.default_tile(problem))
    if path == "fused":
        return Implementation("fused", kernel=tpu.kernel_of(problem), tile=tpu.default_tile(problem))
    return Implementation(path)
