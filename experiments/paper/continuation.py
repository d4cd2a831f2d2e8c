"""Text written on from a part of the test set, the original beside it: appendix E of the paper.

    python -m experiments.paper.continuation --workdir=runs/wt103 --generate.length=1000
    python -m experiments.paper.continuation --workdir=runs/wt103 --continuation_at=1000,52000 --continuation_context=500

It writes a markdown file, --continuation_out (default: continuation.md in the workdir): for each place of the text the
context, what the model writes after it, drawn as --generate.* says (40 likeliest tokens, 500 of them), and what the text
has there. Words are put together as people write them (WikiText's @-@, @,@ and spaces before commas go).
"""

import functools
import sys
from pathlib import Path

from absl import flags

from experiments.cli import flag_tree, hosts, runner
from txl_jax.config import ExperimentConfig
from txl_jax.jobs.generate import check_can_generate
from txl_jax.jobs.score import SPLITS
from txl_jax.paper import continuation

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and writes."""
    runner.define_workdir()
    runner.define_data_folders()
    hosts.define_flags()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_enum("continuation_text", "test", SPLITS, "The text that is gone on from.")
    flags.DEFINE_list("continuation_at", ["0"], "Tokens of it at which contexts begin.")
    flags.DEFINE_integer("continuation_context", 512, "Tokens of a context.", lower_bound=1)
    flags.DEFINE_string("continuation_out", None, "Markdown file; none: continuation.md in the workdir.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run, begin=hosts.join))


def _run() -> int:
    runner.check_same_flags("continuation_text", "continuation_at", "continuation_context")
    workdir = runner.given_workdir()
    config, text = runner.trained_config(workdir)
    check_can_generate(config)  # Before a text is read.
    try:
        starts = [int(word) for word in FLAGS.continuation_at]
    except ValueError:
        raise ValueError(
            f"--continuation_at is {','.join(FLAGS.continuation_at)!r}; give numbers of tokens, as 1000,52000"
        ) from None
    path = Path(FLAGS.continuation_out).expanduser() if FLAGS.continuation_out else workdir.path / "continuation.md"
    job = functools.partial(
        continuation.run, path=path, split=FLAGS.continuation_text, starts=starts, context=FLAGS.continuation_context
    )
    return runner.score_trained(job, workdir, config, text, stopped="nothing was written")


if __name__ == "__main__":
    main()
