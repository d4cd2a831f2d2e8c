"""Estimates of a configuration on a slice of Cloud TPUs, without one: memory, collectives, FLOPs, roofline.

    python -m experiments.bench.estimate --flagfile=enwik8_24l --model.dtype=bfloat16 --topology=v5e:8x8 --mesh.fsdp=64
    python -m experiments.bench.estimate --flagfile=wt103_large --topology=v4:2x2x4 --mesh.tensor=4 --tasks=training
    python -m experiments.bench.estimate --configs=enwik8_24l,wt103_large --topology=v5e,v4:4x4x4 --model.dtype=bfloat16

Training, evaluation and generation are compiled for the slice by the TPU's own compiler, which comes with
pip install 'jax[tpu]' (libtpu, 0.7 GB); without it only the part that follows from the shapes of arrays is printed.
That a program compiles shows that it shards and fits, not that it is fast: the times are lower bounds from data sheets.

With --configs it prints one row for each of these flagfiles and each slice, of training, with a mesh that it chooses
itself: all devices, as many as can be on fsdp, and remat=full where it fits only so. A generation without a shape means
the smallest slice of it that training fits on. Other flags change all of the flagfiles.
"""
# ruff: noqa: E402

from experiments.bench import tpu_environment

tpu_environment.set_environment()  # Before jax is imported, which reads it.

from typing import Any

from absl import flags

from experiments.cli import flag_tree
from experiments.cli.programs import config_of_flags
from experiments.cli.studies import run_plan
from txl_jax.bench.estimate import Plan, run
from txl_jax.bench.estimate_table import run_table
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError

FLAGS = flags.FLAGS
DEFAULTS = ExperimentConfig()
GROUPS = ("data", "model", "train", "eval", "generate", "mesh")


def estimate(plan: Plan) -> Any:
    """Estimates the settings of the flags, or makes the table of --configs."""
    if not plan.configs:
        return run(config_of_flags(), plan)
    for name in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
        if FLAGS[name].present:
            raise UserError(f"--{name} was given and the table of --configs chooses its own meshes; leave one out")
    return run_table({name: config_of_flagfile(name) for name in plan.configs}, plan)


def config_of_flagfile(name: str) -> ExperimentConfig:
    """Returns the config of a flagfile, changed by the settings on this command line; raises `UserError`."""
    changed = flags.FlagValues()
    flag_tree.define(DEFAULTS, changed)
    given = [f"--{leaf}={config_tree.format_value(value)}" for leaf, value in flag_tree.given(FLAGS).items()]
    flag_tree.parse(["estimate", f"--flagfile={name}", *given], changed)
    return config_of_flags(changed)


if __name__ == "__main__":
    run_plan(Plan, estimate, defaults=DEFAULTS, groups=GROUPS)
