"""Attention weights of a trained run: figures 5, 6 and 7 of the paper.

    python -m experiments.paper.attention --workdir=runs/mine
    python -m experiments.paper.attention --workdir=runs/mine --heads=0.1,3.2 --positions=4000,5210

It writes into --out average.png, the mean attention of every head to each distance (figure 5);
heads-T.png, the weights of three heads for the query at token T (figure 6); terms-T.png, the terms
(a), (b) and (d) of the first of them, each with its own softmax (figure 7); attention.md with the
tokens, and all arrays. Default heads are those with the largest mean distance. Lengths are those
of evaluation (--eval.segment_len, --eval.mem_len, --eval.clamp_len), in one row, with same_length.
"""

from txl_jax import cli
from txl_jax.config import ExperimentConfig
from txl_jax.paper import attention_maps
from txl_jax.paper.attention_maps import Plan
from txl_jax.runs.run import Run


def run(plan: Plan, job: cli.Job) -> None:
    """Reads the run and its text, and draws its attention."""
    trained = Run.read(plan.workdir, member=plan.ensemble_member)
    config = job.config_of(trained)
    plan.check(config)  # Before a text is read.
    corpus = job.corpus(config, trained)
    with job.stop:
        attention_maps.run(config, corpus, trained, plan, stop_requested=lambda: job.stop)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("data", "mesh", "eval"), hosts="alone")
