r"""Trains an ensemble: several runs that differ in seed, learning rate or dropout, as one program.

    python -m experiments.ensemble --flagfile=ptb --data_dir=data --workdir=runs/ptb \
        --ensemble_member="seed=1" --ensemble_member="seed=2" --ensemble_member="seed=3"
    python -m experiments.ensemble --flagfile=ptb_small --train.steps=200 --data_dir=data --workdir=runs/rates \
        --ensemble_member="optimizer.learning_rate=5e-4" \
        --ensemble_member="optimizer.learning_rate=1e-3 model.dropout.rate=0.1"
    python -m experiments.ensemble --mode=split --workdir=runs/ptb --ensemble_member="seed=2" --to=runs/ptb-seed2

A small model leaves most of an accelerator idle; several together take little longer than one. All members are in one
workdir, with one checkpoint; stopped, the same command resumes. results.json and members.md have the scores of all.

The other programs take one member with --workdir and --ensemble_member=NAME, where a name is as above without "model."
and "optimizer.": "seed=2", "learning_rate=0.001+dropout.rate=0.1". --mode=split makes a member a workdir of its own,
in which the program of its corpus trains on.
"""

import sys

from absl import flags

from txl_jax.cli import flag_tree, programs, runner, watch
from txl_jax.config import ExperimentConfig
from txl_jax.errors import UserError
from txl_jax.runs import ensemble, warm_start
from txl_jax.runs.ensemble import split_off
from txl_jax.runs.run import Workdir
from txl_jax.runtime.stop import StopRequest
from txl_jax.runtime.storage import as_path

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags, and trains the members or splits one off."""
    flags.DEFINE_enum("mode", "train", ("train", "split"), "Train all members, or split one off.")
    flags.DEFINE_string("workdir", None, "Folder of the ensemble: checkpoints, logs, results. Created if missing.")
    watch.define_flags()
    runner.define_data_folders()
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_multi_string(
        "ensemble_member",
        [],
        'One flag per member: its settings, such as "seed=2 model.dropout.rate=0.3". For --mode=split its name.',
    )
    flags.DEFINE_string("to", None, "For --mode=split: the workdir of the member.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    folder = _folder("workdir")
    if FLAGS.mode == "split":
        if len(FLAGS.ensemble_member) != 1:
            raise UserError(
                f"{len(FLAGS.ensemble_member)} members were given to --mode=split; give one --ensemble_member"
            )
        split_off(folder, FLAGS.ensemble_member[0], _folder("to"))
        return 0
    workdir = Workdir(folder)
    more = watch.given(workdir)
    config = programs.config_of_flags(workdir=workdir)
    members = [_parse_member(text) for text in FLAGS.ensemble_member]
    ensemble.member_configs(config, members)  # Before a text is read.
    corpus = warm_start.read_corpus(config, workdir, FLAGS.data_dir, FLAGS.cache_dir)
    with StopRequest() as stop:
        outcome = ensemble.run(config, members, corpus, workdir, stop_requested=lambda: stop, **more)
    return 128 + (stop.signal_number or 0) if stop and not outcome.finished else 0


def _folder(flag: str) -> str:
    """Returns the folder that a flag names; raises `UserError` if it names none."""
    path: str = FLAGS[flag].value or ""
    if not path:
        raise UserError(f"no folder was given; give --{flag}=PATH")
    return as_path(path)


def _parse_member(text: str) -> dict[str, float]:
    """Parses one --ensemble_member; raises `UserError` if it is not a list of names with numbers."""
    found: dict[str, float] = {}
    for word in text.split():
        name, _, value = word.removeprefix("--").partition("=")
        try:
            found[name] = int(value) if name == "seed" else float(value)
        except ValueError:
            raise UserError(
                f'--ensemble_member is {text!r}; give names with numbers, as "seed=2 optimizer.learning_rate=0.001"'
            ) from None
    return found


if __name__ == "__main__":
    main()
