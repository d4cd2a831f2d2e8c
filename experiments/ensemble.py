"""Several runs that differ in seed, learning rate or dropout, trained at once as one program.

    python -m experiments.ensemble --flagfile=ptb --data_dir=data --members_out=runs/ptb \\
        --member="seed=1" --member="seed=2" --member="seed=3"
    python -m experiments.ensemble --flagfile=ptb_small --train.steps=200 --data_dir=data --members_out=runs/rates \\
        --member="optimizer.learning_rate=5e-4" --member="optimizer.learning_rate=1e-3 model.dropout.rate=0.1"

A small model leaves most of an accelerator idle; several together take little longer than one. Each member is a run of
its own, in a folder of --members_out that is named as it is, for --workdir of the other programs. Stopped, all are saved
at the same update, and the same command goes on (`timeout -s TERM 500 python -m experiments.ensemble ...` works in pieces).
At the end members.md has the scores of all.
"""

import sys
from pathlib import Path

from absl import flags

from experiments.cli import flag_tree, programs, runner
from txl_jax.config import ExperimentConfig
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs import ensemble
from txl_jax.runtime.preemption import StopRequest

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and trains the members."""
    runner.define_data_folders()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_multi_string(
        "member", [], 'What a run differs in, as "seed=2 model.dropout.rate=0.3"; one flag for each run.'
    )
    flags.DEFINE_string("members_out", None, "Folder of the runs' folders and of the table. Made if missing.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    config = programs.config_of_flags()
    if not FLAGS.members_out:
        raise ValueError("no folder was given; say with --members_out=PATH where the runs belong")
    chosen = [_member(text) for text in FLAGS.member]
    ensemble.member_configs(config, chosen)  # Before a text is read.
    folder = Path(FLAGS.members_out).expanduser().resolve()
    corpus = read_corpus(config.data, FLAGS.data_dir, FLAGS.cache_dir)
    with StopRequest() as stop:
        outcomes = ensemble.run(config, chosen, corpus, folder, stop_requested=lambda: stop)
    finished = all(outcome.finished for outcome in outcomes.values())
    return 128 + stop.signal_number if stop and not finished else 0


def _member(text: str) -> dict[str, float]:
    """What a --member says.

    Raises:
      ValueError: no name with a number.
    """
    found = {}
    for word in text.split():
        name, _, value = word.removeprefix("--").partition("=")
        try:
            found[name] = int(value) if name == "seed" else float(value)
        except ValueError:
            raise ValueError(
                f'--member is {text!r}; give names with numbers, as "seed=2 optimizer.learning_rate=0.001"'
            ) from None
    return found


if __name__ == "__main__":
    main()
