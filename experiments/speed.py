"""Tokens per second of training and evaluation, for a flagfile or for settings given as flags.

    python -m experiments.speed --flagfile=enwik8_12l
    python -m experiments.speed --flagfile=small --speed_calls=10

Tokens are random and weights untrained, which changes nothing about the work. It prints a markdown table:
the median over calls, after warm-up, with the slowest and the fastest call.
"""

import sys

from absl import flags

from experiments import flag_tree, runner
from txl_jax import report
from txl_jax.assemble import assemble
from txl_jax.config import ExperimentConfig
from txl_jax.jobs.speed import Speed, evaluation_speed, training_speed

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and measures."""
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_integer("speed_warmup", 2, "Calls before the timed ones.", lower_bound=0)
    flags.DEFINE_integer("speed_calls", 5, "Timed calls, each of segments_per_call segments.", lower_bound=1)
    flags.DEFINE_integer("speed_vocab", 256, "Size of the vocabulary.", lower_bound=2)
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    parts = assemble(flag_tree.build(ExperimentConfig()), vocab_size=FLAGS.speed_vocab)
    facts = report.environment()
    c, train, span = parts.config.model, parts.config.train, parts.config.eval
    print(f"{parts.n_parameter:,} parameters, vocabulary {FLAGS.speed_vocab}, {c.dtype}")
    print(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}\n")
    print("| job | rows x segment | memory | tokens/s | slowest | fastest | compile |")
    print("|---|---|---|---|---|---|---|", flush=True)
    counts = {"warmup": FLAGS.speed_warmup, "calls": FLAGS.speed_calls}
    print(_row("training", train, training_speed(parts, **counts)), flush=True)
    print(_row("evaluation", span, evaluation_speed(parts, **counts)), flush=True)
    return 0


def _row(job: str, span, speed: Speed) -> str:
    return (
        f"| {job} | {span.batch_size} x {span.segment_len} | {span.mem_len} | {speed.median:,.0f} | "
        f"{speed.slowest:,.0f} | {speed.fastest:,.0f} | {speed.compile_seconds:.1f} s |"
    )


if __name__ == "__main__":
    main()
