"""A table of estimates: training of several configurations on several topologies, each on a mesh chosen here."""

from collections.abc import Iterator, Mapping
from typing import Any

from txl_jax.bench import aot_compile, topologies
from txl_jax.bench.aot_compile import Compiled, DoesNotFitError
from txl_jax.bench.estimate import (
    Plan,
    assemble_on,
    format_attention,
    format_bytes,
    format_versions,
    make_record,
    write_records,
)
from txl_jax.bench.output import Log, print_line
from txl_jax.bench.roofline import lower_bounds
from txl_jax.config import ExperimentConfig, MeshConfig, Remat
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError
from txl_jax.runs.build import RunComponents
from txl_jax.runs.train import device_bytes

_HEAD = (
    "| configuration | rows x segment, memory | slice | mesh | remat | attention | parameters and optimizer | "
    "segment memory | activations, gradients | needed | of | least time of an update |"
)


def run_table(configs: Mapping[str, ExperimentConfig], plan: Plan, log: Log = print_line) -> list[dict[str, Any]]:
    """Prints a markdown table with one row per configuration and topology, and writes the JSON file.

    Args:
      configs: configurations by name; their meshes are not used.
      plan: topologies; of a generation or a GPU alone, the smallest slice, or number, that training fits on.
      log: called with each line.

    Returns:
      a record per row, as in the JSON file.

    Raises:
      UserError: an unknown topology, or its compiler is not installed.
    """
    slices = {topology: topologies.slices(topology) for topology in plan.topology}
    for topology in plan.topology:
        if missing := topologies.missing_compiler(topology):
            raise UserError(f"a table needs the compiler of {topology} and {missing}")
    records = []
    log(f"{format_versions(plan)}\n\n{_HEAD}\n|{'---|' * _HEAD.count(' | ')}---|")
    for name, config in configs.items():
        for candidates in slices.values():
            row, record = estimate_smallest(name, config, candidates, plan.vocab_size)
            log(row)
            records.append(record)
    write_records(records, plan, log)
    return records


def estimate_smallest(
    name: str, config: ExperimentConfig, slices: list[str], vocab_size: int | None
) -> tuple[str, dict[str, Any]]:
    """Compiles training for the first slice on which it fits; returns the table row and the record."""
    refused: dict[str, Any] = {}
    for topology in slices:
        for mesh, remat in candidate_meshes(config, topologies.num_devices(topology)):
            changes = {
                "mesh.data": mesh.data,
                "mesh.fsdp": mesh.fsdp,
                "mesh.tensor": mesh.tensor,
                "model.remat": remat,
            }
            components, _ = assemble_on(config_tree.replace(config, changes), topology, vocab_size)
            try:
                compiled = aot_compile.compile_training(components, memory_bytes=topologies.chip(topology).hbm_bytes)
            except DoesNotFitError as error:
                refused = make_record(components, topology, "training", None) | {"does_not_fit": str(error)}
                continue
            row = format_row(name, components, topology, compiled)
            return row, make_record(components, topology, "training", compiled)
    if not refused:
        rows, heads = config.train.batch_size // config.train.grad_accum_steps, config.model.n_head
        row = f"| {name} | no mesh of {slices[-1]} divides its {rows} rows and {heads} heads |"
        return row, {"topology": slices[-1]}
    mesh_shape = " x ".join(map(str, refused["mesh"].values()))
    return f"| {name} | {slices[-1]}, {mesh_shape}: {refused['does_not_fit']} |", refused


def candidate_meshes(config: ExperimentConfig, num_devices: int) -> Iterator[tuple[MeshConfig, Remat]]:
    """Yields a mesh over all devices that a configuration admits, with the remat settings to try on it.

    Tensor parallelism over as few devices as possible, and of those meshes the one with the most on `fsdp`; first with
    the configuration's own remat, then with everything rematerialized.
    """
    model, rows = config.model, config.train.batch_size // config.train.grad_accum_steps
    for tensor in range(1, num_devices + 1):
        batch_shards, rest = divmod(num_devices, tensor)
        if rest or model.n_head % tensor or model.d_inner % tensor or rows % batch_shards:
            continue
        fsdp = next(n for n in range(batch_shards, 0, -1) if batch_shards % n == 0 and model.d_model % n == 0)
        mesh = MeshConfig(data=batch_shards // fsdp, fsdp=fsdp, tensor=tensor)
        for remat in dict.fromkeys((model.remat, Remat.FULL)):
            yield mesh, remat
        return


def format_row(name: str, components: RunComponents, topology: str, compiled: Compiled) -> str:
    """Formats the table row of a configuration on a slice."""
    config, persistent = components.config, device_bytes(components)
    chip = topologies.chip(topology)
    bounds = lower_bounds(aot_compile.work_per_update(components, compiled=compiled), chip)
    sizes = (
        persistent["parameters"] + persistent["optimizer"],
        persistent["segment memory"],
        compiled.scratch_bytes,
        compiled.peak_bytes,
        chip.hbm_bytes,
    )
    cells = [
        name,
        f"{config.train.batch_size} x {config.train.segment_len}, {config.train.mem_len}",
        topology,
        " x ".join(str(size) for size in components.mesh.shape.values()),
        config.model.remat,
        format_attention(components).get("training", ""),
        *map(format_bytes, sizes),
        f"{1e3 * bounds.overlapped:.1f} to {1e3 * bounds.serial:.1f} ms",
    ]
    return f"| {' | '.join(cells)} |"
