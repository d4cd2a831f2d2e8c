"""Attention of one layer: the reference, tiles, fused kernels and plain attention, at the sizes of configurations.

    python -m experiments.bench.attention
    python -m experiments.bench.attention --configs=enwik8_24l --tasks=training --batch_size=16 --dtype=bfloat16
    python -m experiments.bench.attention --topology=v5e,v4,v5p,v6e,h200 --json=attention.json

Training is forward and backward, evaluation forward over a full KV cache. Arrays are random. Each path is first
compared with the reference, on one row with the same dropout mask, in float32 or, if the path has no float32, in the
type that is timed: the table has the largest difference of the output and all gradients. Then timings are interleaved:
one of each path in turn. Of a path the table has the median, its speedup over the reference, its time as a multiple of
what the matrix products of all pairs take alone, the operations per second on visible pairs and, in bfloat16, their
share of the device's peak. Scratch is the compiler's account. Bytes are what instructions read and write, of a kernel
its operands and results once, by XLA's count (on GPUs, and of programs with loops or kernels, by our own); what stays
in a cache counts too.

With --topology nothing is run: the programs are compiled for one device of each, which need not be at hand, as by
experiments.bench.estimate. The table has scratch and bytes of each path, and the part of the reference's bytes; the
lines below it, which paths write an array of as many elements as there are scores.
"""

import sys

from experiments.bench import aot_environment

if any(word.startswith(("--topology", "-topology")) for word in sys.argv):
    aot_environment.set_environment()  # Before jax is imported, which reads it.

from txl_jax import cli
from txl_jax.bench import attention
from txl_jax.bench.attention import Plan
from txl_jax.config import ExperimentConfig


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark with the configurations of the plan."""
    attention.run({name: job.config_of_flagfile(name) for name in plan.configs}, plan)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("model", "train", "eval"))
