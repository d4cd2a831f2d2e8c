"""Time and memory of the adaptive softmax, forward and backward, beside the full softmax of the same vocabulary.

    python -m experiments.bench.softmax_speed
    python -m experiments.bench.softmax_speed --model.dtype=bfloat16 --softmax_calls=20

Without flags the sizes are those of WikiText-103 and the paper's large model: hidden states of width 1024,
tails of widths 256, 64 and 16, 60 x 150 tokens. Of the other settings only --model.d_embed, --model.cutoffs,
--model.div_val, --model.dtype, --train.batch_size and --train.segment_len matter here. Weights are untrained,
and targets drawn from a law that is printed with its share of each cluster.

It prints a markdown table. A softmax that needs more memory than there is gets a fraction of the tokens, and
the table says how many.
"""

import dataclasses
import itertools
import sys

from absl import flags

from experiments.cli import flag_tree, runner
from txl_jax.bench import softmax_speed
from txl_jax.bench.softmax_speed import SoftmaxSpeed
from txl_jax.config import ExperimentConfig, ModelConfig, TrainConfig
from txl_jax.runtime import environment

FLAGS = flags.FLAGS
DEFAULTS = ExperimentConfig(
    model=ModelConfig(d_model=1024, cutoffs=(20_000, 40_000, 200_000), div_val=4),
    train=TrainConfig(batch_size=60, segment_len=150),
)


def main() -> None:
    """Parses the flags and measures."""
    flag_tree.define(DEFAULTS)
    flags.DEFINE_integer("softmax_vocab", 267_735, "Size of the vocabulary.", lower_bound=2)
    flags.DEFINE_integer("softmax_calls", 5, "Timed calls of each softmax, in turns.", lower_bound=1)
    flags.DEFINE_float(
        "softmax_memory_gb",
        None,
        "Most memory that a softmax may need, in 10^9 bytes; none: the accelerator's, or 70 % of a CPU's.",
        lower_bound=0,
    )
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    config, vocab_size = flag_tree.build(DEFAULTS), FLAGS.softmax_vocab
    adaptive = dataclasses.replace(config.model, tie_weight=False, tie_projs=())
    adaptive.validate()
    adaptive.validate_vocabulary(vocab_size)
    if not adaptive.cutoffs:
        raise ValueError("model.cutoffs is empty; the adaptive softmax needs at least one")
    full = dataclasses.replace(adaptive, cutoffs=(), div_val=1)
    tokens = config.train.batch_size * config.train.segment_len
    gigabytes = FLAGS.softmax_memory_gb
    limit = softmax_speed.device_memory() if gigabytes is None else int(gigabytes * 1e9)

    facts = environment.describe()
    print(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}")
    print(f"vocabulary {vocab_size:,}, width {adaptive.d_model}, {adaptive.dtype}, cutoffs {list(adaptive.cutoffs)}")
    print(_shares(adaptive.cutoffs, vocab_size, tokens), end="\n\n", flush=True)
    found = softmax_speed.measure(
        {"adaptive": adaptive, "full": full},
        vocab_size=vocab_size,
        tokens=tokens,
        calls=FLAGS.softmax_calls,
        memory_limit=limit,
    )
    print("| softmax | tokens | seconds | slowest | fastest | per token | memory needed | peak of a process |")
    print("|---|---|---|---|---|---|---|---|")
    for name, speed in found.items():
        print(_row(name, speed))
    for name, speed in found.items():
        if speed.tokens < tokens:
            needed, most = environment.megabytes(speed.needed_for_all), environment.megabytes(limit)
            print(f"\nThe {name} softmax of all {tokens:,} tokens would need {needed}; the limit is {most}.")
    return 0


def _shares(cutoffs: tuple[int, ...], vocab_size: int, tokens: int) -> str:
    """The law of the targets, and the share of each cluster by the law and among the tokens drawn."""
    law, drawn = softmax_speed.probabilities(vocab_size), softmax_speed.draw_targets(vocab_size, tokens)
    shares = [
        f"{law[start:end].sum():.1%} ({((start <= drawn) & (drawn < end)).mean():.1%})"
        for start, end in itertools.pairwise((0, *cutoffs, vocab_size))
    ]
    return (
        f"targets: p(rank) ~ 1 / (rank + {softmax_speed.SHIFT})^{softmax_speed.EXPONENT}; "
        f"head and tails have {', '.join(shares)} of them by the law (among those drawn)"
    )


def _row(name: str, speed: SoftmaxSpeed) -> str:
    peak = "" if speed.process_peak is None else environment.megabytes(speed.process_peak)
    return (
        f"| {name} | {speed.tokens:,} | {speed.median:.3g} | {max(speed.seconds):.3g} | {min(speed.seconds):.3g} | "
        f"{speed.median / speed.tokens * 1e6:,.0f} µs | {environment.megabytes(speed.needed)} | {peak} |"
    )


if __name__ == "__main__":
    main()
