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
txl_jax.flops, at the peak of the data sheet. XLA's own count of FLOPs has the body of each loop (over segments, over
layers) once, and no kernels.

With --configs each of these flagfiles is estimated on a mesh that the program chooses: all devices, as many as can be
on fsdp, and remat=full where it fits only so. A generation or a GPU alone means the smallest slice of it, or the fewest
GPUs of a host, that the tasks fit on. Other flags change all of the flagfiles.
"""

import dataclasses
import datetime
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from txl_jax import cli, flops, sharding
from txl_jax.bench import topologies
from txl_jax.bench.synthetic_tokens import default_vocab_size
from txl_jax.bench.throughput import BLOCK, make_generator
from txl_jax.config import ExperimentConfig, Remat
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.errors import UserError
from txl_jax.inference import cache as cache_lib
from txl_jax.inference.generator import Context
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.train import device_bytes
from txl_jax.runtime.environment import megabytes
from txl_jax.runtime.storage import write_json

GROUPS = ("data", "model", "train", "eval", "generate", "mesh")
TASKS = ("training", "evaluation", "generation")


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the estimate."""

    topology: tuple[str, ...] = setting(
        (),
        "TPU slices, such as v5e:4x8 or v4:2x2x4, several alike, such as 2*v5e:4x8, or GPUs, such as h200 or h100x8, "
        "with commas. With --configs a generation or a GPU alone (v5e, h200) is the smallest slice, or number, that "
        "the tasks fit on.",
    )
    tasks: tuple[str, ...] = setting(TASKS, "Tasks to compile, with commas.")
    configs: tuple[str, ...] = setting(
        (), "Published configurations or flagfiles, with commas; default: the settings of the flags alone."
    )
    vocab_size: int | None = setting(
        None, "V; none: the size published with the corpus, or 256 where there is none.", at_least=2
    )
    json: str | None = setting(None, "File for all figures; none: only what is printed.", path=True)

    def validate(self) -> None:
        """Raises `UserError` for an unknown task or topology."""
        check_fields(self, "")
        require(self.topology, "topology is empty; it must name a slice or GPUs, such as --topology=v5e:4x8 or h200x8")
        require(self.tasks, f"tasks is empty; it must be of {', '.join(TASKS)}")
        for name in self.tasks:
            near = config_tree.did_you_mean(name, TASKS)
            require(name in TASKS, f"tasks has {name!r}; it must be of {', '.join(TASKS)}{near}")
        for topology in self.topology:
            (topologies.slices if self.configs else topologies.parse)(topology)


def run(plan: Plan, job: cli.Job) -> None:
    """Estimates the settings of the flags, or each of --configs, on each topology; writes the JSON file."""
    versions = {"jax": jax.__version__}
    for topology in plan.topology:
        versions |= topologies.compiler_versions(topology)
    versions["date"] = datetime.date.today().isoformat()
    print(", ".join(f"{name} {value}" for name, value in versions.items()), flush=True)
    if plan.configs:
        for name in ("mesh.data", "mesh.fsdp", "mesh.tensor"):
            if name in job.places:
                raise UserError(f"--{name} was given and --configs chooses its own meshes; leave one out")
        configs = {name: job.config_of_flagfile(name) for name in plan.configs}
        for topology in plan.topology:
            if missing := topologies.missing_compiler(topology):
                raise UserError(f"--configs needs the compiler of {topology} and {missing}")
        records = [
            record
            for name, config in configs.items()
            for topology in plan.topology
            for record in estimate_smallest(name, config, topology, plan)
        ]
    else:
        name, config = job.flagfile or "the flags", job.config()
        records = [record for topology in plan.topology for record in estimate(name, config, topology, plan)]
    if plan.json:
        write_json(plan.json, {**versions, "plan": config_tree.to_dict(plan), "estimates": records})
        print(f"\nresults   {plan.json}")


def estimate_smallest(name: str, config: ExperimentConfig, topology: str, plan: Plan) -> list[dict[str, Any]]:
    """Estimates a configuration on the smallest topology of a name, and the first of its meshes, that all tasks fit on.

    Returns:
      The records of `estimate`. If none fits, those of the last try, and if no mesh divides the sizes, none.
    """
    records: list[dict[str, Any]] = []
    for candidate in topologies.slices(topology):
        for changes in candidate_meshes(config, topologies.parse(candidate).num_devices):
            records = []
            for record in estimate(name, config_tree.replace(config, changes), candidate, plan):
                records.append(record)
                if "does_not_fit" in record:
                    break
            else:
                return records
    if not records:
        rows, heads = config.train.batch_size // config.train.grad_accum_steps, config.model.n_head
        print(f"\n{name}: no mesh of {candidate} divides its {rows} rows and {heads} heads")
    return records


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


def estimate(name: str, config: ExperimentConfig, topology: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """Prints what a configuration needs on a topology, and yields a record per task, as in the JSON file.

    Without the topology's compiler the only record has no figures of a compiled program.

    Raises:
      UserError: If the settings do not fit the topology, or each other.
    """
    found, devices = topologies.parse(topology), topologies.devices(topology)
    mesh: Any
    if devices is None:
        mesh = sharding.abstract_mesh(config.mesh, found.num_devices, num_slices=found.num_slices)
    else:
        mesh = sharding.make_mesh(config.mesh, devices)
    components = build(config, vocab_size=plan.vocab_size or default_vocab_size(config.data.corpus), mesh=mesh)
    components.training.check_batch_size()
    # Which implementation of attention it is depends on the devices.
    chosen = components.attention if devices else None
    attention = {task: str(one.implementation) for task, one in chosen._asdict().items()} if chosen else {}
    persistent, update_flops = device_bytes(components), flops_of_update(components)
    peak = flops.device_peak(found.chip.kind)
    assert peak
    print(
        f"\n{name} on {topology}: {components.num_parameters:,} parameters, computed in {config.model.dtype}, "
        f"{mesh.size} x {found.chip.kind} ({', '.join(f'{axis} {size}' for axis, size in mesh.shape.items())})\n"
        f"{config.train.batch_size} rows x {config.train.segment_len}, memory {config.train.mem_len}, "
        f"remat {config.model.remat}"
    )
    for task, implementation in attention.items():
        print(f"{f'attention, {task}':<24}{implementation}")
    for kind, size in persistent.items():
        print(f"{kind:<24}{megabytes(size)} per device")
    print(
        f"{'an update':<24}{update_flops / 1e12:.4g} TFLOP per device, at least {1e3 * update_flops / peak:.1f} ms",
        flush=True,
    )
    facts = {
        "configuration": name,
        "topology": topology,
        "mesh": dict(mesh.shape),
        "parameters": components.num_parameters,
        "device_bytes": persistent,
        "attention": attention,
        "config": config_tree.to_dict(config),
        "flops_of_update": update_flops,
        "least_seconds_of_update": update_flops / peak,
    }
    if devices is None:
        print(f"{topologies.missing_compiler(topology)}: nothing is compiled, activations are not known")
        yield facts | {"task": None}
        return
    for task in plan.tasks:
        yield facts | {"task": task} | estimate_task(components, task, found.chip.memory_bytes)


def flops_of_update(components: RunComponents) -> float:
    """Returns the operations of a device in an update by `txl_jax.flops`, with those that remat=full does again."""
    model, train = components.config.model, components.config.train
    lengths: Any = {"segment_len": train.segment_len, "mem_len": train.mem_len, "same_length": train.same_length}
    per_token = flops.of_training(model, vocab_size=components.model.vocab_size, **lengths)
    if model.remat is Remat.FULL:
        per_token += flops.of_recomputing(model, vocab_size=components.model.vocab_size, **lengths)
    return per_token * train.batch_size * train.segment_len / components.mesh.size


def estimate_task(components: RunComponents, task: str, memory_bytes: int) -> dict[str, Any]:
    """Compiles a task; prints and returns what it needs on a device with this memory, or why it is not possible."""
    start = time.monotonic()
    try:
        if task == "generation":
            check_can_generate(components.config)
        compiled = compile_task(components, task)
    except UserError as error:
        print(f"{task}: not possible, {error}", flush=True)
        return {"not_possible": str(error)}
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _does_not_fit(task, _needed_and_available(str(error)))
    seconds, sizes, costs = time.monotonic() - start, compiled.memory_analysis(), compiled.cost_analysis() or {}
    # Not the sum of arguments, results and scratch, which share buffers: it can be more than a device has.
    needed, arguments = sizes.peak_memory_in_bytes, sizes.argument_size_in_bytes
    if needed > memory_bytes:  # The compiler for GPUs accepts a program that is too large.
        return _does_not_fit(task, f"needs {needed / 2**30:.2f}GiB of {memory_bytes / 2**30:.2f}GiB")
    by_xla = f", {costs['flops'] / 1e12:.4g} TFLOP by XLA" if "flops" in costs else ""
    print(
        f"{task}: fits, needs {megabytes(needed)} of {megabytes(memory_bytes)} per device: arguments "
        f"{megabytes(arguments)}, activations, gradients and other scratch {megabytes(needed - arguments)}; output "
        f"{megabytes(sizes.output_size_in_bytes)}{by_xla}; compiled in {seconds:.0f} s",
        flush=True,
    )
    return {
        "peak_bytes": needed,
        "argument_bytes": arguments,
        "scratch_bytes": needed - arguments,
        "output_bytes": sizes.output_size_in_bytes,
        "flops_by_xla": costs.get("flops"),  # None on GPUs.
        "compile_seconds": seconds,
    }


def _does_not_fit(task: str, sizes: str) -> dict[str, str]:
    print(f"{task}: does not fit, it {sizes}", flush=True)
    return {"does_not_fit": sizes}


def _needed_and_available(error: str) -> str:
    """Extracts the two sizes from a message of the TPU's compiler that is pages long."""
    found = re.search(
        r"Used ([\d.]+\w) of ([\d.]+\w) hbm|temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)", error
    )
    if not found:
        return error.partition("\n")[0][:200]
    needed, available = filter(None, found.groups())
    return f"needs {needed}iB of {available}iB"


def compile_task(components: RunComponents, task: str) -> Any:
    """Compiles the train step, the eval step (streaming or in sliding windows), or the step of 16 tokens."""
    if task == "training":
        return components.training.compile_step().program
    params = components.training.abstract_state.params
    if task == "generation":
        generator, samples = make_generator(components), components.config.generate.samples
        weights = _abstract_result(generator.prepare_segment, params)
        tokens = _abstract_result(jax.jit(generator.for_tokens), weights)

        def start(weights: Any) -> Context:
            memory = cache_lib.unrotate(generator.empty(weights))
            memory = jax.tree.map(lambda array: array.repeat(samples, axis=0) if array.ndim else array, memory)
            return Context(memory, jnp.zeros(samples, jnp.int32), jnp.zeros(samples, bool))

        context = _abstract_result(jax.jit(start), weights)
        return generator.write.lower(tokens, context, 0, BLOCK, count=BLOCK).compile()
    evaluation: Any = components.evaluation  # Its functions are jitted, which their types do not show.
    eval_config = components.config.eval
    if eval_config.stride:
        replicated = sharding.named_sharding(components.mesh)
        shapes = [(eval_config.batch_size, length) for length in (eval_config.segment_len, eval_config.stride)]
        tokens, targets = (jax.ShapeDtypeStruct(shape, "int32", sharding=replicated) for shape in shapes)
        return evaluation.window_step.lower(params, tokens, targets).compile()
    weights = _abstract_result(evaluation.prepare_params, params)
    init = jax.jit(evaluation.scorer.init_memory, out_shardings=evaluation.memory_shardings)
    memory = _abstract_result(init, weights)
    return evaluation.eval_step.lower(weights, memory, components.placement.abstract_segments(eval_config)).compile()


def _abstract_result(function: Any, *arguments: Any) -> Any:
    """Returns shapes, types and the compiler's shardings of the result of a jitted function of abstract arguments."""
    compiled = function.lower(*arguments).compile()
    return jax.tree.map(
        lambda array, placed: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed),
        function.eval_shape(*arguments),
        compiled.output_shardings,
    )


if __name__ == "__main__":
    topologies.set_environment()
    cli.main(run, Plan, config=ExperimentConfig(), by_corpus=True, groups=GROUPS)
