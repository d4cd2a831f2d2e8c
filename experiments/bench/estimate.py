r"""Estimates memory, FLOPs, bytes and minimum time of a configuration on Cloud TPUs or GPUs.

You do not need to have any of these devices.

    python -m experiments.bench.estimate --flagfile=enwik8_24l --model.dtype=bfloat16 \
        --topology=v5e:8x8 --mesh.fsdp=64
    python -m experiments.bench.estimate --configs=enwik8_24l,wt103_large \
        --topology=v5e,v4:4x4x4 --model.dtype=bfloat16
    python -m experiments.bench.estimate --flagfile=enwik8_24l --topology=h200x8 --mesh.fsdp=8

Training, evaluation and generation are compiled by the devices' own compiler. The estimate reads
the compiled programs: FLOPs, bytes that move in the devices' memory, bytes that devices send each
other, and the lines of code that move the most bytes. docs/estimates.md explains the output.
Without the compiler, only numbers that follow from shapes are printed. For TPUs, run pip install
'jax[tpu]' (0.7 GB). For GPUs (H200, H100 and A100 with NVLink, RTX 4090), run pip install --no-deps
jax-cuda13-plugin jax-cuda13-pjrt, in the version of jax. On a GPU, jax takes three quarters of the
memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is higher.

For your own text, the vocabulary is --data.tokenizer.vocab_size, or 256 bytes:

    python -m experiments.bench.estimate --flagfile=own_subwords_gpu --data.corpus=text \
        --data.file=texts --topology=rtx4090

With --configs, each of these flagfiles is estimated on a mesh of all devices, with as many as
possible on fsdp. If it fits only with remat=full, it is estimated with remat=full. Other flags
change all of the flagfiles.
"""

import dataclasses
import datetime
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import jax

from experiments.bench import timing
from experiments.bench.chips import CHIPS, Chip
from experiments.bench.compile_tasks import TASKS, compile_task, cost_of_task
from experiments.bench.program_report import print_cost
from experiments.bench.speed import GROUPS
from experiments.bench.topologies import (
    INSTALL,
    compiler_of,
    devices,
    parse,
    set_environment,
    slices,
)
from txl_jax import cli, flops
from txl_jax.config import ExperimentConfig, Remat, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.errors import UserError, first_line
from txl_jax.runs.attention_choice import record_of
from txl_jax.runs.build import Built, build
from txl_jax.runtime import storage
from txl_jax.runtime.environment import is_out_of_memory, megabytes
from txl_jax.sharding.mesh import abstract_mesh, make_mesh

# The sizes in an error of the TPU compiler, which is pages long.
_TOO_LARGE = re.compile(
    r"Used ([\d.]+\w) of ([\d.]+\w) hbm|temporaries \(([\d.]+\w)\) exceeds available HBM "
    r"\(([\d.]+\w)\)"
)


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the estimate."""

    topology: tuple[str, ...] = setting(
        (),
        "TPU slices (v5e:4x8, v4:2x2x4), multiple slices (2*v5e:4x8), or GPUs (h200, h100x8), "
        "separated by commas. With --configs, a name without a size (v5e, h200) means the smallest "
        "slice, or number of GPUs, that the tasks fit on.",
    )
    tasks: tuple[str, ...] = setting(TASKS, "Tasks to compile, separated by commas.")
    configs: tuple[str, ...] = setting(
        (),
        "Published configurations or flagfiles, separated by commas. If empty, the flags are used.",
    )
    programs: str | None = setting(
        None, "Directory for the text of the compiled programs. none discards it.", path=True
    )

    def validate(self) -> None:
        """Checks the settings.

        Raises:
          UserError: If a task or a topology is unknown.
        """
        super().validate()
        require(
            self.topology,
            "--topology must name slices or GPUs, such as v5e:4x8 or h200x8, got none",
        )
        timing.check_names("tasks", self.tasks, TASKS)
        for topology in self.topology:
            (slices if self.configs else parse)(topology)


def run(plan: Plan, job: cli.Job) -> None:
    """Estimates the settings of the flags, or each of --configs, on each topology."""
    versions = {"jax": jax.__version__}
    for topology in plan.topology:
        compiler, version = compiler_of(topology)
        versions[compiler] = version or "not installed"
    versions["date"] = datetime.date.today().isoformat()
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)

    if plan.configs:
        _estimate_flagfiles(plan, job)
        return
    for topology in plan.topology:
        # All tasks are estimated, even if an earlier one does not fit.
        list(estimate(plan, job.flagfile or "the flags", job.config(), topology))


def _estimate_flagfiles(plan: Plan, job: cli.Job) -> None:
    """Estimates each of --configs on the smallest topology, and the first mesh, that it fits on.

    Raises:
      UserError: If the flags set a mesh, or a compiler is not installed.
    """
    for name in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
        require(
            name not in job.places,
            f"--{name} must not be set with --configs, which chooses its own meshes",
        )
    configs = {name: job.config_of_flagfile(name) for name in plan.configs}
    for topology in plan.topology:
        compiler, version = compiler_of(topology)
        require(
            version, f"--configs needs {compiler}, which is not installed ({INSTALL[compiler]})"
        )
    for name, config in configs.items():
        for topology in plan.topology:
            _estimate_smallest(plan, name, config, topology)


def _estimate_smallest(plan: Plan, name: str, config: ExperimentConfig, topology: str) -> None:
    """Estimates a configuration on slices from small to large, until all tasks fit."""
    has_mesh = False
    for size in slices(topology):
        for changes in meshes(config, parse(size).num_devices):
            has_mesh = True
            changed = config_tree.replace(config, changes)
            if all(estimate(plan, name, changed, size)):
                return
    if not has_mesh:
        rows = config.train.batch_size // config.train.grad_accum_steps
        heads = config.model.n_head
        print(f"\n{name}: no mesh of {topology} divides its {rows} rows and {heads} heads")


def meshes(config: ExperimentConfig, num_devices: int) -> Iterator[dict[str, Any]]:
    """Yields a mesh over all devices as settings, once for each choice of remat.

    The configuration's own remat comes first, then remat=full.

    The mesh has the minimum of devices on `tensor`, and then as many as possible on `fsdp`.
    """
    model = config.model
    rows = config.train.batch_size // config.train.grad_accum_steps
    for tensor in range(1, num_devices + 1):
        batch_shards, rest = divmod(num_devices, tensor)
        divides_model = model.n_head % tensor == 0 and model.d_inner % tensor == 0
        if rest or not divides_model or rows % batch_shards:
            continue

        fsdp = batch_shards
        while batch_shards % fsdp or model.d_model % fsdp:
            fsdp -= 1
        mesh = {"mesh.data": batch_shards // fsdp, "mesh.fsdp": fsdp, "mesh.tensor": tensor}
        for remat in dict.fromkeys((model.remat, Remat.FULL)):
            yield mesh | {"model.remat": remat}
        return


def estimate(plan: Plan, name: str, config: ExperimentConfig, topology: str) -> Iterator[bool]:
    """Prints a configuration's needs on a topology, and yields whether each task fits.

    Yields nothing if the topology's compiler is not installed.

    Raises:
      UserError: If the settings are incompatible with the topology or each other.
    """
    parsed = parse(topology)
    targets = devices(topology)
    chip = CHIPS[parsed.generation]
    mesh: Any = abstract_mesh(config.mesh, parsed.num_devices, num_slices=parsed.num_slices)
    if targets is not None:
        mesh = make_mesh(config.mesh, targets)
    built = build(config, vocab_size=timing.vocab_size_of(config.data), mesh=mesh)
    built.check_batch_size()

    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    print(
        f"\n{name} on {topology}: {built.num_parameters:,} parameters, computed in "
        f"{config.model.dtype}, {mesh.size} x {chip.kind} ({axes})\n"
        f"{config.train.batch_size} rows x {config.train.segment_len}, memory "
        f"{config.train.mem_len}, remat {_remat_of(built, has_compiler=targets is not None)}"
    )
    for label, line in _lines_from_shapes(built, chip, has_compiler=targets is not None).items():
        print(f"{label:<24}{line}", flush=True)
    if targets is None:
        compiler, _ = compiler_of(topology)
        print(
            f"{compiler} is not installed ({INSTALL[compiler]}): "
            "nothing is compiled, and activations are unknown"
        )
        return
    for task in plan.tasks:
        yield estimate_task(built, task, chip, _file_of(plan, name, topology, task))


def _remat_of(built: Built, *, has_compiler: bool) -> Remat:
    """Returns the rematerialization of the backward pass.

    Without the topology's compiler, `auto` is not decided.
    """
    if has_compiler and built.remat is not None:
        return built.remat.remat
    return built.config.model.remat


def _lines_from_shapes(built: Built, chip: Chip, *, has_compiler: bool) -> dict[str, str]:
    """Returns the numbers that follow from shapes, as lines by their labels."""
    config = built.config
    lines: dict[str, str] = {}
    # The attention's implementation depends on the devices.
    if has_compiler and built.attention:
        for task, implementation in record_of(built.attention).items():
            lines[f"attention, {task}"] = implementation
    for kind, size in built.device_bytes().items():
        lines[kind] = f"{megabytes(size)} per device"

    cost = flops.of_step(config, vocab_size=built.model.vocab_size, n_device=built.mesh.size)
    step_flops = cost.flops or 0
    if _remat_of(built, has_compiler=has_compiler) is Remat.FULL:
        step_flops += cost.recomputed_flops
    per_device = step_flops / built.mesh.size
    lines["an update"] = (
        f"{per_device / 1e12:.4g} TFLOP per device, "
        f"at least {1e3 * per_device / chip.peaks.flops:.1f} ms"
    )
    return lines


def _file_of(plan: Plan, name: str, topology: str, task: str) -> str | None:
    """Returns the file for the text of a compiled program, or None without --programs."""
    if plan.programs is None:
        return None
    # A flagfile may be a path, and a topology contains a colon.
    words = re.sub(r"[^\w.-]+", "_", f"{name}-{topology}-{task}")
    return os.path.join(plan.programs, f"{words}.txt")


def estimate_task(built: Built, task: str, chip: Chip, text_file: str | None = None) -> bool:
    """Compiles a task and prints its needs on a device.

    Args:
      built: The model and its functions, on a mesh of devices to compile for.
      task: One of `TASKS`.
      chip: The kind of these devices.
      text_file: File for the compiled program's text, or None to discard it.

    Returns:
      Whether the task fits or is impossible.
    """
    start = time.monotonic()
    try:
        program = compile_task(built, task)
    except UserError as error:
        print(f"{task}: not possible, {error}", flush=True)
        return True
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"{task}: does not fit, it {_why_too_large(error)}", flush=True)
        return False
    seconds = time.monotonic() - start
    if text_file is not None:
        storage.make_folder(os.path.dirname(text_file))
        storage.write(text_file, program.as_text().encode())
        print(f"{task}: the program is in {text_file}")

    # The peak counts shared buffers once.
    sizes = program.memory_analysis()
    needed = sizes.peak_memory_in_bytes
    arguments = sizes.argument_size_in_bytes
    # The GPU compiler accepts a program that is too large.
    fits = needed <= chip.memory_bytes
    if fits:
        print(
            f"{task}: fits, needs {megabytes(needed)} of {megabytes(chip.memory_bytes)} per "
            f"device: arguments {megabytes(arguments)}, activations, gradients and other scratch "
            f"{megabytes(needed - arguments)}; output {megabytes(sizes.output_size_in_bytes)}; "
            f"compiled in {seconds:.0f} s",
            flush=True,
        )
        print_cost(cost_of_task(built, task, program), built, task, chip)
    else:
        print(
            f"{task}: does not fit, it needs {needed / 2**30:.2f}GiB of "
            f"{chip.memory_bytes / 2**30:.2f}GiB",
            flush=True,
        )
    return fits


def _why_too_large(error: Exception) -> str:
    """Returns the sizes in a compiler's error, or its first line."""
    sizes = _TOO_LARGE.search(str(error))
    if not sizes:
        return first_line(error)
    needed, available = filter(None, sizes.groups())
    return f"needs {needed}iB of {available}iB"


if __name__ == "__main__":
    set_environment()
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=GROUPS)
