"""Estimates of a configuration on Cloud TPUs or GPUs, without any: memory, collectives, FLOPs, roofline.

    python -m experiments.bench.estimate --flagfile=enwik8_24l --model.dtype=bfloat16 --topology=v5e:8x8 --mesh.fsdp=64
    python -m experiments.bench.estimate --flagfile=wt103_large --topology=v4:2x2x4 --mesh.tensor=4 --tasks=training
    python -m experiments.bench.estimate --configs=enwik8_24l,wt103_large --topology=v5e,v4:4x4x4 --model.dtype=bfloat16
    python -m experiments.bench.estimate --flagfile=enwik8_24l --topology=h200x8 --mesh.fsdp=8

Training, evaluation and generation are compiled by the devices' own compiler; without it only the part that follows
from the shapes of arrays is printed. TPUs: pip install 'jax[tpu]' (libtpu, 0.7 GB). GPUs (H200, H100, A100 with
NVLink): pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, in the version of jax. A GPU's peak is larger than
what jax may use: it takes three quarters of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is higher.
That a program compiles shows that it shards and fits, not that it is fast: the times are lower bounds from data sheets.

With --configs it prints one row for each of these flagfiles and each topology, of training, with a mesh that it chooses
itself: all devices, as many as can be on fsdp, and remat=full where it fits only so. A generation or a GPU alone means
the smallest slice of it, or the fewest GPUs of a host, that training fits on. Other flags change all of the flagfiles.
"""
# ruff: noqa: E402

from experiments.bench import aot_environment

aot_environment.set_environment()  # Before jax is imported, which reads it.

from txl_jax import cli
from txl_jax.bench import estimate
from txl_jax.bench.estimate import Plan
from txl_jax.bench.estimate_table import run_table
from txl_jax.config import ExperimentConfig
from txl_jax.errors import UserError

GROUPS = ("data", "model", "train", "eval", "generate", "mesh")


def run(plan: Plan, job: cli.Job) -> None:
    """Estimates the settings of the flags, or makes the table of --configs."""
    if not plan.configs:
        estimate.run(job.config(), plan)
        return
    for name in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
        if name in job.places:
            raise UserError(f"--{name} was given and the table of --configs chooses its own meshes; leave one out")
    run_table({name: job.config_of_flagfile(name) for name in plan.configs}, plan)


if __name__ == "__main__":
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=GROUPS)
