"""The best softmax temperature of a trained run, chosen on the validation text.

    python -m experiments.temperature --workdir=runs/ptb
    python -m experiments.temperature --workdir=runs/ptb --temperatures=1,1.02,1.04,1.06,1.08,1.1

It writes temperature.json into the workdir: scores of the validation text at every temperature,
and of the test text at 1 and at the best. All else is scored as --mode=eval does. With a full
softmax only.
"""

from experiments.cli.studies import run_study
from txl_jax.jobs.temperature import Plan, run

if __name__ == "__main__":
    run_study(Plan, run)
