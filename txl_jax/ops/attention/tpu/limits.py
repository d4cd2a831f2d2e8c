"""Limits of the kernels: what they can serve, and their tiles."""

import functools
import importlib.metadata
import re

import jax

from txl_jax.ops.attention.problem import Problem, Tile
from txl_jax.ops.attention.tpu import cached_sizes

_MIB = 2**20
_LANES = 128
SCORE_COLUMNS = 2  # Columns of the position keys that carry a score per distance.
_OLDEST_GENERATION = 4  # Mosaic has no product of bfloat16 for older ones, and their gather differs.
_DTYPES = ("bfloat16", "float32")
_FEWEST_PAIRS = 128 * 256  # Below, whole scores are no larger than what else a layer reads.

# MiB of a core's VMEM, as jax's `tpu_info` has them, by what it calls the device. Of a choice that was made elsewhere
# the device is not known, and must not be refused for it.
_VMEM = {"TPU v4": 16, "TPU v4 lite": 16, "TPU v5": 64, "TPU v5p": 64, "TPU v5 lite": 128, "TPU v6 lite": 128}
_VMEM_OF_OTHERS = 64

# Mosaic of this version reads no kernel that the jax of its time writes ("Unsupported version: expected <= 7 but got
# 8", jax 0.7.2), and later jax refuses it; 0.0.42.1 and 0.0.48.1 compile them.
_TOO_OLD_LIBTPU = (0, 0, 21)

# The most queries and keys of a tile, from the best on. Products of float32 are six of bfloat16, beside which the rest
# counts less; its largest tiles take a minute to compile.
_LARGEST_TILES = {
    "bfloat16": (Tile(512, 1536), Tile(256, 1536), Tile(256, 1024), Tile(256, 512), Tile(128, 256)),
    "float32": (Tile(256, 512), Tile(128, 256)),
}


def refusal(problem: Problem) -> str | None:
    """Returns why the kernels cannot serve a call: the limit and the given number; None: they can."""
    generation = _generation(problem.device_kind)
    if generation is not None and generation < _OLDEST_GENERATION:
        return f"the kernels are for TPU v{_OLDEST_GENERATION} and later, and the device is {problem.device_kind}"
    if problem.dtype not in _DTYPES:
        return f"the kernels are for {' and '.join(_DTYPES)}, and the type is {problem.dtype}"
    if problem.has_position_score and problem.cached:
        return "the kernel over a KV cache has no score per distance, and there is one"
    pairs = problem.segment_len * problem.n_keys
    if pairs < _FEWEST_PAIRS:
        return (
            f"{problem.segment_len} queries and {problem.n_keys} keys are {pairs} pairs, below {_FEWEST_PAIRS}, "
            "from which on kernels gain"
        )
    limit = _vmem(problem.device_kind)
    refused = cached_sizes.refusal(problem, vmem=limit) if problem.cached else _training_refusal(problem, vmem=limit)
    return refused or _libtpu_refusal()


def _training_refusal(problem: Problem, *, vmem: int) -> str | None:
    need = _backward_bytes(problem, default_tile(problem))
    if need > vmem:
        return (
            f"{problem.n_keys} keys of width {problem.d_head} need {need / _MIB:.0f} MiB of VMEM in the backward "
            f"kernel, and a core of {problem.device_kind} has {vmem // _MIB}"
        )
    return None


def default_tile(problem: Problem) -> Tile:
    """Returns the tile for a call; in training the largest that fits into VMEM, in equal parts of L and K.

    Larger tiles take less time per pair, by more than smaller ones gain by skipping what is masked. Instructions of the
    compiler's static schedule for a row and head of enwik8_24l, forward and backward, with bfloat16:

        tile       v4      v5e     v5p     v6e
        256x512    49 960  32 640  35 928  27 752
        384x768    48 816  31 204  33 192  23 556
        256x1536   45 858  28 818          21 129
        384x1536   43 584  28 322  29 356  19 846

    The parts are equal, as a tile that the last keys fill in part only costs as much as a full one.
    """
    if problem.cached:
        return cached_sizes.default_tile(problem)
    largest = _LARGEST_TILES.get(problem.dtype, _LARGEST_TILES["float32"])
    tiles = [Tile(_part(problem.segment_len, query, 16), _part(problem.n_keys, key, _LANES)) for query, key in largest]
    return next((tile for tile in tiles if _backward_bytes(problem, tile) <= _vmem(problem.device_kind)), tiles[-1])


def _part(size: int, largest: int, step: int) -> int:
    """Returns the size of equal parts, none above `largest`, in multiples of `step`."""
    parts = -(-size // largest)
    return -(-size // (parts * step)) * step


def kernel_of(problem: Problem) -> str:
    """Returns the name of the kernel that serves a call: by how it skews a tile, a rotation or a gather of lanes.

    The rotation needs TPU v5, where it saves an eighth of the forward kernel; the gather compiles on every generation.
    """
    if problem.cached:  # Its columns begin anywhere, which takes two rotations (TPU v5e: 2600 instructions, not 2410).
        return "mosaic_gather"
    generation = _generation(problem.device_kind)
    return "mosaic_roll" if generation is not None and generation >= 5 else "mosaic_gather"


def _vmem(device_kind: str) -> int:
    return _VMEM.get(device_kind, _VMEM_OF_OTHERS) * _MIB


def _backward_bytes(problem: Problem, tile: Tile) -> int:
    return vmem_bytes(
        tile,
        segment_len=problem.segment_len,
        n_keys=problem.n_keys,
        width=problem.d_head + SCORE_COLUMNS * problem.has_position_score,
        has_positions=problem.n_positions > 0 or problem.has_position_score,
        itemsize=4 if problem.dtype == "float32" else 2,
        backward=True,
    )


def vmem_bytes(
    tile: Tile, *, segment_len: int, n_keys: int, width: int, has_positions: bool, itemsize: int, backward: bool
) -> int:
    """Returns about how much VMEM a training kernel takes.

    Of the backward kernel on v4, for E 128, the compiler reports 17.9 MiB with tiles of 256 x 512 at K 4096 and 31.9 at
    K 8192 in bfloat16, 28.6 with 384 x 1536 at K 1536 in float32, where this gives 18.4, 32.4 and 29.5.
    """
    row = -(-width // _LANES) * _LANES
    n_query, n_key = tile
    keys = -(-n_keys // n_key) * n_key
    positions = -(-segment_len // n_query) * n_query + keys + _LANES if has_positions else 0
    blocks = 2 * itemsize * row * (n_query * (4 if backward else 2) + 2 * n_key + positions)
    scratch = n_query * row * (2 * itemsize + 8) + 2 * n_query * _LANES * 4
    scores = n_query * (n_key + _LANES) * 4 * (3 if backward else 2) * (itemsize // 2)
    total = blocks + scratch + scores
    if backward:
        total += row * (keys * 2 * (2 * itemsize + 4) + positions * 2 * 4)
    return total


def _generation(device_kind: str) -> int | None:
    found = re.match(r"TPU ?v?(\d+)", device_kind)
    return int(found[1]) if found else None


def _libtpu_refusal() -> str | None:
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers and numbers <= _TOO_OLD_LIBTPU:
        return f"libtpu is {version}, which compiles no kernels of jax {jax.__version__}"
    return _trial_refusal() if jax.default_backend() == "tpu" else None


@functools.cache
def _trial_refusal() -> str | None:
    """Compiles a small kernel for the TPU at hand: jax and libtpu understand each other's kernels for months only."""
    from txl_jax.ops.attention.tpu.trial import compile_trial

    try:
        compile_trial(jax.local_devices()[0])
    except Exception as error:  # noqa: BLE001  Mosaic and Pallas raise what they like; any of it means no kernels.
        reason = str(error).partition("\n")[0][:200]
        return f"jax {jax.__version__} and this libtpu compile no kernels ({reason})"
    return None
