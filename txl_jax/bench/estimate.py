"""Estimates of what a configuration needs on TPUs or GPUs that are not at hand: memory, collectives, FLOPs, roofline.

Training, evaluation and generation are compiled by the devices' own compiler (libtpu, or XLA with jax's CUDA plugin).
Without it only the part that follows from the shapes of arrays is known.
"""

import collections
import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from txl_jax import cli, sharding
from txl_jax.bench import aot_compile, topologies
from txl_jax.bench.aot_compile import Compiled, DoesNotFitError
from txl_jax.bench.collectives import Collective
from txl_jax.bench.output import Log, print_line
from txl_jax.bench.roofline import Bounds, Chip, lower_bounds
from txl_jax.bench.synthetic_tokens import default_vocab_size
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import check_fields, require, setting
from txl_jax.errors import UserError
from txl_jax.runs.build import RunComponents, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runs.train import device_bytes
from txl_jax.runtime import environment
from txl_jax.runtime.storage import write_json

TASKS = {
    "training": aot_compile.compile_training,
    "evaluation": aot_compile.compile_evaluation,
    "generation": aot_compile.compile_generation,
}


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the estimate."""

    topology: tuple[str, ...] = setting(
        (),
        "TPU slice, such as v5e:4x8 or v4:2x2x4, several alike, such as 2*v5e:4x8, or GPUs, such as h200 or h100x8. "
        "With --configs several, with commas; "
        "a generation or a GPU alone (v5e, h200) is then the smallest slice, or number, that training fits on.",
    )
    tasks: tuple[str, ...] = setting(tuple(TASKS), "Tasks to compile, with commas.")
    configs: tuple[str, ...] = setting(
        (), "Published configurations or flagfiles for a table, with commas; default: the settings of the flags alone."
    )
    vocab_size: int | None = setting(
        None, "V; none: the size published with the corpus, or 256 where there is none.", at_least=2
    )
    json: str | None = setting(None, "File for all figures; none: only what is printed.", path=True)

    def validate(self) -> None:
        """Raises `UserError` for an unknown task or slice, or settings that do not go together."""
        check_fields(self, "")
        require(self.topology, "topology is empty; it must name a slice or GPUs, such as --topology=v5e:4x8 or h200x8")
        require(self.tasks, f"tasks is empty; it must be of {', '.join(TASKS)}")
        for name in self.tasks:
            near = config_tree.did_you_mean(name, TASKS)
            require(name in TASKS, f"tasks has {name!r}; it must be of {', '.join(TASKS)}{near}")
        if self.configs:
            require(
                self.tasks == tuple(TASKS),
                f"tasks is {','.join(self.tasks)} and the table of --configs is of training; leave it out",
            )
            for topology in self.topology:
                topologies.slices(topology)
        else:
            require(
                len(self.topology) == 1, f"topology has {len(self.topology)} slices; it must be one, or use --configs"
            )
            topologies.num_devices(self.topology[0])


def run(config: ExperimentConfig, plan: Plan, log: Log = print_line) -> list[dict[str, Any]]:
    """Prints what is known of one configuration on one topology, and writes the JSON file.

    Args:
      config: the model, the lengths and the mesh.
      plan: the topology, the tasks to compile.
      log: called with each line.

    Returns:
      a record per task, as in the JSON file.

    Raises:
      UserError: settings that do not fit the topology, or each other.
    """
    [topology] = plan.topology
    chip = topologies.chip(topology)
    components, compiles = assemble_on(config, topology, plan.vocab_size)
    mesh, train = components.mesh, config.train
    log(
        f"{format_versions(plan)}\n\n"
        f"{components.num_parameters:,} parameters, computed in {config.model.dtype} on {topology}: "
        f"{mesh.size} x {chip.kind} ({', '.join(f'{name} {size}' for name, size in mesh.shape.items())})\n"
        f"{train.batch_size} rows x {train.segment_len}, memory {train.mem_len}\n"
    )
    for task, implementation in format_attention(components).items():
        log(f"{f'attention, {task}':<24}{implementation}")
    for name, size in device_bytes(components).items():
        log(f"{name:<24}{format_bytes(size)} per device")
    if compiles:
        records = [_estimate_task(components, topology, chip, name, log) for name in plan.tasks]
    else:
        log(f"\n{topologies.missing_compiler(topology)}: nothing is compiled, activations are not known")
        bounds = lower_bounds(aot_compile.work_per_update(components, compiled=None), chip)
        log(format_roofline(components, bounds, complete=False))
        records = [make_record(components, topology, None, None)]
    write_records(records, plan, log)
    return records


def assemble_on(config: ExperimentConfig, topology: str, vocab_size: int | None) -> tuple[RunComponents, bool]:
    """Assembles the components of a run on a topology; returns them and whether they can be compiled there.

    Raises:
      UserError: settings that do not fit the topology, or each other.
    """
    devices = topologies.devices(topology)
    mesh: Any
    if devices is None:
        num_slices = topologies.count_slices(topology)
        mesh = sharding.abstract_mesh(config.mesh, topologies.num_devices(topology), num_slices=num_slices)
    else:
        mesh = sharding.make_mesh(config.mesh, devices)
    components = build(config, vocab_size=vocab_size or default_vocab_size(config.data.corpus), mesh=mesh)
    components.training.check_batch_size()
    return components, devices is not None


def make_record(
    components: RunComponents, topology: str, task: str | None, compiled: Compiled | None
) -> dict[str, Any]:
    """Returns the values of a task for the JSON file; None: nothing was compiled."""
    facts = {
        "topology": topology,
        "mesh": dict(components.mesh.shape),
        "parameters": components.num_parameters,
        "device_bytes": device_bytes(components),
        "attention": format_attention(components),
        "config": config_tree.to_dict(components.config),
        "task": task,
    }
    if compiled is None:
        return facts
    return facts | {
        "peak_bytes": compiled.peak_bytes,
        "scratch_bytes": compiled.scratch_bytes,
        "compile_seconds": compiled.seconds,
        "collectives": [one._asdict() for one in compiled.collectives],
        "crossings": [one._asdict() for one in compiled.crossings],
    }


def write_records(records: list[dict[str, Any]], plan: Plan, log: Log) -> None:
    """Writes the JSON file of a plan, if it names one."""
    if plan.json:
        write_json(plan.json, {**_versions(plan), "plan": config_tree.to_dict(plan), "estimates": records})
        log(f"\nresults   {plan.json}")


def format_attention(components: RunComponents) -> dict[str, str]:
    """Returns the implementation of attention by task; empty: the network has none, or the devices are not known."""
    mesh: Any = components.mesh  # Abstract where its devices' compiler is not installed.
    chosen = components.attention
    if chosen is None or isinstance(mesh, AbstractMesh):
        return {}
    return {task: str(one.implementation) for task, one in chosen._asdict().items()}


def format_versions(plan: Plan) -> str:
    """Formats the versions and the date that an estimate depends on."""
    return ", ".join(f"{name} {value}" for name, value in _versions(plan).items())


def format_bytes(n_bytes: float) -> str:
    """Formats a size; those below a megabyte in kB."""
    return environment.megabytes(n_bytes) if n_bytes >= 1e6 else f"{n_bytes / 1e3:.1f} kB"


def format_collectives(compiled: Compiled) -> Iterator[str]:
    """Formats a table of the collectives by kind and number of devices that exchange, and one of those of slices."""
    yield from _format_table("collective | devices", compiled.collectives)
    yield from _format_table("between slices | slices", compiled.crossings)


def _format_table(head: str, found: Sequence[Collective]) -> Iterator[str]:
    groups = collections.defaultdict(list)
    for one in found:
        groups[one.kind, one.devices].append(one)
    if not groups:
        return
    yield f"\n| {head} | per call | sent per device and call | largest array |"
    yield "|---|---|---|---|---|"
    for (kind, devices), found in sorted(groups.items()):
        largest = max(found, key=lambda one: one.largest)
        sent = sum(one.bytes_sent * one.times for one in found)
        times = sum(one.times for one in found)
        yield f"| {kind} | {devices} | {times:,} | {format_bytes(sent)} | {largest.shape} |"


def format_roofline(components: RunComponents, bounds: Bounds, *, complete: bool) -> str:
    """Formats the lower bounds of an update's time; `complete`: communication is known."""
    train = components.config.train
    tokens = train.batch_size * train.new_tokens
    several = complete and sharding.num_slices(components.mesh) > 1
    beyond = "\nThe network between slices is not counted." if several else ""
    links = f", collectives {1e3 * bounds.communication:.1f} ms" if complete else ""
    return (
        f"\nroofline: an update takes at least {1e3 * bounds.overlapped:.1f} ms "
        f"({tokens / bounds.overlapped:,.0f} tokens/s) with perfect overlap, {1e3 * bounds.serial:.1f} ms with none:\n"
        f"matrix products {1e3 * bounds.compute:.1f} ms, HBM {1e3 * bounds.hbm:.1f} ms{links}, at data sheet "
        "rates. Of the adaptive\nsoftmax only the head is counted, arrays as often as they must be moved, scratch once "
        f"each way.{beyond}"
    )


def _estimate_task(components: RunComponents, topology: str, chip: Chip, name: str, log: Log) -> dict[str, Any]:
    """Compiles one task and prints what it needs; returns its record."""
    if name == "generation":
        try:
            check_can_generate(components.config)
        except UserError as error:
            log(f"\n{name}: not possible, {error}")
            return make_record(components, topology, name, None) | {"not_possible": str(error)}
    try:
        compiled = TASKS[name](components, memory_bytes=chip.hbm_bytes)
    except DoesNotFitError as error:
        log(f"\n{name}: does not fit, it {error}")
        return make_record(components, topology, name, None) | {"does_not_fit": str(error)}
    log(
        f"\n{name}: needs {format_bytes(compiled.peak_bytes)} of {format_bytes(chip.hbm_bytes)} per device, "
        f"{format_bytes(compiled.scratch_bytes)} of it activations, gradients and other scratch (compiled in "
        f"{compiled.seconds:.0f} s); a call is {_describe_call(components.config, name)}"
    )
    for line in format_collectives(compiled):
        log(line)
    if name == "training":
        bounds = lower_bounds(aot_compile.work_per_update(components, compiled=compiled), chip)
        log(format_roofline(components, bounds, complete=True))
    return make_record(components, topology, name, compiled)


def _describe_call(config: ExperimentConfig, task: str) -> str:
    """Describes one call of a compiled task."""
    if task == "generation":
        return f"{aot_compile.BLOCK} tokens"
    if task == "training":
        return f"{config.train.segments_per_call} updates"
    return "a batch of windows" if config.eval.stride else f"{config.eval.segments_per_call} segments"


def _versions(plan: Plan) -> dict[str, str]:
    versions = {"jax": jax.__version__}
    for topology in plan.topology:
        versions |= topologies.compiler_versions(topology)
    return versions | {"date": datetime.date.today().isoformat()}
