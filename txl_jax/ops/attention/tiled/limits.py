"""Tiles of tiled attention, which can serve any call, and where it is faster than the reference."""

from txl_jax.ops.attention.problem import Problem, Tile

_MOST_STRIPS = 8
_FEWEST_PAIRS = 128 * 128  # Queries times keys, in training.
_FEWEST_SCORES = 1 << 21
_FEWEST_CACHED_KEYS = 512


def default_tile(problem: Problem) -> Tile:
    """Returns the tile for a call."""
    if problem.cached:
        # Whole evaluation on two cores of an AMD EPYC, batch 1, float32, the reference 1: enwik8_12l 160 x 1024 1.15,
        # 320 x 1024 1.17, 640 x 1024 1.13; four layers of enwik8_24l 128 x 1024 1.08, 512 x 1024 1.12, 256 x 512 0.96,
        # 512 x 2048 1.03, 1024 x 1024 1.10; wt103_base 64 x 1024 0.98, 320 x 1024 1.04, 640 x 1024 1.05.
        return Tile(512, 1024)
    # Forward and backward on an AMD EPYC (2 cores), L = M = 512, E 64, the reference 152 ms: 128 x 1024 108 to 111,
    # 256 x 1024 108 to 119, 64 x 1024 123 to 130, 128 x 512 196, 512 x 1024 113 to 140. A strip whose keys are one
    # block needs no rescaling, and reads a fixed range. L = M = 128, E 32, the reference 61 ms: 64 x 256 32 to 55,
    # 128 x 256 40 to 60. Every strip is compiled (about 0.5 s), so there are 8 at most.
    query = min(128, max(64, problem.segment_len // 2))
    return Tile(max(query, -(-problem.segment_len // _MOST_STRIPS)), 1024)


def is_faster(problem: Problem) -> bool:
    """Returns whether it is faster than the reference on this call."""
    if problem.platform != "cpu":
        return False
    if problem.cached:
        return problem.n_keys >= _FEWEST_CACHED_KEYS
    # Processor time of forward and backward beside the reference, on an AMD EPYC: L 32, K 64 1.16 times, L 70, K 140
    # the same, L 150, K 300 0.84, L 128, K 256 0.55, L 512, K 1024 0.50, L 768, K 1536 0.75. Of few rows the
    # reference's scores stay in the last cache: L 150, K 300 with 10 heads took 1.03
    # times the time of 4 rows, 0.75 that of 16.
    n_pair = problem.segment_len * problem.n_keys
    return n_pair >= _FEWEST_PAIRS and problem.batch * problem.n_head * n_pair >= _FEWEST_SCORES
