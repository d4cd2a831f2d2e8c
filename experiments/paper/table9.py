"""Table 9 of the paper: how many times slower a sliding window is than streaming with a memory.

    python -m experiments.paper.table9
    python -m experiments.paper.table9 --flagfile=enwik8_24l --lengths=800,3800

A model without recurrence that attends to A tokens encodes all A tokens again for each predicted
token. Our model reads each token once and keeps the A tokens before it in its memory. Both models
have the same sizes. The sliding window uses absolute positions, our model relative ones.

The defaults are the sizes of enwik8_12l (12 layers of size 512) and its clamp, and our model reads
segments of 128 tokens. The only other settings with an effect are --model.*, --compat,
--eval.segment_len, --eval.clamp_len and --eval.cache_dtype.

Weights are untrained, tokens are random, and the calls of both models are interleaved, with one row
of text on one device. The command prints a Markdown table of seconds per token: the median of the
timed calls, the slowest and the fastest. The time includes the layers, and the softmax at the
positions that are scored. On a CPU a call of the sliding window takes seconds. To save time, lower
--calls and --lengths.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import jax

from experiments.bench import speed
from experiments.bench.timing import Task, draw_tokens, machine, print_table, time_in_turns
from txl_jax import cli
from txl_jax.config import Encoding, EvalConfig, ExperimentConfig, MeshConfig
from txl_jax.config.config_tree import require, setting
from txl_jax.evaluation.sliding_window import make_window_step, window_batches
from txl_jax.evaluation.streaming import SEGMENTS_PER_CALL
from txl_jax.runs.build import build
from txl_jax.sharding.mesh import bind_mesh

# Attention length, and the authors' measurement of how many times slower than their model the
# sliding window is (on one GPU, 2019).
PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
# The clamp of the published evaluation of enwik8_12l. It saves our model the position keys beyond
# this distance.
DEFAULTS = ExperimentConfig(eval=EvalConfig(segment_len=128, clamp_len=820))
_COLUMNS = (
    "attention length | sliding window, s/token | slowest | fastest | ours, s/token | slowest | "
    "fastest | ratio | paper's ratio"
)
VOCABULARY = 204  # enwik8's bytes without newline, as in the published numbers.


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """The attention lengths and the number of calls."""

    lengths: tuple[int, ...] = setting(tuple(PAPER), "Attention lengths.")
    calls: int = setting(5, "Timed calls of each model, interleaved.", at_least=1)

    def validate(self) -> None:
        """Raises `UserError` if lengths are empty, or a setting is out of range."""
        super().validate()
        text = ",".join(map(str, self.lengths))
        require(
            self.lengths and min(self.lengths) >= 1,
            f"lengths must be attention lengths, such as 800,1800, got {text!r}",
        )


def run(plan: Plan, job: cli.Job) -> None:
    """Times both models at each length, and prints a Markdown table row by row."""
    config = job.config()
    sides = [sliding_window_config(config)]
    sides += [our_config(config, length) for length in plan.lengths]
    for side in sides:
        side.validate()
        side.model.validate_vocabulary(VOCABULARY)

    model = config.model
    eval_config = config.eval
    clamp = "no clamp"
    if eval_config.clamp_len:
        clamp = f"distances clamped at {eval_config.clamp_len}"
    print(
        f"{machine()}\n{model.n_layer} layers of width {model.d_model}, {model.n_head} heads x "
        f"{model.d_head}, inner width {model.d_inner}, {model.dtype}, vocabulary {VOCABULARY}; "
        f"ours reads {SEGMENTS_PER_CALL} segments of {eval_config.segment_len} tokens "
        f"a call, {clamp}\n"
    )
    print_table(_COLUMNS, (_row(config, length, plan.calls) for length in plan.lengths))


def _row(config: ExperimentConfig, length: int, calls: int) -> list[str]:
    """Times both models at one attention length, and returns the row of the table."""
    window, ours = measure(config, vocab_size=VOCABULARY, attention_len=length, calls=calls)
    ratio = statistics.median(window) / statistics.median(ours)
    published = f"{PAPER[length]:,}" if length in PAPER else ""
    return [f"{length:,}", *_cells(window), *_cells(ours), f"{ratio:,.0f}", published]


def _cells(seconds: Sequence[float]) -> list[str]:
    """Returns the median, the slowest and the fastest time."""
    summary = (statistics.median(seconds), max(seconds), min(seconds))
    return [f"{value:.3g}" for value in summary]


def measure(
    config: ExperimentConfig, *, vocab_size: int, attention_len: int, calls: int
) -> tuple[list[float], list[float]]:
    """Times both models at one attention length, on one device.

    Calls are interleaved, so that a slow minute of the machine affects both models.

    Returns the seconds per token of each timed call of the sliding window, and of ours. The first
    call, which compiles, is not timed.
    """
    window = _sliding_window(sliding_window_config(config), vocab_size, attention_len)
    ours = speed.evaluation(build(our_config(config, attention_len), vocab_size=vocab_size))
    time_in_turns([window, ours], warmup=1, calls=calls)
    return window.seconds, [seconds / ours.tokens for seconds in ours.seconds]


def sliding_window_config(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the same sizes with absolute positions, which have no u and v."""
    return dataclasses.replace(
        config, model=config.model.with_encoding(Encoding.VASWANI), mesh=MeshConfig(data=1)
    )


def our_config(config: ExperimentConfig, attention_len: int) -> ExperimentConfig:
    """Returns the same sizes with relative positions, and a memory of the attention length."""
    model = config.model.with_encoding(Encoding.RELATIVE)
    eval_config = dataclasses.replace(
        config.eval, batch_size=1, mem_len=attention_len, same_length=True
    )
    return dataclasses.replace(config, model=model, eval=eval_config, mesh=MeshConfig(data=1))


def _sliding_window(config: ExperimentConfig, vocab_size: int, attention_len: int) -> Task:
    """Returns the call that scores the last position of a window of A random tokens."""
    built = build(config, vocab_size=vocab_size)
    params = built.init_params()
    step = bind_mesh(built.mesh, make_window_step(built.model, clamp_len=config.eval.clamp_len))
    # The text's second window is the first that scores one token.
    tokens = draw_tokens(vocab_size, attention_len + 2)
    _, window = window_batches(tokens, attention_len=attention_len, stride=1, batch_size=1)
    arrays = jax.device_put((window.inputs, window.targets))
    return Task("sliding window", 1, lambda: jax.block_until_ready(step(params, *arrays)))


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=("model", "eval"))
