"""Scores of a trained run by attention length: figure 4 of the paper.

    python -m experiments.paper.context_length --workdir=runs/mine --lengths=64,128,256,512
    python -m experiments.paper.context_length --workdir=runs/vanilla --lengths=128,512 --stride=16

It writes context_length.csv and, with matplotlib, context_length.png into the workdir. At
attention length A the memory has A slots and every token sees the same number of keys
(--eval.mem_len and --eval.same_length are set so, and segments are at most A long); the other
--eval flags are as in the training, or as given: a run that was trained with --eval.clamp_len
still clamps. A model without recurrence (--model.encoding=vaswani, or trained with
--train.mem_len=0) is given windows of A tokens, --eval.batch_size side by side; --stride is the
number of tokens that each of them scores.
"""

from txl_jax import cli
from txl_jax.config import ExperimentConfig
from txl_jax.paper import context_length
from txl_jax.paper.context_length import Plan
from txl_jax.runs.run import Run


def run(plan: Plan, job: cli.Job) -> None:
    """Reads the run and its text, and scores it at each length."""
    trained = Run.read(plan.workdir, member=plan.ensemble_member)
    config = job.config_of(trained)
    plan.check(config)  # Before a text is read.
    corpus = job.corpus(config, trained)
    with job.stop:
        context_length.run(config, corpus, trained, plan, stop_requested=lambda: job.stop)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("data", "mesh", "eval"), hosts="join")
