"""Estimates of a configuration on Cloud TPUs or GPUs, on a machine without any: memory, FLOPs, least time.

    python -m experiments.bench.estimate --flagfile=enwik8_24l --model.dtype=bfloat16 --topology=v5e:8x8 --mesh.fsdp=64
    python -m experiments.bench.estimate --flagfile=wt103_large --topology=v4:2x2x4 --mesh.tensor=4 --tasks=training
    python -m experiments.bench.estimate --configs=enwik8_24l,wt103_large --topology=v5e,v4:4x4x4 --model.dtype=bfloat16
    python -m experiments.bench.estimate --flagfile=enwik8_24l --topology=h200x8 --mesh.fsdp=8

Training, evaluation and generation are compiled by the devices' own compiler. Without it only the part that follows
from the shapes of arrays is printed. TPUs: pip install 'jax[tpu]' (libtpu, 0.7 GB). GPUs (H200, H100, A100 with
NVLink): pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt, in the version of jax. A GPU's peak is larger than
what jax may use: it takes three quarters of the memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is higher.
That a program compiles shows that it shards and fits, not that it is fast. The least time of an update is its FLOPs, by
txl_jax.flops, at the peak of the data sheet.

With --configs each of these flagfiles is estimated on a mesh that the program chooses: all devices, as many as possible
on fsdp, and remat=full if it fits only then. Other flags change all of the flagfiles.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from experiments.bench import timing
from experiments.bench.speed import BLOCK, GROUPS, generation_arguments
from txl_jax import cli, flops, sharding
from txl_jax.config import ExperimentConfig, Remat, config_tree
from txl_jax.config.config_tree import require, setting
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.decode import decode_block
from txl_jax.runs.build import Built, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime.environment import megabytes

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
    r"Used ([\d.]+\w) of ([\d.]+\w) hbm|temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)"
)
_PER_HOST = 8  # GPUs that share NVLink.
_HOST = ("1", "2", "4", "8")


class Chip(NamedTuple):
    """A kind of device."""

    kind: str  # Its name in jax; `flops.device_peak` knows its peak.
    memory_bytes: int  # Size of a device's memory; of a GPU as CUDA reports it.
    sizes: tuple[str, ...]  # Slices that Google Cloud offers, or numbers of GPUs of a host, from small to large.
    gpu: Mapping[str, Any] = {}  # Name, compute capability and figures as XLA must know them. Empty for TPUs.


# Figures of `GpuDeviceInfoProto`, from CUDA and XLA's own files of known GPUs.
_HOPPER = {"core_count": 132, "fpus_per_core": 128, "clock_rate_ghz": 1.98, "shared_memory_per_core": 228 << 10}
_AMPERE = {"core_count": 108, "fpus_per_core": 64, "clock_rate_ghz": 1.41, "shared_memory_per_core": 164 << 10}
_H200 = _HOPPER | {"memory_bandwidth": 4_800_000_000_000, "l2_cache_size": 60 << 20}
_H100 = _HOPPER | {"memory_bandwidth": 3_352_320_000_000, "l2_cache_size": 50 << 20}
_A100 = _AMPERE | {"memory_bandwidth": 2_039_040_000_000, "l2_cache_size": 40 << 20}
# GPUs are the modules with NVLink (SXM), not the cards.
CHIPS = {
    "v3": Chip("TPU v3", 16 << 30, ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "v4": Chip("TPU v4", 32 << 30, ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8")),
    "v5e": Chip("TPU v5 lite", 16 << 30, ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "v5p": Chip("TPU v5", 95 << 30, ("1x1x1", "2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")),
    "v6e": Chip("TPU v6 lite", 32 << 30, ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")),
    "h200": Chip("H200", 150_754_820_096, _HOST, {"name": "NVIDIA H200", "capability": (9, 0), "info": _H200}),
    "h100": Chip("H100", 84_942_979_072, _HOST, {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "info": _H100}),
    "a100": Chip("A100", 85_100_068_864, _HOST, {"name": "NVIDIA A100-SXM4-80GB", "capability": (8, 0), "info": _A100}),
}


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the estimate."""

    topology: tuple[str, ...] = setting(
        (),
        "TPU slices (v5e:4x8, v4:2x2x4), multiple slices (2*v5e:4x8), or GPUs (h200, h100x8), with commas. With "
        "--configs, a name without a size (v5e, h200) means the smallest slice, or number, that the tasks fit on.",
    )
    tasks: tuple[str, ...] = setting(TASKS, "Tasks to compile, with commas.")
    configs: tuple[str, ...] = setting(
        (), "Published configurations or flagfiles, with commas; default: the settings of the flags alone."
    )

    def validate(self) -> None:
        """Raises `UserError` for an unknown task or topology."""
        super().validate()
        require(self.topology, "topology is empty; it must name a slice or GPUs, such as --topology=v5e:4x8 or h200x8")
        timing.check_names("tasks", self.tasks, TASKS)
        for topology in self.topology:
            (slices if self.configs else parse)(topology)


def run(plan: Plan, job: cli.Job) -> None:
    """Estimates the settings of the flags, or each of --configs, on each topology."""
    compilers = [each for topology in plan.topology for each in compiler_versions(topology).items()]
    versions = {"jax": jax.__version__, **dict(compilers), "date": datetime.date.today().isoformat()}
    print(", ".join(f"{name} {value}" for name, value in versions.items()), flush=True)
    if not plan.configs:
        for topology in plan.topology:
            list(estimate(job.flagfile or "the flags", job.config(), topology, plan))
        return
    for name in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
        require(name not in job.places, f"--{name} was given and --configs chooses its own meshes; leave one out")
    configs = {name: job.config_of_flagfile(name) for name in plan.configs}
    for topology in plan.topology:
        missing = missing_compiler(topology)
        require(not missing, f"--configs needs the compiler of {topology} and {missing}")
    for (name, config), topology in itertools.product(configs.items(), plan.topology):
        estimate_smallest(name, config, topology, plan)


def estimate_smallest(name: str, config: ExperimentConfig, topology: str, plan: Plan) -> None:
    """Estimates a configuration on the smallest topology of a name, and the first of its meshes, that all tasks fit on.

    If none fits, the last try is the largest topology.
    """
    changes = None
    for candidate in slices(topology):
        for changes in candidate_meshes(config, parse(candidate).num_devices):
            if all(estimate(name, config_tree.replace(config, changes), candidate, plan)):
                return
    if changes is None:
        rows, heads = config.train.batch_size // config.train.grad_accum_steps, config.model.n_head
        print(f"\n{name}: no mesh of {candidate} divides its {rows} rows and {heads} heads")


def candidate_meshes(config: ExperimentConfig, num_devices: int) -> Iterator[dict[str, Any]]:
    """Yields a mesh over all devices that a configuration admits, with each remat setting to try on it, as changes.

    Tensor parallelism over as few devices as possible, and of those meshes the one with the most on `fsdp`; first with
    the configuration's own remat, then with everything rematerialized.
    """
    model, rows = config.model, config.train.batch_size // config.train.grad_accum_steps
    for tensor in range(1, num_devices + 1):
        batch_shards, rest = divmod(num_devices, tensor)
        if rest or model.n_head % tensor or model.d_inner % tensor or rows % batch_shards:
            continue
        fsdp = next(n for n in range(batch_shards, 0, -1) if batch_shards % n == 0 and model.d_model % n == 0)
        for remat in dict.fromkeys((model.remat, Remat.FULL)):
            mesh = {"mesh.data": batch_shards // fsdp, "mesh.fsdp": fsdp, "mesh.tensor": tensor}
            yield mesh | {"model.remat": remat}
        return


def estimate(name: str, config: ExperimentConfig, topology: str, plan: Plan) -> Iterator[bool]:
    """Prints what a configuration needs on a topology, and yields for each task whether it fits.

    Without the topology's compiler no task is compiled.

    Raises:
      UserError: If the settings do not fit the topology, or each other.
    """
    found, devices_or_none = parse(topology), devices(topology)
    mesh: Any = sharding.abstract_mesh(config.mesh, found.num_devices, num_slices=found.num_slices)
    if devices_or_none is not None:
        mesh = sharding.make_mesh(config.mesh, devices_or_none)
    components = build(config, vocab_size=timing.vocab_size_of(config.data.corpus), mesh=mesh)
    components.check_batch_size()
    print(
        f"\n{name} on {topology}: {components.num_parameters:,} parameters, computed in {config.model.dtype}, "
        f"{mesh.size} x {found.chip.kind} ({', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())})\n"
        f"{config.train.batch_size} rows x {config.train.segment_len}, memory {config.train.mem_len}, "
        f"remat {config.model.remat}"
    )
    lines: dict[str, str] = {}
    if devices_or_none is not None and components.attention:  # Which path it is depends on the devices.
        lines |= {f"attention, {task}": path for task, path in components.attention.record().items()}
    lines |= {kind: f"{megabytes(size)} per device" for kind, size in components.device_bytes().items()}
    operations, peak = flops_of_update(components), flops.device_peak(found.chip.kind) or math.nan
    lines["an update"] = f"{operations / 1e12:.4g} TFLOP per device, at least {1e3 * operations / peak:.1f} ms"
    print("\n".join(f"{label:<24}{line}" for label, line in lines.items()), flush=True)
    if devices_or_none is None:
        print(f"{missing_compiler(topology)}: nothing is compiled, activations are not known")
        return
    for task in plan.tasks:
        yield estimate_task(components, task, found.chip.memory_bytes)


def flops_of_update(components: Built) -> float:
    """Returns the operations of a device in an update by `txl_jax.flops`, with those that remat=full does again."""
    model, train = components.config.model, components.config.train
    lengths: Any = {"segment_len": train.segment_len, "mem_len": train.mem_len, "same_length": train.same_length}
    per_token = flops.of_training(model, vocab_size=components.model.vocab_size, **lengths)
    if model.remat is Remat.FULL:
        per_token += flops.of_recomputing(model, vocab_size=components.model.vocab_size, **lengths)
    return per_token * train.batch_size * train.segment_len / components.mesh.size


def estimate_task(components: Built, task: str, memory_bytes: int) -> bool:
    """Compiles a task, prints what it needs on a device, and returns whether it fits, or is not possible at all."""
    start = time.monotonic()
    try:
        if task == "generation":
            check_can_generate(components.config)
        compiled = compile_task(components, task)
    except UserError as error:
        print(f"{task}: not possible, {error}", flush=True)
        return True
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = str(error).partition("\n")[0][:200]
        if found := _TOO_LARGE.search(str(error)):
            why = "needs {}iB of {}iB".format(*filter(None, found.groups()))
        print(f"{task}: does not fit, it {why}", flush=True)
        return False
    seconds, sizes = time.monotonic() - start, compiled.memory_analysis()
    # Not the sum of arguments, results and scratch, which share buffers: it can be more than a device has.
    needed, arguments = sizes.peak_memory_in_bytes, sizes.argument_size_in_bytes
    if needed > memory_bytes:  # The compiler for GPUs accepts a program that is too large.
        print(f"{task}: does not fit, it needs {needed / 2**30:.2f}GiB of {memory_bytes / 2**30:.2f}GiB", flush=True)
        return False
    print(
        f"{task}: fits, needs {megabytes(needed)} of {megabytes(memory_bytes)} per device: arguments "
        f"{megabytes(arguments)}, activations, gradients and other scratch {megabytes(needed - arguments)}; output "
        f"{megabytes(sizes.output_size_in_bytes)}; compiled in {seconds:.0f} s",
        flush=True,
    )
    return True


def compile_task(components: Built, task: str) -> Any:
    """Compiles the train step, the eval step (streaming or in sliding windows), or the step of 16 tokens."""
    if task == "training":
        return components.compile_step().program
    evaluation: Any = components  # Its functions are jitted, which their types do not show.
    params = components.abstract_state.params
    eval_config = components.config.eval
    if task == "evaluation" and eval_config.stride:
        replicated = sharding.named_sharding(components.mesh)
        shapes = [(eval_config.batch_size, length) for length in (eval_config.segment_len, eval_config.stride)]
        tokens, targets = (jax.ShapeDtypeStruct(shape, "int32", sharding=replicated) for shape in shapes)
        return evaluation.window_step.lower(params, tokens, targets).compile()
    weights = _abstract_result(evaluation.prepare_params, params)
    if task == "evaluation":
        memory = _abstract_result(evaluation.init_memory, weights)
        return evaluation.eval_step.lower(weights, memory, components.abstract_segments(eval_config)).compile()
    generate, mem_len = components.config.generate, eval_config.mem_len

    def for_tokens(weights: Any) -> Any:
        return weights.for_generation(mem_len=mem_len).for_single_tokens(mem_len=mem_len)

    def start(weights: Any) -> Any:
        memory = components.scorer.init_memory(weights)
        row = jax.tree.map(lambda array: array[:1] if array.ndim else array, memory)
        return cache_lib.repeat_rows(cache_lib.unrotate(row), generate.samples)

    tokens, cache = (_abstract_result(jax.jit(function), weights) for function in (for_tokens, start))
    decode = components.jit(decode_block, static_argnames=("limits", "count"), donate_argnums=1)
    return decode.lower(tokens, cache, *generation_arguments(generate), count=BLOCK).compile()


def _abstract_result(function: Any, *arguments: Any) -> Any:
    """Returns shapes, types and the compiler's shardings of the result of a jitted function of abstract arguments."""
    compiled = function.lower(*arguments).compile()
    return jax.tree.map(
        lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
        function.eval_shape(*arguments),
        compiled.output_shardings,
    )


class Topology(NamedTuple):
    """A topology's name, taken apart: `v5e:4x8` (chips along each axis), `2*v5e:4x8` (two slices), `h200x8` (GPUs)."""

    generation: str  # Key of `CHIPS`.
    shape: str  # Chips along each axis of a slice, or the number of GPUs.
    num_slices: int  # Slices of TPUs; 1 for GPUs.
    num_devices: int  # As jax counts them, over all slices.

    @property
    def chip(self) -> Chip:
        """The kind of its devices."""
        return CHIPS[self.generation]


def set_environment() -> None:
    """Keeps this process from searching for accelerators; call it before jax uses any device."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def parse(name: str) -> Topology:
    """Takes the name of a topology apart.

    Raises:
      UserError: If the notation or the generation is unknown, or there cannot be such a topology.
    """
    found = re.fullmatch(r"(?:([1-9]\d*)\*)?(\w+):(\d+(?:x\d+){1,2})|([a-z]\d+)(?:x(\d+))?", name)
    several, generation, shape, gpu, count = found.groups("") if found else [""] * 5
    if gpu in CHIPS and CHIPS[gpu].gpu:
        number = int(count or 1)
        if str(number) not in _HOST and (number % _PER_HOST or not number):
            raise UserError(
                f"the topology {name} has {number} GPUs; give {', '.join(_HOST)} or a multiple of {_PER_HOST}"
            )
        return Topology(gpu, str(number), 1, number)
    if generation not in CHIPS or CHIPS[generation].gpu:
        tpus, gpus = ([one for one, chip in CHIPS.items() if bool(chip.gpu) is is_gpu] for is_gpu in (False, True))
        raise UserError(
            f"the topology is {name!r}; give a slice of TPUs ({', '.join(tpus)}, and the chips along each axis: "
            f"v5e:4x8 or v4:2x2x4; two of them: 2*v5e:4x8) or GPUs ({', '.join(gpus)}, and how many: h200 or h200x8)"
        )
    chips, known = [int(n) for n in shape.split("x")], CHIPS[generation].sizes
    whole_hosts = all(n and n % 2 == 0 for n in chips[:2])  # A host has 2 x 2 chips.
    if shape not in known and not (len(chips) == known[0].count("x") + 1 and whole_hosts):
        raise UserError(f"there is no slice {name}; those of {generation} are {', '.join(known)} and larger ones")
    num_slices = int(several or 1)
    return Topology(generation, shape, num_slices, num_slices * math.prod(chips) * (2 if generation == "v3" else 1))


def slices(name: str) -> list[str]:
    """Returns the topologies of a name: one, or for a generation or a GPU alone all, from small to large.

    Raises:
      UserError: If `parse` does.
    """
    if name in CHIPS:
        return [f"{name}{'x' if CHIPS[name].gpu else ':'}{size}" for size in CHIPS[name].sizes]
    parse(name)
    return [name]


def compiler_versions(name: str) -> dict[str, str]:
    """Returns name and version of the compiler of a topology."""
    is_gpu = bool(parse(slices(name)[0]).chip.gpu)
    packages = ("jax_cuda13_plugin", "jax_cuda12_plugin") if is_gpu else ("libtpu",)
    found = [package for package in packages if importlib.util.find_spec(package)]
    version = importlib.metadata.version(found[0]) if found else "not installed"
    return {"CUDA plugin" if is_gpu else "libtpu": version}


def missing_compiler(name: str) -> str | None:
    """Says which compiler a topology lacks and how to install it, or returns None if it is installed."""
    [(compiler, version)] = compiler_versions(name).items()
    if version != "not installed":
        return None
    if compiler == "libtpu":
        return "libtpu, the TPU's compiler, is not installed (pip install 'jax[tpu]')"
    return "jax's CUDA plugin is not installed (pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt)"


def devices(name: str) -> Sequence[jax.Device] | None:
    """Returns the devices of a topology, to compile for, or None if its compiler is not installed.

    Raises:
      UserError: If `parse` does, or the compiler does not have this topology.
    """
    generation, shape, num_slices, count = parse(name)
    if missing_compiler(name):
        return None
    if CHIPS[generation].gpu:
        hosts = math.ceil(count / _PER_HOST)  # In the shape: slices, hosts, GPUs of a host.
        options: dict[str, Any] = {"platform": "cuda", "topology_name": generation}
        options |= {"topology": f"1x{hosts}x{count // hosts}", "target_config": target_config(CHIPS[generation])}
    else:
        options = {"platform": "tpu", "topology_name": f"{generation}:{shape}"}
        if generation in ("v4", "v5p"):  # Both cores of a chip are one device.
            options["chip_config_name"] = "megacore"
        if num_slices > 1:
            options["num_slices"] = num_slices
        if set(shape) == {"1", "x"}:  # Less than a host, which has four chips.
            options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return topologies.get_topology_desc(**options).devices
    except jax.errors.JaxRuntimeError as error:
        reason, [compiler] = str(error).partition("\n")[0], compiler_versions(name)
        raise UserError(f"{compiler} knows no topology {name} ({reason}); give another --topology") from None


def target_config(chip: Chip) -> str:
    """Returns the description of a GPU as XLA reads it (`GpuTargetConfigProto` as text)."""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": chip.gpu["info"]["shared_memory_per_core"] - 1024,
        "device_memory_size": chip.memory_bytes,
        **chip.gpu["info"],
    }
    fields = "\n".join(f"{name}: {value}" for name, value in info.items())
    major, minor = chip.gpu["capability"]
    return (
        f"gpu_device_info {{\n{fields}\ncuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 12 patch: 0 }\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        f'device_description_str: "{chip.gpu["name"]}"\n'
    )


if __name__ == "__main__":
    set_environment()
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=GROUPS)
