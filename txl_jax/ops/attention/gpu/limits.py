"""Limits of the kernels: what they can serve, their tiles, and which of them serves a call."""

import pathlib
import re

import jax

from txl_jax.ops.attention.gpu.padding import power_of_two
from txl_jax.ops.attention.problem import Problem, Tile

TRITON, CUDNN = "triton", "cudnn"
_WIDEST = {TRITON: 128, CUDNN: 128}  # Of a head.
_HALF = ("bfloat16", "float16")
# Before compute capability 8.0: no bfloat16 products, no asynchronous copies. jax does not know the capability of a
# device that is only described, so by their names.
_TOO_OLD = re.compile(r"\b(GTX|RTX 20[678]0|TITAN|Tesla|Quadro|[VP]100|T\d+G?)\b")
# Shared memory of 164 KiB and more per multiprocessor: 128 x 64 at E = 128 compiles for an A100.
_LARGE = re.compile(r"\b(A100X?|A800|H20|G?H[1-8]00|G?B[1-3]00)\b")


def refusal(problem: Problem) -> str | None:
    """Returns why no kernel can serve a call: the limit and the given number; None: one can."""
    reason = _of_both(problem)
    of_triton, of_cudnn = _of_triton(problem), _of_cudnn(problem)
    if reason is None and of_triton is not None and of_cudnn is not None:
        reason = f"{of_triton} (Triton); {of_cudnn} (cuDNN)"
    return reason


def refusal_of_kernel(kernel: str, problem: Problem) -> str | None:
    """Returns why one kernel cannot serve a call, as `refusal`; an earlier choice may name the one that cannot."""
    return _of_both(problem) or (_of_cudnn if kernel == CUDNN else _of_triton)(problem)


def kernel_of(problem: Problem) -> str:
    """Returns the name of the kernel that serves a call which is not refused: "triton", or else "cudnn"."""
    return TRITON if _of_triton(problem) is None else CUDNN


def default_tile(problem: Problem) -> Tile:
    """Returns the tile for a call: queries and keys.

    Compiled for an H200, of the kernels of training with 128 x 64 at E = 128 that of keys spills 24 bytes (with dropout
    104) and the others none, at E = 64 all none. Nothing was timed on a GPU. Few queries take a tile that they fill.
    """
    large = bool(_LARGE.search(problem.device_kind))
    most = 64 if problem.cached or not large or problem.segment_len < 256 else 128
    keys = 64 if large or problem.d_head <= 64 else 32
    return Tile(min(most, power_of_two(problem.segment_len)), keys)


def _of_both(problem: Problem) -> str | None:
    if problem.platform != "gpu":
        return f"the platform is {problem.platform}, and these kernels are for GPUs"
    kind = problem.device_kind
    if kind and ("NVIDIA" not in kind or _TOO_OLD.search(kind)):
        return f"the GPU is {kind}, and the kernels need one of NVIDIA's with compute capability 8.0 or above"
    if problem.dtype not in _HALF:
        # A product of float32 in Triton is either TF32, of other values, or does not use the matrix units.
        return f"the type is {problem.dtype}, and the kernels are for {' and '.join(_HALF)}"
    return None


def _of_triton(problem: Problem) -> str | None:
    if not _has_triton():
        return "this jax has no Pallas on Triton"
    if problem.d_head > _WIDEST[TRITON]:
        return f"the head width is {problem.d_head}, above {_WIDEST[TRITON]}"
    return None


def _of_cudnn(problem: Problem) -> str | None:
    if problem.d_head > _WIDEST[CUDNN] or problem.d_head % 8:
        return f"the head width is {problem.d_head}, and must be a multiple of 8 and at most {_WIDEST[CUDNN]}"
    if problem.dropout:
        return "there is dropout on probabilities, which is not the project's mask there"
    if not problem.cached and (problem.segment_len % 2 or problem.n_keys % 2):
        return f"L is {problem.segment_len} and K {problem.n_keys}, and both must be even"
    return None


def _has_triton() -> bool:
    """Returns whether jax has Pallas's Triton backend, deprecated since 0.11, without importing it."""
    return (pathlib.Path(jax.__file__).parent / "experimental" / "pallas" / "triton.py").exists()
