r"""Relative effective context length (RECL) of a group of models: appendix C and table 8 of the paper.

    python -m experiments.paper.recl --workdirs=runs/xl,runs/lstm --names=ours,LSTM --out=runs/recl \
        --lengths=100,1000,100 --stride=10

The runs must have the same vocabulary; the text is that of the first, or of --data_dir. Each
scored token is predicted from exactly c tokens, encoded from an empty memory, for every c;
--stride scores every s-th token only. It writes recl.md (table 8), recl.csv and recl.json (all
gains), gains.png and context.png (figures 3 and 4) into --out, and keeps the losses there:
stopped, the same command resumes, and other ratios need no new scores.
"""

from txl_jax import cli
from txl_jax.paper import recl
from txl_jax.paper.recl import Plan


def run(plan: Plan, job: cli.Job) -> None:
    """Scores the runs of the group on the text of the first."""
    runs = plan.load_runs()
    first = next(iter(runs.values()))
    corpus = job.corpus(first.config, first)
    with job.stop:
        recl.run(runs, corpus, plan, stop_requested=lambda: job.stop)


if __name__ == "__main__":
    cli.main(run, Plan)
