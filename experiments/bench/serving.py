"""Throughput of serving: rows of the compiled step side by side, beside one request at a time.

    python -m experiments.bench.serving --flagfile=wt103_base
    python -m experiments.bench.serving --flagfile=enwik8_12l --rows=16 --calls=9

Weights are untrained, memories full, draws greedy; every tail of an adaptive softmax is read. It prints a markdown
table, medians over calls, and the speedup: the median of the ratios of successive calls.
"""

from txl_jax.bench.serving import DEFAULTS, Plan, run
from txl_jax.cli.programs import config_of_flags
from txl_jax.cli.studies import run_plan

GROUPS = ("data", "model", "eval", "mesh")

if __name__ == "__main__":
    run_plan(Plan, lambda plan: run(config_of_flags(), plan), defaults=DEFAULTS, groups=GROUPS)
