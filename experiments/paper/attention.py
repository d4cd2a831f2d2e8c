"""What the heads of a trained run look at: figures 5, 6 and 7 of the paper.

    python -m experiments.paper.attention --workdir=runs/mine
    python -m experiments.paper.attention --workdir=runs/mine --attention_heads=0.1,3.2 --attention_positions=4000,5210

It writes into --attention_out (default: attention in the workdir) average.png, the mean attention of every head to each
distance (figure 5); heads-T.png, what three heads look at from token T (figure 6); terms-T.png, the terms (a), (b) and (d)
of the first of them, each with its own softmax (figure 7); attention.md with the tokens, and all arrays. Heads are those
with the widest spans, unless given as layer.head, numbered from 0. Lengths are those of evaluation (--eval.segment_len,
--eval.mem_len, --eval.clamp_len), in one row, with same_length.
"""

import functools
import sys
from pathlib import Path

from absl import flags

from experiments.cli import flag_tree, runner
from txl_jax.config import ExperimentConfig
from txl_jax.jobs.score import SPLITS
from txl_jax.paper import attention_maps

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and draws."""
    runner.define_workdir()
    runner.define_data_folders()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_string("attention_out", None, "Folder for pictures and arrays; none: attention in the workdir.")
    flags.DEFINE_enum("attention_text", "valid", SPLITS, "The text that is read.")
    flags.DEFINE_integer("attention_tokens", 0, "Tokens of it that are read; 0: all.", lower_bound=0)
    flags.DEFINE_list("attention_heads", [], "Heads to draw, as layer.head from 0; none: the widest three.")
    flags.DEFINE_list("attention_positions", [], "Tokens whose queries are drawn; none: the last.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    workdir = runner.given_workdir()
    config, text = runner.trained_config(workdir)
    attention_maps.check(config)  # Before a text is read.
    try:
        positions = [int(word) for word in FLAGS.attention_positions]
        pairs = [word.split(".") for word in FLAGS.attention_heads]
        heads = [(int(layer), int(head)) for layer, head in pairs]
    except ValueError:
        raise ValueError(
            f"--attention_heads is {','.join(FLAGS.attention_heads)!r} and --attention_positions "
            f"{','.join(FLAGS.attention_positions)!r}; give heads as 0.1,3.2 and positions as 4000,5210"
        ) from None
    job = functools.partial(
        attention_maps.run,
        folder=Path(FLAGS.attention_out).expanduser() if FLAGS.attention_out else workdir.path / "attention",
        split=FLAGS.attention_text,
        n_token=FLAGS.attention_tokens,
        heads=heads,
        positions=positions,
    )
    return runner.score_trained(job, workdir, config, text, stopped="nothing was written")


if __name__ == "__main__":
    main()
