"""Tables 6, 7 and 10 of the paper, row by row: recurrence, encoding, half or full loss, attention length.

    python -m experiments.paper.ablation --flagfile=wt103_128m --ablation_table=6 --ablation_out=runs/table6 --data_dir=data
    python -m experiments.paper.ablation --flagfile=ptb_small --train.steps=600 --ablation_out=runs/mini --data_dir=data \\
        --ablation_seeds=1,2,3 --ablation_lengths=16,32,64,128 --ablation_stride=16

Each row is a run in a folder of --ablation_out, trained with the settings of the flagfile but for what its row says, and
then scored on the validation text at each of --ablation_lengths and at the attention length of training. Stopped, the same
command goes on. It writes ablation.md, the table beside the paper's numbers, ablation.csv and ablation.json.
"""

import sys
from pathlib import Path

from absl import flags

from experiments.cli import flag_tree, hosts, programs, runner
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs.score import Interrupted
from txl_jax.paper import ablation
from txl_jax.runtime import distributed
from txl_jax.runtime.preemption import StopRequest

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and runs the rows."""
    runner.define_data_folders()
    hosts.define_flags()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_enum("ablation_table", "6", list(ablation.TABLES), "Table of the paper.")
    flags.DEFINE_list(
        "ablation_rows",
        [],
        "Rows to run, named as their folders; none: all of the table. Others of the grid too: none-vaswani-full.",
    )
    flags.DEFINE_list("ablation_seeds", ["1111"], "A run of each row for each seed.")
    flags.DEFINE_list("ablation_lengths", ["64", "128", "256", "512"], "Attention lengths that are tried.")
    flags.DEFINE_integer("ablation_stride", 1, "Tokens that a window scores, without recurrence.", lower_bound=1)
    flags.DEFINE_bool(
        "ablation_equal_memory", False, "Table 10: segments as long as the first row's device memory holds."
    )
    flags.DEFINE_string("ablation_out", None, "Folder of the runs and of the table. Made if missing.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run, begin=hosts.join))


def _run() -> int:
    runner.check_same_flags("ablation_table", "ablation_rows", "ablation_seeds", "ablation_lengths", "ablation_stride")
    runner.check_same_flags("ablation_equal_memory")
    config = programs.config_of_flags()
    if not FLAGS.ablation_out:
        raise ValueError("no folder was given; say with --ablation_out=PATH where the runs and the table belong")
    folder, plan = Path(FLAGS.ablation_out).expanduser().resolve(), _plan()
    plan.validate()
    ablation.check(config, plan)  # Before a text is read.
    corpus = distributed.run_on_all(lambda: read_corpus(config.data, FLAGS.data_dir, FLAGS.cache_dir))
    with StopRequest() as stop:
        try:
            ablation.run(config, corpus, plan, folder, table=FLAGS.ablation_table, stop_requested=lambda: stop)
        except Interrupted as interrupted:
            print(f"stopped   on request in {interrupted}; the same command goes on from there")
    return 128 + stop.signal_number if stop else 0


def _plan() -> ablation.Plan:
    table = FLAGS.ablation_table
    rows = tuple(ablation.row_named(table, name) for name in FLAGS.ablation_rows) or ablation.TABLES[table]
    try:
        seeds, lengths = (
            tuple(int(word) for word in words) for words in (FLAGS.ablation_seeds, FLAGS.ablation_lengths)
        )
    except ValueError:
        raise ValueError(
            f"--ablation_seeds is {','.join(FLAGS.ablation_seeds)!r} and --ablation_lengths "
            f"{','.join(FLAGS.ablation_lengths)!r}; give whole numbers, as 1,2,3 and 64,128"
        ) from None
    return ablation.Plan(
        rows=rows,
        seeds=seeds,
        lengths=lengths,
        stride=FLAGS.ablation_stride,
        equal_memory=FLAGS.ablation_equal_memory,
    )


if __name__ == "__main__":
    main()
