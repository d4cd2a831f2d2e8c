"""Throughput of serving: rows of the compiled step side by side, beside one request at a time.

    python -m experiments.bench.serving --flagfile=wt103_base
    python -m experiments.bench.serving --flagfile=enwik8_12l --rows=16 --calls=9

Weights are untrained, memories full, draws greedy; every tail of an adaptive softmax is read. It prints a markdown
table, medians over calls, and the speedup: the median of the ratios of successive calls.
"""

from txl_jax import cli
from txl_jax.bench import serving
from txl_jax.bench.serving import DEFAULTS, Plan

GROUPS = ("data", "model", "eval", "mesh")


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark."""
    serving.run(job.config(), plan)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=GROUPS)
