"""Chooses an attention implementation.

Only this module decides which implementations support a call, and which of them is the fastest.
"""

import dataclasses
import math
from collections.abc import Collection

from txl_jax.errors import UserError
from txl_jax.ops.attention.problem import PATHS, REFERENCE, AttentionCall, Implementation, Tile
from txl_jax.ops.attention.tpu import geometry as tpu

AUTO = "auto"
# Reading the KV cache is all the work then, and the reference converts it while it reads.
_ONE_TOKEN = "a single token cannot be tiled"
_DOCUMENTS = "only the reference and stored support masks between documents (data.reset_at)"
_INFERENCE = "stored is for training: attention over a KV cache keeps nothing for gradients"

# Queries of one strip in training: fewer if the segment is short, more if there would be too many
# strips. Each strip is compiled, in about 0.5 s.
_STRIP_QUERIES = 128
_FEWEST_STRIP_QUERIES = 64
_MOST_STRIPS = 8
# Keys of one tile: at most so many in training, about so many over a KV cache.
_TILE_KEYS = 1024
# Most queries of one tile over a KV cache, all of its rows and heads together (`default_tile`).
_CACHED_TILE_QUERIES = 512

# Below any of these, the reference is as fast as tiles, or faster (`tiles_are_faster`).
_FEWEST_PAIRS = 128 * 128  # Queries times keys, in training.
_FEWEST_SCORES = 1 << 21  # Pairs times rows and heads, in training.
_FEWEST_CACHED_KEYS = 512  # Slots and the segment's keys, over a KV cache.


def choose(
    path: str, call: AttentionCall, failed_paths: Collection[str] = ()
) -> tuple[Implementation, str]:
    """Chooses an implementation by its path, or the fastest if the path is "auto".

    Over a KV cache "stored" means the reference. A single token over a KV cache always uses the
    reference, for any path.

    Args:
      path: "auto" or one of `PATHS`.
      call: What the implementation must be able to compute.
      failed_paths: Paths that "auto" must not take, because they failed on this device
        (`runs.attention_check`).

    Returns:
      (implementation, reason for the choice).

    Raises:
      UserError: If the path is unknown or does not support this call.
    """
    if path not in (AUTO, *PATHS):
        raise UserError(
            f"the attention path must be one of {AUTO}, {', '.join(PATHS)}, got {path!r}"
        )
    if call.is_one_token:
        return REFERENCE, _ONE_TOKEN
    if path == AUTO:
        return _choose_fastest(call, failed_paths)
    if path == "stored" and call.cached:
        return REFERENCE, _INFERENCE

    obstacle = refusal(path, call)
    if obstacle is not None:
        task = "attention over a KV cache" if call.cached else "attention"
        raise UserError(
            f"{task} cannot be {path} (--model.attention, implementation=): {obstacle}. "
            f"Choose another, or {AUTO}."
        )
    return _make(path, call), "by model.attention"


def refusal(path: str, call: AttentionCall) -> str | None:
    """Returns why a path does not support a call, or None if it does.

    The reason includes the limit and the actual number.
    """
    if path == "reference":
        return None
    if call.is_one_token:
        return _ONE_TOKEN
    if path == "stored":
        return _INFERENCE if call.cached else None
    if call.documents:
        return _DOCUMENTS
    if path == "tiled":
        return None

    # What remains is fused.
    if call.platform == "tpu":
        return tpu.refusal(call)
    reason = f"its kernels are for TPU, but the platform is {call.platform}"
    if call.platform == "gpu":
        return f"{reason}, where you can use stored"
    return reason


def can_serve(implementation: Implementation, call: AttentionCall) -> bool:
    """Returns whether an earlier choice supports a call, on the call's own platform."""
    # Interpreted kernels run on any platform and at any size, but have no mask for documents.
    if implementation.interpret:
        return not call.is_one_token and not call.documents
    return refusal(implementation.path, call) is None


def resolve(implementation: Implementation | str, call: AttentionCall) -> Implementation:
    """Returns the implementation for a call.

    A path is resolved by `choose`. An earlier choice is kept if it supports the call: it may have
    been made for other lengths, or on a machine that only compiles for the device. If it does not
    support this call, "auto" decides.

    Raises:
      UserError: If a path is unknown or does not support this call.
    """
    if not isinstance(implementation, Implementation):
        resolved, _ = choose(implementation, call)
        return resolved

    # Fused was chosen for a TPU, even if this machine, which compiles for it, has none. Which kind
    # of TPU is not known here.
    if implementation.path == "fused" and call.platform != "tpu":
        call = dataclasses.replace(call, platform="tpu", device_kind="")
    if can_serve(implementation, call):
        return implementation

    # Over a KV cache stored becomes the reference.
    path = "stored" if implementation.path == "stored" else AUTO
    resolved, _ = choose(path, call)
    return resolved


def _choose_fastest(
    call: AttentionCall, failed_paths: Collection[str]
) -> tuple[Implementation, str]:
    """Returns (fastest implementation that supports the call, reason)."""
    if call.dtype == "float64":
        return REFERENCE, "float64 is for checks, and other paths are checked against the reference"

    no_kernels = f"no kernels for the platform {call.platform}"
    if call.platform == "tpu":
        obstacle = refusal("fused", call)
        if "fused" in failed_paths:
            obstacle = "it failed here"
        if obstacle is None:
            return _make("fused", call), f"kernels for {call.device_kind}"
        no_kernels = f"no kernel, because {obstacle}"

    # Stored is only for training (`_INFERENCE`).
    if call.platform in ("tpu", "gpu"):
        if call.cached or "stored" in failed_paths:
            return REFERENCE, no_kernels
        reason = f"{no_kernels}, and stored moves fewer scores than the reference"
        return _make("stored", call), reason

    # On a CPU tiles are never in `failed_paths`: only accelerators compare them with the reference
    # before a run (`runs.attention_check`).
    if call.documents:
        return REFERENCE, _DOCUMENTS
    if not tiles_are_faster(call):
        return REFERENCE, f"{no_kernels}, and tiles are not faster at these sizes"
    return _make("tiled", call), f"{no_kernels}, and tiles are faster than whole scores"


def _make(path: str, call: AttentionCall) -> Implementation:
    """Returns a path's implementation with the kernel and the tile for a call."""
    if path == "tiled":
        return Implementation("tiled", tile=default_tile(call))
    if path == "fused":
        return Implementation("fused", kernel=tpu.kernel_of(call), tile=tpu.default_tile(call))
    return Implementation(path)


def default_tile(call: AttentionCall) -> Tile:
    """Returns the tile of tiled attention for a call.

    It may be larger than the call: the implementation cuts it to the segment and to its keys.
    """
    if call.cached:
        # Speed of a whole evaluation, as a multiple of the reference's (more is faster), by queries
        # x keys of the tile, on two cores of an AMD EPYC, batch 1, float32:
        #     enwik8_12l                 160 x 1024 1.15, 320 x 1024 1.17, 640 x 1024 1.13
        #     four layers of enwik8_24l  128 x 1024 1.08, 512 x 1024 1.12, 1024 x 1024 1.10,
        #                                256 x 512 0.96, 512 x 2048 1.03
        #     wt103_base                 64 x 1024 0.98, 320 x 1024 1.04, 640 x 1024 1.05
        # A tile has all queries of its heads, and divides the heads evenly. So 512 means 320 in
        # enwik8_12l (4 of 8 heads with 80 queries each) and in wt103_base (5 of 10 heads with 64).
        return Tile(_CACHED_TILE_QUERIES, _TILE_KEYS)

    # Time of forward and backward by queries x keys of the tile, in ms (two cores of an AMD EPYC):
    #     L = M = 512, E 64  the reference 152, 64 x 1024 123 to 130, 128 x 1024 108 to 111,
    #                        256 x 1024 108 to 119, 512 x 1024 113 to 140, 128 x 512 196
    #     L = M = 128, E 32  the reference 61, 64 x 256 32 to 55, 128 x 256 40 to 60
    # If one tile has all keys of a strip, its softmax is not rescaled, and the place of its keys is
    # known at compile time. So a tile has many keys, and half of a short segment's queries.
    half_segment = call.segment_len // 2
    query = min(_STRIP_QUERIES, max(_FEWEST_STRIP_QUERIES, half_segment))
    fewest_queries = math.ceil(call.segment_len / _MOST_STRIPS)
    return Tile(max(query, fewest_queries), _TILE_KEYS)


def tiles_are_faster(call: AttentionCall) -> bool:
    """Returns whether tiles are faster than the reference on this call."""
    if call.platform != "cpu":
        return False
    if call.cached:
        return call.n_keys >= _FEWEST_CACHED_KEYS

    # Processor time of forward and backward, divided by the reference's, so that less is faster (an
    # AMD EPYC, L x K): 32 x 64 1.16, 70 x 140 1.0, 150 x 300 0.84, 128 x 256 0.55, 512 x 1024 0.50,
    # 768 x 1536 0.75. If the scores are few, because the rows are, the reference's stay in the
    # last-level cache: with 150 x 300 and 10 heads 1.03 for 4 rows, 0.75 for 16.
    n_pair = call.segment_len * call.n_keys
    n_score = call.batch * call.n_head * n_pair
    return n_pair >= _FEWEST_PAIRS and n_score >= _FEWEST_SCORES
