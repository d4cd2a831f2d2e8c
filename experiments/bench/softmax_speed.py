"""Time and memory of the adaptive softmax, forward and backward, beside the full softmax of the same vocabulary.

    python -m experiments.bench.softmax_speed
    python -m experiments.bench.softmax_speed --model.dtype=bfloat16 --calls=20

Without flags the sizes are those of WikiText-103 and the paper's large model: hidden states of width 1024, tails of
widths 256, 64 and 16, 60 x 150 tokens. Of the other settings only --model.d_embed, --model.cutoffs, --model.div_val,
--model.dtype, --train.batch_size and --train.segment_len matter here. Weights are untrained, and targets drawn from a
law that is printed with the share of each cluster.

It prints a markdown table. A softmax that needs more memory than there is gets a fraction of the tokens, and the table
prints how many.
"""

from txl_jax import cli
from txl_jax.bench import softmax_speed
from txl_jax.bench.softmax_speed import DEFAULTS, Plan


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark."""
    softmax_speed.run(job.config(), plan)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=("model", "train"))
