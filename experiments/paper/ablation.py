r"""Tables 6, 7 and 10 of the paper: recurrence, encoding, half or full loss, attention length.

    python -m experiments.paper.ablation --flagfile=wt103_128m --table=6 --out=runs/table6
    python -m experiments.paper.ablation --flagfile=ptb_small --train.steps=600 --out=runs/mini \
        --seeds=1,2,3 --lengths=16,32,64,128 --stride=16

Each row is a run in a folder of --out, trained with the settings of the flagfile except those of
its row, and then scored on the validation text at each of --lengths and at the attention length of
training. Stopped, the same command resumes. It writes ablation.md, the table beside the paper's
numbers, ablation.csv and ablation.json.
"""

from txl_jax import cli
from txl_jax.cli.flags import groups
from txl_jax.config import ExperimentConfig
from txl_jax.paper import ablation
from txl_jax.paper.ablation import Plan

GROUPS = [group for group in groups() if group != "generate"]


def run(plan: Plan, job: cli.Job) -> None:
    """Trains and scores the rows."""
    config = job.config()
    plan.check(config)  # Before a text is read.
    corpus = job.corpus(config)
    with job.stop:
        ablation.run(config, corpus, plan, stop_requested=lambda: job.stop)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=GROUPS, hosts="join")
