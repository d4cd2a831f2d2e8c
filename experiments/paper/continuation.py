"""The model's continuations of a text beside the text's own: appendix E of the paper.

    python -m experiments.paper.continuation --workdir=runs/wt103 --generate.length=1000
    python -m experiments.paper.continuation --workdir=runs/wt103 --starts=1000,52000 --context=500

It writes a markdown file, --out: for each start the context, the model's continuation, sampled as
--generate.* sets (top-k with k = 40, 500 tokens), and the text's own. Words are detokenized
(WikiText's @-@, @,@ and spaces before commas are removed).
"""

from txl_jax import cli
from txl_jax.config import ExperimentConfig
from txl_jax.paper import continuation
from txl_jax.paper.continuation import Plan
from txl_jax.runs.run import Run


def run(plan: Plan, job: cli.Job) -> None:
    """Reads the run and its text, and continues it."""
    trained = Run.read(plan.workdir, member=plan.ensemble_member)
    config = job.config_of(trained)
    plan.check(config)  # Before a text is read.
    corpus = job.corpus(config, trained)
    with job.stop:
        continuation.run(config, corpus, trained, plan, stop_requested=lambda: job.stop)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), groups=("data", "mesh", "eval", "generate"), hosts="join")
