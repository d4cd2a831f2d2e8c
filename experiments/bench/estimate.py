r"""Estimates memory, FLOPs and minimum time of a configuration on Cloud TPUs or GPUs.

You do not need to have any of these devices.

    python -m experiments.bench.estimate --flagfile=enwik8_24l --model.dtype=bfloat16 \
        --topology=v5e:8x8 --mesh.fsdp=64
    python -m experiments.bench.estimate --configs=enwik8_24l,wt103_large \
        --topology=v5e,v4:4x4x4 --model.dtype=bfloat16
    python -m experiments.bench.estimate --flagfile=enwik8_24l --topology=h200x8 --mesh.fsdp=8

Training, evaluation and generation are compiled by the devices' own compiler. Without it only
numbers that follow from shapes are printed. TPUs: pip install 'jax[tpu]' (0.7 GB). GPUs (H200,
H100, A100 with NVLink): pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, in the version of
jax. On a GPU, jax takes three quarters of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is
higher. The minimum time of a step is its FLOPs at the data sheet's peak.

With --configs each of these flagfiles is estimated on a mesh of all devices, with as many as
possible on fsdp, and with remat=full if it fits only then. Other flags change all of the flagfiles.
"""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.bench import timing
from experiments.bench.speed import GROUPS, check_streams, generation_arguments
from txl_jax import cli, flops
from txl_jax.config import ExperimentConfig, Remat, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.errors import UserError, first_line
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.decode import decode_block
from txl_jax.inference.generate import BLOCK
from txl_jax.runs.attention_choice import record_of
from txl_jax.runs.build import Built, abstract_arrays, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime.environment import is_out_of_memory, megabytes
from txl_jax.sharding.mesh import abstract_mesh, make_mesh

TASKS = ("training", "evaluation", "generation")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    # libtpu searches for its chips, and for other processes that use them, unless these are set.
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # The CUDA plugin searches for its GPUs, and complains that there is no driver.
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_TOO_LARGE = re.compile(  # The sizes in an error of the TPU's compiler, which is pages long.
    r"Used ([\d.]+\w) of ([\d.]+\w) hbm|temporaries \(([\d.]+\w)\) exceeds available HBM "
    r"\(([\d.]+\w)\)"
)
_INSTALL = {
    "libtpu": "pip install 'jax[tpu]'",
    "CUDA plugin": "pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt",
}
_PER_HOST = 8  # GPUs that share NVLink.


class Chip(NamedTuple):
    """A kind of device."""

    # Its name in jax; `flops.device_peak` knows its peak.
    kind: str
    # Size of a device's memory; of a GPU as CUDA reports it.
    memory_bytes: int
    # Slices that Google Cloud offers, or numbers of GPUs of a host, from small to large.
    sizes: tuple[str, ...]
    # Fields of `GpuDeviceInfoProto`, from CUDA and XLA's own files of known GPUs. Empty for TPUs.
    gpu: str = ""


_HOST = ("1", "2", "4", "8")
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_HOPPER = (
    "core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 cuda_compute_capability { major: 9 } "
)
_HOPPER += "shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"
_AMPERE = (
    "core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 cuda_compute_capability { major: 8 } "
)
_AMPERE += "shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912"
# GPUs are the modules with NVLink (SXM), not the cards.
CHIPS = {
    "v3": Chip("TPU v3", 16 << 30, ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "v4": Chip("TPU v4", 32 << 30, ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")),
    "v5e": Chip("TPU v5 lite", 16 << 30, _FLAT),
    "v5p": Chip("TPU v5", 95 << 30, ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")),
    "v6e": Chip("TPU v6 lite", 32 << 30, _FLAT),
    "h200": Chip(
        "H200",
        150_754_820_096,
        _HOST,
        f"{_HOPPER} memory_bandwidth: 4800000000000 l2_cache_size: 62914560",
    ),
    "h100": Chip(
        "H100",
        84_942_979_072,
        _HOST,
        f"{_HOPPER} memory_bandwidth: 3352320000000 l2_cache_size: 52428800",
    ),
    "a100": Chip(
        "A100",
        85_100_068_864,
        _HOST,
        f"{_AMPERE} memory_bandwidth: 2039040000000 l2_cache_size: 41943040",
    ),
}
# A GPU as XLA reads it: `GpuTargetConfigProto` as text, around the fields of a chip.
_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 device_memory_size: %d %s
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA %s"
"""


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the estimate."""

    topology: tuple[str, ...] = setting(
        (),
        "TPU slices (v5e:4x8, v4:2x2x4), multiple slices (2*v5e:4x8), or GPUs (h200, h100x8), "
        "with commas. With --configs, a name without a size (v5e, h200) means the smallest slice, "
        "or number, that the tasks fit on.",
    )
    tasks: tuple[str, ...] = setting(TASKS, "Tasks to compile, with commas.")
    configs: tuple[str, ...] = setting(
        (),
        "Published configurations or flagfiles, with commas. If empty, only the flags' settings.",
    )

    def validate(self) -> None:
        """Raises `UserError` for an unknown task or topology."""
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
    compilers = (compiler_of(topology) for topology in plan.topology)
    versions = {"jax": jax.__version__} | {
        name: version or "not installed" for name, version in compilers
    }
    versions["date"] = datetime.date.today().isoformat()
    print(", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    if not plan.configs:
        for topology in plan.topology:
            list(estimate(job.flagfile or "the flags", job.config(), topology, plan.tasks))
        return
    for name in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
        require(
            name not in job.places,
            f"--{name} must not be set with --configs, which chooses its own meshes",
        )
    configs = {name: job.config_of_flagfile(name) for name in plan.configs}
    for compiler, version in map(compiler_of, plan.topology):
        require(
            version, f"--configs needs {compiler}, which is not installed ({_INSTALL[compiler]})"
        )
    for (name, config), topology in itertools.product(configs.items(), plan.topology):
        attempts = [
            (size, each)
            for size in slices(topology)
            for each in meshes(config, parse(size).num_devices)
        ]
        if not attempts:
            rows = config.train.batch_size // config.train.grad_accum_steps
            heads = config.model.n_head
            print(f"\n{name}: no mesh of {topology} divides its {rows} rows and {heads} heads")
        # The smallest topology, and the first of its meshes, that all tasks fit on.
        for size, changes in attempts:
            if all(estimate(name, config_tree.replace(config, changes), size, plan.tasks)):
                break


def meshes(config: ExperimentConfig, num_devices: int) -> Iterator[dict[str, Any]]:
    """Yields a mesh over all devices as settings, once for each choice of remat.

    The configuration's own remat comes first, then remat=full.

    The mesh has as few devices as possible on `tensor`, and then as many as possible on `fsdp`.
    """
    model, rows = config.model, config.train.batch_size // config.train.grad_accum_steps
    for tensor in range(1, num_devices + 1):
        batch_shards, rest = divmod(num_devices, tensor)
        if rest or model.n_head % tensor or model.d_inner % tensor or rows % batch_shards:
            continue
        fsdp = next(
            n
            for n in range(batch_shards, 0, -1)
            if batch_shards % n == 0 and model.d_model % n == 0
        )
        mesh = {"mesh.data": batch_shards // fsdp, "mesh.fsdp": fsdp, "mesh.tensor": tensor}
        for remat in dict.fromkeys((model.remat, Remat.FULL)):
            yield mesh | {"model.remat": remat}
        return


def estimate(
    name: str, config: ExperimentConfig, topology: str, tasks: Sequence[str]
) -> Iterator[bool]:
    """Prints what a configuration needs on a topology, and yields whether each task fits.

    Yields nothing if the topology's compiler is not installed.

    Raises `UserError` if the settings are incompatible with the topology or each other.
    """
    found, targets = parse(topology), devices(topology)
    chip = CHIPS[found.generation]
    mesh: Any = abstract_mesh(config.mesh, found.num_devices, num_slices=found.num_slices)
    if targets is not None:
        mesh = make_mesh(config.mesh, targets)
    built = build(config, vocab_size=timing.vocab_size_of(config.data.corpus), mesh=mesh)
    built.check_batch_size()
    # Without a topology's devices `auto` is not decided.
    remat = config.model.remat
    if targets is not None and built.remat is not None:
        remat = built.remat.remat
    print(
        f"\n{name} on {topology}: {built.num_parameters:,} parameters, computed in "
        f"{config.model.dtype}, {mesh.size} x {chip.kind} "
        f"({', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())})\n"
        f"{config.train.batch_size} rows x {config.train.segment_len}, memory "
        f"{config.train.mem_len}, remat {remat}"
    )
    lines: dict[str, str] = {}
    if targets is not None and built.attention:  # Which path it is depends on the devices.
        lines |= {f"attention, {task}": path for task, path in record_of(built.attention).items()}
    lines |= {kind: f"{megabytes(size)} per device" for kind, size in built.device_bytes().items()}
    cost = flops.of_step(config, vocab_size=built.model.vocab_size, n_device=mesh.size)
    again = cost.recomputed_flops if remat is Remat.FULL else 0
    operations = ((cost.flops or 0) + again) / mesh.size
    peak = flops.device_peak(chip.kind) or math.nan
    lines["an update"] = (
        f"{operations / 1e12:.4g} TFLOP per device, at least {1e3 * operations / peak:.1f} ms"
    )
    print("\n".join(f"{label:<24}{line}" for label, line in lines.items()), flush=True)
    if targets is None:
        compiler, _ = compiler_of(topology)
        print(
            f"{compiler} is not installed ({_INSTALL[compiler]}): "
            "nothing is compiled, and activations are unknown"
        )
        return
    for task in tasks:
        yield estimate_task(built, task, chip.memory_bytes)


def estimate_task(built: Built, task: str, memory_bytes: int) -> bool:
    """Compiles a task and prints what it needs on a device.

    Returns whether the task fits or is impossible.
    """
    start = time.monotonic()
    try:
        sizes = compile_task(built, task).memory_analysis()
    except UserError as error:
        print(f"{task}: not possible, {error}", flush=True)
        return True
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        why = first_line(error)
        if found := _TOO_LARGE.search(str(error)):
            why = "needs {}iB of {}iB".format(*filter(None, found.groups()))
        print(f"{task}: does not fit, it {why}", flush=True)
        return False
    # The peak counts shared buffers once.
    needed, arguments = sizes.peak_memory_in_bytes, sizes.argument_size_in_bytes
    # The compiler for GPUs accepts a program that is too large.
    if needed > memory_bytes:
        print(
            f"{task}: does not fit, it needs {needed / 2**30:.2f}GiB of "
            f"{memory_bytes / 2**30:.2f}GiB",
            flush=True,
        )
        return False
    print(
        f"{task}: fits, needs {megabytes(needed)} of {megabytes(memory_bytes)} per device: "
        f"arguments {megabytes(arguments)}, activations, gradients and other scratch "
        f"{megabytes(needed - arguments)}; output {megabytes(sizes.output_size_in_bytes)}; "
        f"compiled in {time.monotonic() - start:.0f} s",
        flush=True,
    )
    return True


def compile_task(built: Built, task: str) -> Any:
    """Compiles the train step, the eval step of streaming, or the step of 16 tokens."""
    if task == "training":
        return built.compile_step().program
    evaluation: Any = built  # Its functions are jitted, which their types do not show.
    lengths, generate = built.config.eval, built.config.generate
    weights = _abstract_result(evaluation.prepare_params, built.abstract_state.params)
    if task == "evaluation":
        check_streams(lengths)
        memory = _abstract_result(evaluation.init_memory, weights)
        return evaluation.eval_step.lower(
            weights, memory, built.abstract_segments(lengths)
        ).compile()
    check_can_generate(built.config)

    def for_tokens(weights: Any) -> Any:
        return weights.for_generation(mem_len=lengths.mem_len).for_single_tokens(
            mem_len=lengths.mem_len
        )

    def start(weights: Any) -> Any:
        memory = built.scorer.init_memory(weights)
        row = jax.tree.map(lambda array: array[:1] if array.ndim else array, memory)
        return cache_lib.repeat_rows(cache_lib.unrotate(row), generate.samples)

    tokens, cache = (
        _abstract_result(jax.jit(function), weights) for function in (for_tokens, start)
    )
    decode = built.jit(decode_block, static_argnames=("sampling", "count"), donate_argnums=1)
    return decode.lower(tokens, cache, *generation_arguments(generate), count=BLOCK).compile()


def _abstract_result(function: Any, *arguments: Any) -> Any:
    """Returns the shapes, dtypes and compiler's shardings of a jitted function's result.

    The arguments of the function are abstract.
    """
    return abstract_arrays(
        function.eval_shape(*arguments), function.lower(*arguments).compile().output_shardings
    )


class Topology(NamedTuple):
    """A parsed topology name.

    Examples are `v5e:4x8` (chips along each axis), `2*v5e:4x8` (two slices) and `h200x8` (GPUs).
    """

    generation: str  # Key of `CHIPS`.
    shape: str  # Chips along each axis of a slice, or the number of GPUs.
    num_slices: int  # Slices of TPUs; 1 for GPUs.
    num_devices: int  # As jax counts them, over all slices.


def set_environment() -> None:
    """Keeps this process from searching for accelerators. Call it before jax uses any device."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def parse(name: str) -> Topology:
    """Parses a topology's name, or raises `UserError` if such a topology cannot exist."""
    found = re.fullmatch(r"(?:([1-9]\d*)\*)?(v\w+):(\d+(?:x\d+){1,2})|([ah]\d+)(?:x(\d+))?", name)
    several, generation, shape, gpu, count = found.groups("1") if found else [""] * 5
    if gpu in CHIPS and (count in _HOST or (int(count) and int(count) % _PER_HOST == 0)):
        return Topology(gpu, count, 1, int(count))
    if generation in CHIPS:
        chips, sizes = [int(n) for n in shape.split("x")], CHIPS[generation].sizes
        whole_hosts = len(chips) == sizes[0].count("x") + 1 and all(
            n and n % 2 == 0 for n in chips[:2]
        )
        if shape in sizes or whole_hosts:  # A host has 2 x 2 chips.
            devices = int(several) * math.prod(chips) * (2 if generation == "v3" else 1)
            return Topology(generation, shape, int(several), devices)
    known = f"known are {', '.join(CHIPS)}"
    if generation in CHIPS:
        known = f"{generation} has {', '.join(CHIPS[generation].sizes)}, and larger slices"
    raise UserError(
        "a topology must be a slice of TPUs, such as v5e:4x8, several, such as 2*v5e:4x8, or "
        f"GPUs, 1, 2, 4 or a multiple of {_PER_HOST}, such as h200x8, got {name!r}; {known}"
    )


def slices(name: str) -> list[str]:
    """Returns the topologies of a name: one, or all sizes of a generation, from small to large.

    Raises as `parse`.
    """
    if name in CHIPS:
        return [f"{name}{'x' if CHIPS[name].gpu else ':'}{size}" for size in CHIPS[name].sizes]
    parse(name)
    return [name]


def compiler_of(topology: str) -> tuple[str, str | None]:
    """Returns the name and the version of a topology's compiler.

    The version is None if the compiler is not installed.
    """
    name, packages = "libtpu", ["libtpu"]
    if CHIPS[parse(slices(topology)[0]).generation].gpu:
        name, packages = "CUDA plugin", ["jax_cuda13_plugin", "jax_cuda12_plugin"]
    found = next(filter(importlib.util.find_spec, packages), None)
    return name, found and importlib.metadata.version(found)


def devices(name: str) -> Sequence[jax.Device] | None:
    """Returns a topology's devices to compile for, or None if its compiler is not installed.

    Raises `UserError` as `parse`, or if the compiler does not know the topology.
    """
    generation, shape, num_slices, count = parse(name)
    compiler, version = compiler_of(name)
    if version is None:
        return None
    chip = CHIPS[generation]
    options: dict[str, Any] = {"platform": "tpu", "topology_name": f"{generation}:{shape}"}
    if chip.gpu:
        hosts = math.ceil(count / _PER_HOST)  # In the shape: slices, hosts, GPUs of a host.
        target = _TARGET % (chip.memory_bytes, chip.gpu, chip.kind)
        options = {"platform": "cuda", "topology_name": generation, "target_config": target}
        options["topology"] = f"1x{hosts}x{count // hosts}"
    else:
        if generation in ("v4", "v5p"):  # Both cores of a chip are one device.
            options["chip_config_name"] = "megacore"
        if num_slices > 1:
            options["num_slices"] = num_slices
        if set(shape) == {"1", "x"}:  # Less than a host, which has four chips.
            options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(**options).devices
    except jax.errors.JaxRuntimeError as error:
        unknown = f"{compiler} does not know the topology {name} ({first_line(error)})"
        raise UserError(f"{unknown}. Choose another --topology.") from None


if __name__ == "__main__":
    set_environment()
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=GROUPS)
