"""Throughput in tokens per second of data loading, training, evaluation and generation, of a flagfile or other flags.

    python -m experiments.bench.speed --flagfile=enwik8_12l
    python -m experiments.bench.speed --flagfile=small --tasks=training,generation --calls=10
    python -m experiments.bench.speed --flagfile=wt103_base --peer=hf --tasks=evaluation,generation --json=speed.json

Tokens are random, as frequent as words are (`softmax_speed` prints the law), weights untrained, memories full. It
prints a markdown table: the median over calls, after warm-up, with the slowest and the fastest call. Evaluation and
generation use --eval.* and --generate.*, training --train.*.

Generation reads a tail of the adaptive softmax only when it may matter, with untrained weights almost never; so it is
timed a second time with weights with which every tail is read.

With --peer=hf Hugging Face's TransfoXLLMHeadModel (pip install '.[peer]') gets the same weights. That both give the
same losses is checked first, then their calls are interleaved; the table has the speedup.
"""

from txl_jax import cli
from txl_jax.bench import speed
from txl_jax.bench.speed import DEFAULTS, Plan

GROUPS = ("data", "model", "train", "eval", "generate", "mesh")


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark."""
    speed.run(job.config(), plan)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, by_corpus=True, groups=GROUPS)
