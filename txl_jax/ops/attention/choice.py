"""The choice of an implementation of attention: here alone is decided who can serve what, and who is the fastest."""

import dataclasses
from typing import Any

from txl_jax.errors import UserError
from txl_jax.ops.attention.gpu import limits as gpu
from txl_jax.ops.attention.problem import PATHS, REFERENCE, Implementation, Problem
from txl_jax.ops.attention.tiled import limits as tiled
from txl_jax.ops.attention.tpu import geometry as tpu

AUTO = "auto"
_MANY_PAIRS = 128 * 256
# Reading the KV cache is all the work then, and the reference converts it while it reads.
_ONE_TOKEN = "one token at a time has nothing to tile"
_DOCUMENTS = "documents that are kept apart (data.reset_at) are masked by the reference alone"
_FUSED: dict[str, Any] = {"tpu": tpu, "gpu": gpu}


def choose(path: str, problem: Problem) -> tuple[Implementation, str]:
    """Chooses an implementation: (implementation, the reason for it).

    Args:
      path: "reference", "tiled" or "fused"; "auto": what is expected to be the fastest of those that can serve.
      problem: the call.

    Raises:
      UserError: an unknown path, or one that cannot serve this call.
    """
    if path not in (AUTO, *PATHS):
        raise UserError(f"the path of attention is {path!r}; it must be of {AUTO}, {', '.join(PATHS)}")
    if problem.is_one_token:
        return REFERENCE, _ONE_TOKEN
    if path == AUTO:
        return _choose_fastest(problem)
    refusal = refusal_of(path, problem)
    if refusal is not None:
        what = "attention over a KV cache" if problem.cached else "attention"
        raise UserError(
            f"{what} cannot be {path} (--model.attention, implementation=): {refusal}; choose another, or {AUTO}"
        )
    return _make(path, problem), "by model.attention"


def refusal_of(path: str, problem: Problem) -> str | None:
    """Returns why a path cannot serve a call: the limit and the given number; None: it can."""
    if path == "reference":
        return None
    if problem.documents:
        return _DOCUMENTS
    if problem.is_one_token:
        return _ONE_TOKEN
    if path == "tiled":
        return None
    if problem.platform not in _FUSED:
        return f"its kernels are for TPU and GPU, and the platform is {problem.platform}"
    return _FUSED[problem.platform].refusal(problem)


def can_serve(implementation: Implementation, problem: Problem) -> bool:
    """Returns whether an earlier choice can serve a call, on the problem's own platform."""
    on_its_platform = implementation.interpret or implementation.platform in (None, problem.platform)
    return on_its_platform and _refusal_of_choice(implementation, problem) is None


def resolve(implementation: Implementation | str, problem: Problem) -> Implementation:
    """Returns the implementation of a call: of a path the choice, of an earlier choice that one where it can serve.

    An earlier choice was made for other lengths, or on a machine that only compiles for the device; where it cannot
    serve this call "auto" decides.

    Raises:
      UserError: as `choose`.
    """
    if not isinstance(implementation, Implementation):
        return choose(implementation, problem)[0]
    if _refusal_of_choice(implementation, _where(implementation, problem)) is not None:
        return choose(AUTO, problem)[0]
    return implementation


def _refusal_of_choice(implementation: Implementation, problem: Problem) -> str | None:
    """Returns why an earlier choice cannot serve a call: its path, or of the two kernels for GPUs its own."""
    if implementation.interpret and not problem.is_one_token and not problem.documents:
        return None
    refusal = refusal_of(implementation.path, problem)
    if refusal is None and implementation.kernel is not None and problem.platform == "gpu":
        return gpu.refusal_of_kernel(implementation.kernel, problem)
    return refusal


def _where(implementation: Implementation, problem: Problem) -> Problem:
    """Returns the problem on the platform of an earlier choice, of whose device only the platform is known then."""
    platform = implementation.platform or problem.platform
    if platform == problem.platform:
        return problem
    return dataclasses.replace(problem, platform=platform, device_kind="")


def _choose_fastest(problem: Problem) -> tuple[Implementation, str]:
    if problem.documents:
        return REFERENCE, _DOCUMENTS
    if problem.dtype == "float64":
        return REFERENCE, "float64 is for checks, and this is what others are checked against"
    if problem.platform in _FUSED:
        not_fused = refusal_of("fused", problem)
        if not_fused is None:
            return _make("fused", problem), f"kernels for {problem.device_kind}"
        instead = f"no kernel, as {not_fused}"
    else:
        instead = f"no kernels for the platform {problem.platform}"
    if problem.platform in _FUSED:
        # Not measured there: whole scores of a few pairs are no burden, those of many are most of a layer's memory.
        if problem.segment_len * problem.n_keys < _MANY_PAIRS:
            return REFERENCE, f"{instead}; whole scores are small"
        return _make("tiled", problem), f"{instead}; tiles need less memory than whole scores"
    if not tiled.is_faster(problem):
        return REFERENCE, f"{instead}; tiles are not faster at these sizes"
    return _make("tiled", problem), f"{instead}; tiles are faster than whole scores"


def _make(path: str, problem: Problem) -> Implementation:
    if path == "reference":
        return REFERENCE
    if path == "tiled":
        return Implementation("tiled", tile=tiled.default_tile(problem))
    fused = _FUSED[problem.platform]
    return Implementation("fused", kernel=fused.kernel_of(problem), tile=fused.default_tile(problem))
