"""Table 9 of the paper: how many times slower a sliding window is than streaming with a memory.

    python -m experiments.paper.table9
    python -m experiments.paper.table9 --flagfile=enwik8_24l --lengths=800,3800 --out=table9.json

Without flags the sizes are those of enwik8_12l, 12 layers of width 512, and its clamp, and our
model reads segments of 128 tokens; of the other settings only --model.*, --compat,
--eval.segment_len, --eval.segments_per_call, --eval.clamp_len and --eval.cache_dtype matter here.
Weights are untrained, tokens random, and both sides run in turns, one row of text on one device.
It prints a markdown table of seconds per token, the median of the timed calls with the slowest and
the fastest. On a CPU a call of the sliding window takes seconds: --calls and --lengths make it
shorter.
"""

from txl_jax import cli
from txl_jax.paper import sliding_window_speed
from txl_jax.paper.sliding_window_speed import DEFAULTS, Plan


def run(plan: Plan, job: cli.Job) -> None:
    """Runs the benchmark."""
    sliding_window_speed.run(job.config(), plan)


if __name__ == "__main__":
    cli.main(run, Plan, config=DEFAULTS, groups=("model", "eval"))
