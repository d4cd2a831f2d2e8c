"""How far back each model of a group makes use of the text: RECL, appendix C and table 8 of the paper.

    python -m experiments.paper.recl --recl_workdirs=runs/xl,runs/lstm,runs/vanilla --recl_names=ours,LSTM,vanilla \\
        --recl_out=runs/recl --recl_lengths=100,1000,100 --recl_stride=10

The runs must have read the same vocabulary; the text is that of the first, or of --data_dir. Each scored token is
predicted from exactly c tokens, encoded from an empty memory, for every c; --recl_stride scores every s-th token only.
It writes recl.md (table 8), recl.csv and recl.json (all gains), gains.png and context.png (figures 3 and 4) into
--recl_out, and keeps the losses there: stopped, the same command goes on, and other ratios cost nothing.
"""

import sys
from pathlib import Path

from absl import flags

from experiments.cli import runner
from txl_jax.jobs.score import SPLITS, Interrupted
from txl_jax.jobs.workdir import Workdir
from txl_jax.paper import recl
from txl_jax.paper.recl import Member, Plan
from txl_jax.runtime.preemption import StopRequest

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and scores the group."""
    runner.define_data_folders()
    flags.DEFINE_list("recl_workdirs", [], "Folders of the trained runs.")
    flags.DEFINE_list("recl_names", [], "What to call them; none: their folders' names.")
    flags.DEFINE_string("recl_out", None, "Folder for losses, table and pictures. Made if missing.")
    flags.DEFINE_list("recl_lengths", ["100", "1000", "100"], "Shortest context, longest, and step.")
    flags.DEFINE_integer("recl_stride", 1, "Every s-th token is scored.", lower_bound=1)
    flags.DEFINE_integer("recl_batch", 16, "Contexts per call.", lower_bound=1)
    flags.DEFINE_list("recl_ratios", ["0.1", "0.5", "1"], "Parts of the tokens, those hardest from a short context.")
    flags.DEFINE_float("recl_threshold", 0.01, "Least relative gain that counts.", lower_bound=0)
    flags.DEFINE_enum("recl_text", "test", SPLITS, "The text that is scored.")
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    plan, members = _plan(), _members()
    if not FLAGS.recl_out:
        raise ValueError("no folder was given; say with --recl_out=PATH where losses, table and pictures belong")
    corpus = runner.trained_corpus(members[0].config, members[0].trained_on)
    with StopRequest() as stop:
        try:
            recl.run(members, corpus, plan, Path(FLAGS.recl_out).expanduser(), stop_requested=lambda: stop)
        except Interrupted as interrupted:
            print(f"stopped   on request while scoring {interrupted}; the same command goes on from there")
    return 128 + stop.signal_number if stop else 0


def _plan() -> Plan:
    try:
        shortest, longest, step = (int(word) for word in FLAGS.recl_lengths)
        ratios = tuple(float(word) for word in FLAGS.recl_ratios)
    except ValueError:
        raise ValueError(
            f"--recl_lengths is {','.join(FLAGS.recl_lengths)!r} and --recl_ratios {','.join(FLAGS.recl_ratios)!r}; give "
            "shortest, longest and step, as 100,1000,100, and numbers, as 0.1,0.5,1"
        ) from None
    if step < 1:
        raise ValueError(f"--recl_lengths has the step {step}; it must be at least 1")
    plan = Plan(
        lengths=tuple(range(shortest, longest + 1, step)),
        stride=FLAGS.recl_stride,
        batch_size=FLAGS.recl_batch,
        ratios=ratios,
        threshold=FLAGS.recl_threshold,
        split=FLAGS.recl_text,
    )
    plan.validate()
    return plan


def _members() -> list[Member]:
    paths = [Path(path).expanduser().resolve() for path in FLAGS.recl_workdirs]
    names = FLAGS.recl_names or [path.name for path in paths]
    if len(names) != len(paths):
        raise ValueError(
            f"--recl_names has {len(names)} names and --recl_workdirs {len(paths)} folders; name each, or none"
        )
    if len(paths) < 2:
        raise ValueError(
            f"--recl_workdirs has {len(paths)} folders; a relative context length compares models, so give two or more"
        )
    found = []
    for name, path in zip(names, paths, strict=True):
        workdir = Workdir(path)
        config, text = workdir.load()
        found.append(Member(name, config, text, workdir))
    return found


if __name__ == "__main__":
    main()
