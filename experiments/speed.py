"""Tokens per second of reading, training and evaluation, for a flagfile or for settings given as flags.

    python -m experiments.speed --flagfile=enwik8_12l
    python -m experiments.speed --flagfile=small --speed_calls=10

Tokens are random, as frequent as words are (`softmax_speed` prints the law), and weights untrained. It prints
a markdown table: the median over calls, after warm-up, with the slowest and the fastest call.
"""

import sys

from absl import flags

from experiments import flag_tree, runner
from experiments.prepare import DEFAULTS as PROGRAMS
from txl_jax import report
from txl_jax.assemble import assemble
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig
from txl_jax.jobs.speed import Speed, evaluation_speed, reading_speed, training_speed

FLAGS = flags.FLAGS
DEFAULTS = ExperimentConfig(data=DataConfig(corpus=CorpusName.PYTHON_STDLIB))  # Bytes, and no file is needed.
# Of the whole corpora.
_VOCABULARIES = {
    CorpusName.ENWIK8: 204,
    CorpusName.TEXT8: 27,
    CorpusName.WIKITEXT103: 267_735,
    CorpusName.WIKITEXT2: 33_278,
    CorpusName.PTB: 10_000,
    CorpusName.LM1B: 793_470,
}


def main() -> None:
    """Parses the flags and measures."""
    flag_tree.define(DEFAULTS)
    flags.DEFINE_integer("speed_warmup", 2, "Calls before the timed ones.", lower_bound=0)
    flags.DEFINE_integer("speed_calls", 5, "Timed calls, each of segments_per_call segments.", lower_bound=1)
    flags.DEFINE_integer("speed_vocab", None, "Size of the vocabulary; none: the corpus's, or 256.", lower_bound=2)
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    # Tokens are random, but an order that a corpus's program reads it in takes time.
    base = PROGRAMS.get(CorpusName(FLAGS["data.corpus"].value), DEFAULTS)
    config = flag_tree.build(base)
    vocab_size = FLAGS.speed_vocab or _VOCABULARIES.get(config.data.corpus, 256)
    parts = assemble(config, vocab_size=vocab_size)
    facts = report.environment()
    c, train, span = parts.config.model, parts.config.train, parts.config.eval
    print(f"{parts.n_parameter:,} parameters, vocabulary {vocab_size:,}, {c.dtype}")
    print(f"{facts['devices']} x {facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}\n")
    print("| job | rows x segment | memory | tokens/s | slowest | fastest | first call |")
    print("|---|---|---|---|---|---|---|", flush=True)
    counts = {"warmup": FLAGS.speed_warmup, "calls": FLAGS.speed_calls}
    print(_row("reading", train, reading_speed(parts, calls=FLAGS.speed_calls)), flush=True)
    print(_row("training", train, training_speed(parts, **counts)), flush=True)
    print(_row("evaluation", span, evaluation_speed(parts, **counts)), flush=True)
    return 0


def _row(job: str, span, speed: Speed) -> str:
    return (
        f"| {job} | {span.batch_size} x {span.segment_len} | {span.mem_len} | {speed.median:,.0f} | "
        f"{speed.slowest:,.0f} | {speed.fastest:,.0f} | {speed.first_call_seconds:.1f} s |"
    )


if __name__ == "__main__":
    main()
