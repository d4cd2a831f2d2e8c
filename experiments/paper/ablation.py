r"""Tables 6, 7 and 10 of the paper: recurrence, encoding, half or full loss, attention length.

    python -m experiments.paper.ablation --flagfile=wt103_128m --table=6 --out=runs/table6
    python -m experiments.paper.ablation --flagfile=ptb_small --train.steps=600 --out=runs/mini \
        --seeds=1,2,3 --lengths=16,32,64,128 --stride=16

Each row is a run in a folder of --out, trained with the settings of the flagfile except those of
its row, and then scored on the validation text at each of --lengths and at the attention length of
training. Stopped, the same command resumes. It writes ablation.md, the table beside the paper's
numbers, ablation.csv and ablation.json.
"""

from txl_jax.cli.studies import run_training_study
from txl_jax.paper.ablation import Plan, run

if __name__ == "__main__":
    run_training_study(Plan, run)
