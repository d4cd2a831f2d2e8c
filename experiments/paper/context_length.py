"""How well a trained run scores at several attention lengths: figure 4 of the paper.

    python -m experiments.paper.context_length --workdir=runs/mine --context_lengths=64,128,256,512
    python -m experiments.paper.context_length --workdir=runs/vanilla --context_lengths=128,512 --context_stride=16

It writes context_length.csv and, with matplotlib, context_length.png into the workdir. At attention length A the memory
has A slots and every token sees the same number of keys (--eval.mem_len and --eval.same_length are set so, and segments
are at most A long); the other --eval flags are as they were at the training, or as given: a run that was trained with
--eval.clamp_len still clamps. A model without recurrence (--model.encoding=vaswani, or trained with --train.mem_len=0)
is given windows of A tokens, --eval.batch_size side by side; --context_stride says how many tokens each of them scores.
"""

import functools
import sys
from collections.abc import Sequence

from absl import flags

from experiments.cli import flag_tree, hosts, runner
from txl_jax.config import ExperimentConfig
from txl_jax.jobs.score import SPLITS
from txl_jax.paper import context_length

FLAGS = flags.FLAGS
_LENGTHS = (64, 128, 256, 512, 1024, 2048)


def main() -> None:
    """Parses the flags and scores."""
    runner.define_workdir()
    runner.define_data_folders()
    hosts.define_flags()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_list("context_lengths", [str(length) for length in _LENGTHS], "Attention lengths.")
    flags.DEFINE_enum("context_text", "valid", SPLITS, "The text that is scored.")
    flags.DEFINE_integer(
        "context_stride", None, "Without recurrence: tokens that a window scores; 1: the published protocol."
    )
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run, begin=hosts.join))


def _run() -> int:
    runner.check_same_flags("context_lengths", "context_text", "context_stride")
    workdir, lengths = runner.given_workdir(), _lengths(FLAGS.context_lengths)
    config, text = runner.trained_config(workdir)
    context_length.at_lengths(config, lengths, stride=FLAGS.context_stride)  # Before a text is read.
    job = functools.partial(context_length.run, lengths=lengths, split=FLAGS.context_text, stride=FLAGS.context_stride)
    stopped = "the lengths before it are in context_length.csv"
    return runner.score_trained(job, workdir, config, text, stopped=stopped)


def _lengths(words: Sequence[str]) -> list[int]:
    """The attention lengths of a list flag; raises `ValueError` for an entry that is no number."""
    try:
        return [int(word) for word in words]
    except ValueError:
        raise ValueError(f"--context_lengths is {','.join(words)!r}; give numbers of tokens, as 64,128,256") from None


if __name__ == "__main__":
    main()
