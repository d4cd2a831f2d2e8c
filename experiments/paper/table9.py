"""Table 9 of the paper: how many times slower a sliding window is than streaming with a memory.

    python -m experiments.paper.table9
    python -m experiments.paper.table9 --flagfile=enwik8_24l --lengths=800,3800 --out=table9.json

A model without recurrence that sees A tokens encodes all A again for each token that it predicts;
ours reads each token once and has the A before it in its memory. The sizes are the same; the
positions are absolute there and relative here.

Without flags the sizes are those of enwik8_12l, 12 layers of width 512, and its clamp, and our
model reads segments of 128 tokens; of the other settings only --model.*, --compat,
--eval.segment_len, --eval.clamp_len and --eval.cache_dtype matter here.
Weights are untrained, tokens random, and both sides run in turns, one row of text on one device.
It prints a markdown table of seconds per token, the median of the timed calls with the slowest and
the fastest: on both sides the time of the layers, and of the softmax at the positions that are
scored. On a CPU a call of the sliding window takes seconds: --calls and --lengths make it shorter.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

import jax

from experiments.bench import speed
from experiments.bench.timing import Task, draw_tokens, interleaved, machine, print_table
from txl_jax import cli, sharding
from txl_jax.config import Encoding, EvalConfig, ExperimentConfig, MeshConfig, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.evaluation.sliding_window import make_window_step, window_batches
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.runs.build import build
from txl_jax.runtime import environment
from txl_jax.runtime.storage import write_json

# Attention length, and how many times slower than ours the authors found the sliding window (on one GPU, 2019).
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
# The clamp of the published evaluation of enwik8_12l. It saves our side the position keys beyond it.
DEFAULTS = ExperimentConfig(eval=EvalConfig(segment_len=128, clamp_len=820))
VOCABULARY = 204  # enwik8's bytes without newline, as the published numbers are taken.


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The attention lengths and the number of calls."""

    lengths: tuple[int, ...] = setting(tuple(PAPER), "Attention lengths.")
    calls: int = setting(5, "Timed calls of each side, in turns.", at_least=1)
    warmup: int = setting(1, "Calls of each side before the timed ones.", at_least=1)
    out: str | None = setting(None, "JSON file of sizes and all timings, written after each row.", path=True)

    def validate(self) -> None:
        """Raises `UserError` if there is no length, or a setting is out of range."""
        super().validate()
        require(
            self.lengths and min(self.lengths) >= 1,
            f"lengths must be attention lengths, such as 800,1800, got {','.join(map(str, self.lengths))!r}",
        )


def run(plan: Plan, job: cli.Job) -> None:
    """Times both sides at each length; prints a Markdown table row by row."""
    config = job.config()
    for side in (sliding_window_config(config), *(our_config(config, length) for length in plan.lengths)):
        side.validate()
        side.model.validate_vocabulary(VOCABULARY)
    model, eval_config = config.model, config.eval
    clamp = f"distances clamped at {eval_config.clamp_len}" if eval_config.clamp_len else "no clamp"
    print(
        f"{machine()}\n{model.n_layer} layers of width {model.d_model}, {model.n_head} heads x {model.d_head}, inner "
        f"width {model.d_inner}, {model.dtype}, vocabulary {VOCABULARY}; ours reads {SEGMENTS_PER_CALL} "
        f"segments of {eval_config.segment_len} tokens a call, {clamp}\n"
    )
    print_table(
        "attention length | sliding window, s/token | slowest | fastest | ours, s/token | slowest | fastest | ratio | "
        "paper's ratio",
        _rows(config, plan),
    )


def _rows(config: ExperimentConfig, plan: Plan) -> Iterator[list[str]]:
    """Measures each length, writes all so far to `plan.out`, and yields the table's row."""
    model, evaluation = config_tree.to_dict(config.model), config_tree.to_dict(config.eval)
    del model["encoding"]  # Each side has its own.
    rows: list[dict[str, Any]] = []
    record = {
        **environment.describe(),
        "model": model,
        "vocab_size": VOCABULARY,
        "eval": {name: evaluation[name] for name in ("segment_len", "clamp_len", "cache_dtype")},
        "warmup": plan.warmup,
        "rows": rows,
    }
    for length in plan.lengths:
        row = measure(config, vocab_size=VOCABULARY, attention_len=length, warmup=plan.warmup, calls=plan.calls)
        rows.append({"attention_len": length, **row, "paper_ratio": PAPER.get(length)})
        if plan.out:
            write_json(plan.out, record)
        times = [each(row[side]) for side in ("sliding_window", "ours") for each in (statistics.median, max, min)]
        published = f"{PAPER[length]:,}" if length in PAPER else ""
        yield [f"{length:,}", *(f"{seconds:.3g}" for seconds in times), f"{row['ratio']:,.0f}", published]


def measure(
    config: ExperimentConfig, *, vocab_size: int, attention_len: int, warmup: int, calls: int
) -> dict[str, Any]:
    """Times both at one attention length, on one device; calls take turns, so that a slow minute affects both.

    Args:
      config: Sizes; L, S and `clamp_len` of evaluation. The rest of evaluation is set here: one row, M = A and
        `same_length`, so that every token sees A tokens.
      vocab_size: V.
      attention_len: A.
      warmup: Untimed calls of each, at least 1, since the first compiles.
      calls: Timed calls of each.

    Returns:
      Seconds per token of each timed call, "sliding_window" and "ours", and "ratio", the former's median over the
      latter's.
    """
    ours = build(our_config(config, attention_len), vocab_size=vocab_size)
    tasks = [
        _sliding_window(sliding_window_config(config), vocab_size, attention_len),
        speed.evaluation(ours, ours.init_params()),
    ]
    found: dict[str, Any] = {
        side: [seconds / timing.task.tokens for seconds in timing.seconds]
        for side, timing in zip(("sliding_window", "ours"), interleaved(tasks, warmup=warmup, calls=calls), strict=True)
    }
    return found | {"ratio": statistics.median(found["sliding_window"]) / statistics.median(found["ours"])}


def sliding_window_config(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the same sizes with absolute positions, which have no u and v."""
    return dataclasses.replace(config, model=config.model.with_encoding(Encoding.VASWANI), mesh=MeshConfig(data=1))


def our_config(config: ExperimentConfig, attention_len: int) -> ExperimentConfig:
    """Returns the same sizes with relative positions, and a memory of the attention length."""
    model = config.model.with_encoding(Encoding.RELATIVE)
    eval_config = dataclasses.replace(config.eval, batch_size=1, mem_len=attention_len, same_length=True)
    return dataclasses.replace(config, model=model, eval=eval_config, mesh=MeshConfig(data=1))


def _sliding_window(config: ExperimentConfig, vocab_size: int, attention_len: int) -> Task:
    """Returns the call that scores the last position of a window of A random tokens."""
    parts = build(config, vocab_size=vocab_size)
    params = parts.init_params()
    step = sharding.bind_mesh(parts.mesh, make_window_step(parts.model, clamp_len=config.eval.clamp_len))
    # The text's second window is the first that scores one token.
    tokens = draw_tokens(vocab_size, attention_len + 2)
    _, window = window_batches(tokens, attention_len=attention_len, stride=1, batch_size=1)
    inputs, targets = jax.device_put((window.inputs, window.targets))
    return Task("sliding window", 1, lambda: jax.block_until_ready(step(params, inputs, targets)))


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=("model", "eval"))
