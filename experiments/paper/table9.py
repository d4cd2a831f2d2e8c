"""Table 9 of the paper: how many times slower a sliding window is than streaming with a memory.

    python -m experiments.paper.table9
    python -m experiments.paper.table9 --flagfile=enwik8_24l --table9_lengths=800,3800 --table9_json=table9.json

Without flags the sizes are those of enwik8_12l, 12 layers of width 512, and its clamp, and ours reads segments of 128
tokens; of the other settings only --model.*, --compat.*, --eval.segment_len, --eval.segments_per_call, --eval.clamp_len and
--eval.cache_dtype matter here. Weights are untrained, tokens random, and both sides run in turns, one row of text on
one device. It prints a markdown table of seconds per token, the median of the timed calls with the slowest and the
fastest. On a CPU a call of the sliding window takes seconds: --table9_calls and --table9_lengths make it shorter.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from experiments.cli import flag_tree, runner
from txl_jax.config import EvalConfig, ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.paper import sliding_window_speed
from txl_jax.paper.sliding_window_speed import PAPER, Row
from txl_jax.runtime import environment
from txl_jax.runtime.files import write_json

FLAGS = flags.FLAGS
# The clamp is that of the published evaluation of enwik8_12l. It spares ours the position keys beyond it.
DEFAULTS = ExperimentConfig(eval=EvalConfig(segment_len=128, clamp_len=820))
_VOCABULARY = 204  # enwik8's bytes without newline, as the published numbers are taken.


def main() -> None:
    """Parses the flags and measures."""
    flag_tree.define(DEFAULTS)
    flags.DEFINE_list("table9_lengths", [str(length) for length in PAPER], "Attention lengths.")
    flags.DEFINE_integer("table9_calls", 5, "Timed calls of each side, in turns.", lower_bound=1)
    flags.DEFINE_integer("table9_warmup", 1, "Calls of each side before the timed ones.", lower_bound=1)
    flags.DEFINE_string("table9_json", None, "File for the sizes and all timings, written after each row.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    config, lengths = flag_tree.build(DEFAULTS), _lengths(FLAGS.table9_lengths)
    # Before the first row takes its minutes.
    for side in (
        sliding_window_speed.sliding_window_config(config),
        *(sliding_window_speed.our_config(config, length) for length in lengths),
    ):
        side.validate()
        side.model.validate_vocabulary(_VOCABULARY)
    facts = environment.describe()
    c, span = config.model, config.eval
    print(f"{facts['device']}, jax {facts['jax']}, Python {facts['python']}, {facts['date']}")
    print(
        f"{c.n_layer} layers of width {c.d_model}, {c.n_head} heads x {c.d_head}, inner width {c.d_inner}, {c.dtype}, "
        f"vocabulary {_VOCABULARY}; ours reads {span.segments_per_call} segments of {span.segment_len} tokens a call, "
        f"{f'distances clamped at {span.clamp_len}' if span.clamp_len else 'no clamp'}\n"
    )
    print("| attention length | sliding window, s/token | slowest | fastest ", end="")
    print("| ours, s/token | slowest | fastest | ratio | paper's ratio |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for length in lengths:
        counts = {"warmup": FLAGS.table9_warmup, "calls": FLAGS.table9_calls}
        rows.append(sliding_window_speed.measure(config, vocab_size=_VOCABULARY, attention_len=length, **counts))
        print(_row(rows[-1]), flush=True)
        if FLAGS.table9_json:
            write_json(FLAGS.table9_json, _record(config, facts, rows))
    return 0


def _lengths(words: Sequence[str]) -> list[int]:
    """The attention lengths of a list flag.

    Raises:
      ValueError: an entry that is no number above 0, or no entry.
    """
    if not words or not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--table9_lengths is {','.join(words)!r}; give numbers of tokens, as 800,1800")
    return [int(word) for word in words]


def _row(row: Row) -> str:
    cells = [f"{row.attention_len:,}"]
    for seconds in (row.sliding_window, row.ours):
        cells += [f"{value:.3g}" for value in (statistics.median(seconds), max(seconds), min(seconds))]
    paper = PAPER.get(row.attention_len)
    cells += [f"{row.ratio:,.0f}", "" if paper is None else f"{paper:,}"]
    return f"| {' | '.join(cells)} |"


def _record(config: ExperimentConfig, facts: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was measured, and with what."""
    model, span = config_tree.to_dict(config.model), config_tree.to_dict(config.eval)
    del model["encoding"]  # Each side has its own.
    return {
        **facts,
        "model": model,
        "compat": config_tree.to_dict(config.compat),
        "vocab_size": _VOCABULARY,
        "eval": {name: span[name] for name in ("segment_len", "segments_per_call", "clamp_len", "cache_dtype")},
        "warmup": FLAGS.table9_warmup,
        "rows": [
            {**dataclasses.asdict(row), "ratio": row.ratio, "paper_ratio": PAPER.get(row.attention_len)} for row in rows
        ],
    }


if __name__ == "__main__":
    main()
