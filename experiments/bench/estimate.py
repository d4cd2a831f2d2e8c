"""What a configuration needs on a slice of Cloud TPUs, without one: memory, collectives, operations, least time.

    python -m experiments.bench.estimate --flagfile=enwik8_24l --model.dtype=bfloat16 --topology=v5e:8x8 --mesh.fsdp=64
    python -m experiments.bench.estimate --flagfile=wt103_large --topology=v4:2x2x4 --mesh.tensor=4 --estimate_tasks=training
    python -m experiments.bench.estimate --estimate_configs=enwik8_24l,wt103_large --topology=v5e,v4:4x4x4 --model.dtype=bfloat16

Training, evaluation and generation are compiled for the slice by the TPU's own compiler, which comes with
pip install 'jax[tpu]' (libtpu, 0.7 GB); without it only the part that follows from the shapes of arrays is printed. That a
program compiles shows that it shards and fits, not that it is fast: the times are bounds from data sheets.

With --estimate_configs it prints one line for each of these flagfiles and each slice, of training, with a mesh that it
chooses itself: all devices, as many as can be on fsdp, and remat=full where it fits only so. A generation without a shape
means the smallest slice of it that training fits on so. Other flags change all of them.
"""

from experiments.bench import topologies

topologies.set_environment()  # Before jax is imported, which reads it.

import collections
import datetime
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from experiments.cli import flag_tree, programs, runner
from txl_jax import sharding
from txl_jax.assemble import RunComponents, assemble
from txl_jax.bench import estimate
from txl_jax.bench.estimate import Compiled, DoesNotFitError
from txl_jax.bench.roofline import CHIPS, Bounds, Chip, bounds
from txl_jax.config import ExperimentConfig, MeshConfig, Remat
from txl_jax.config import tree as config_tree
from txl_jax.jobs import report
from txl_jax.jobs.generate import check_can_generate
from txl_jax.runtime import environment
from txl_jax.runtime.files import write_json

FLAGS = flags.FLAGS
_TASKS = {"training": estimate.training, "evaluation": estimate.evaluation, "generation": estimate.generation}
_HEAD = (
    "| configuration | rows x segment, memory | slice | mesh | remat | parameters and optimiser | segment memory | "
    "activations, gradients | needed | of | least time of an update |"
)


def main() -> None:
    """Parses the flags and estimates."""
    flag_tree.define(ExperimentConfig())
    flags.DEFINE_list("topology", None, "Slice, such as v5e:4x8 or v4:2x2x4; with --estimate_configs several.")
    flags.DEFINE_integer("estimate_vocab", None, "Size of the vocabulary; none: the corpus's, or 256.", lower_bound=2)
    flags.DEFINE_list("estimate_tasks", list(_TASKS), "What to compile, with commas.")
    flags.DEFINE_list("estimate_configs", None, "Flagfiles for a table, with commas; none: the flags' own settings.")
    flags.DEFINE_string("estimate_json", None, "File for all figures; none: only what is printed.")
    flags.register_validator(
        "estimate_tasks",
        lambda names: names and set(names) <= set(_TASKS),
        f"has no task, or one that is none of {', '.join(_TASKS)}",
    )
    runner.parse_or_exit()
    sys.exit(runner.guarded(_run))


def _run() -> int:
    if not FLAGS.topology:
        raise ValueError("no slice was given; say with --topology=v5e:4x8 which one")
    found = _table() if FLAGS.estimate_configs else _one()
    if FLAGS.estimate_json:
        write_json(Path(FLAGS.estimate_json), {**_versions(), "argv": sys.argv[1:], "estimates": found})
        print(f"\nresults   {FLAGS.estimate_json}")
    return 0


def _versions() -> dict[str, str]:
    return {
        "jax": jax.__version__,
        "libtpu": topologies.version() or "not installed",
        "date": datetime.date.today().isoformat(),
    }


def _opening() -> str:
    return ", ".join(f"{name} {value}" for name, value in _versions().items())


def _one() -> list[dict[str, Any]]:
    """All that is known of the flags' own settings on one slice."""
    if len(FLAGS.topology) > 1:
        raise ValueError(f"--topology has {len(FLAGS.topology)} slices; several go with --estimate_configs")
    [topology] = FLAGS.topology
    chip = CHIPS[topologies.split(topology)[0]]
    config = programs.config_of_flags()
    parts, compiles = _assemble(config, topology)
    train = config.train
    print(
        f"{_opening()}\n\n"
        f"{parts.num_parameters:,} parameters, computed in {config.model.dtype} on {topology}: {parts.mesh.size} x {chip.kind} "
        f"({', '.join(f'{name} {size}' for name, size in parts.mesh.shape.items())})\n"
        f"{train.batch_size} rows x {train.segment_len}, memory {train.mem_len}\n"
    )
    for name, size in report.device_bytes(parts).items():
        print(f"{name:<24}{_told(size)} per device")
    if not compiles:
        print("\nlibtpu is not installed (pip install 'jax[tpu]'): nothing is compiled, activations are not known")
        _say_bounds(parts, bounds(estimate.update_work(parts, compiled=None), chip), complete=False)
        return [_record(parts, topology, None, None)]
    return [_say_task(parts, topology, chip, name) for name in FLAGS.estimate_tasks]


def _say_task(parts: RunComponents, topology: str, chip: Chip, name: str) -> dict[str, Any]:
    """One program."""
    if name == "generation":
        try:
            check_can_generate(parts.config)
        except ValueError as error:
            print(f"\n{name}: not possible, {error}")
            return _record(parts, topology, name, None) | {"not_possible": str(error)}
    try:
        compiled = _TASKS[name](parts)
    except DoesNotFitError as error:
        print(f"\n{name}: does not fit, it {error}")
        return _record(parts, topology, name, None) | {"does_not_fit": str(error)}
    print(
        f"\n{name}: needs {_told(compiled.needed)} of {_told(chip.memory)} per device, {_told(compiled.scratch)} of it "
        f"activations, gradients and other scratch (compiled in {compiled.seconds:.0f} s); a call is {_call(parts, name)}"
    )
    for line in _told_collectives(compiled):
        print(line)
    if name == "training":
        _say_bounds(parts, bounds(estimate.update_work(parts, compiled=compiled), chip), complete=True)
    return _record(parts, topology, name, compiled)


def _call(parts: RunComponents, name: str) -> str:
    """What one call of a program does."""
    if name == "generation":
        return f"{estimate.BLOCK} tokens"
    span = getattr(parts.config, {"training": "train", "evaluation": "eval"}[name])
    if name == "evaluation" and span.stride:
        return "a batch of windows"
    return f"{span.segments_per_call} {'updates' if name == 'training' else 'segments'}"


def _told(n_bytes: float) -> str:
    """Bytes for people."""
    return environment.megabytes(n_bytes) if n_bytes >= 1e6 else f"{n_bytes / 1e3:.1f} kB"


def _told_collectives(compiled: Compiled) -> Iterator[str]:
    """A table by kind and size of the group."""
    groups = collections.defaultdict(list)
    for one in compiled.collectives:
        groups[one.kind, one.devices].append(one)
    if not groups:
        return
    yield "\n| collective | among | per call | sent per device and call | largest array |"
    yield "|---|---|---|---|---|"
    for (kind, devices), found in sorted(groups.items()):
        largest = max(found, key=lambda one: one.largest)
        sent = sum(one.sent * one.times for one in found)
        times = sum(one.times for one in found)
        yield f"| {kind} | {devices} | {times:,} | {_told(sent)} | {largest.shape} |"


def _say_bounds(parts: RunComponents, found: Bounds, *, complete: bool) -> None:
    train = parts.config.train
    tokens = train.batch_size * train.new_tokens
    links = f", links {1e3 * found.links:.1f} ms" if complete else ""
    print(
        f"\nAn update takes {1e3 * found.overlapped:.1f} ms ({tokens / found.overlapped:,.0f} tokens/s) if all overlaps, and "
        f"{1e3 * found.in_turn:.1f} ms if nothing does:\n"
        f"products {1e3 * found.compute:.1f} ms, memory {1e3 * found.memory:.1f} ms{links}, at the rates of the data sheet; of "
        "the adaptive softmax\nonly the head is counted, arrays as often as they must be moved, and scratch once each way."
    )


def _assemble(config: ExperimentConfig, topology: str) -> tuple[RunComponents, bool]:
    """The parts on a slice, and whether its compiler is here."""
    devices = topologies.devices(topology)
    if devices is None:
        mesh = sharding.abstract_mesh(config.mesh, topologies.n_device(topology))
    else:
        mesh = sharding.make_mesh(config.mesh, devices)
    vocab_size = FLAGS.estimate_vocab or programs.VOCABULARIES.get(config.data.corpus, 256)
    parts = assemble(config, vocab_size=vocab_size, mesh=mesh)
    parts.training.check_batch_size()
    return parts, devices is not None


def _record(parts: RunComponents, topology: str, name: str | None, compiled: Compiled | None) -> dict[str, Any]:
    facts = {
        "topology": topology,
        "mesh": dict(parts.mesh.shape),
        "parameters": parts.num_parameters,
        "held_bytes": report.device_bytes(parts),
        "config": config_tree.to_dict(parts.config),
        "program": name,
    }
    if compiled is None:
        return facts
    return facts | {
        "needed_bytes": compiled.needed,
        "scratch_bytes": compiled.scratch,
        "compile_seconds": compiled.seconds,
        "collectives": [one._asdict() for one in compiled.collectives],
    }


# The table


def _table() -> list[dict[str, Any]]:
    settled = [f"--{name}" for name in ("mesh.data", "mesh.fsdp", "mesh.tensor") if FLAGS[name].present]
    settled += ["--estimate_tasks"] if FLAGS["estimate_tasks"].present else []
    if settled:
        raise ValueError(
            f"{settled[0]} goes without --estimate_configs, whose table is of training on meshes of its own"
        )
    configs = {name: _config_of(name) for name in FLAGS.estimate_configs}
    slices = {topology: _slices(topology) for topology in FLAGS.topology}
    if topologies.version() is None:
        raise ValueError("a table is made by the compiler; install it with pip install 'jax[tpu]'")
    found = []
    print(f"{_opening()}\n\n{_HEAD}\n|{'---|' * _HEAD.count(' | ')}---|")
    for name, config in configs.items():
        for candidates in slices.values():
            line, record = _first_that_fits(name, config, candidates)
            print(line, flush=True)
            found.append(record)
    return found


def _slices(topology: str) -> list[str]:
    """One slice, or all of a generation from small to large."""
    if topology in topologies.SLICES:
        return [f"{topology}:{shape}" for shape in topologies.SLICES[topology]]
    topologies.split(topology)
    return [topology]


def _config_of(name: str) -> ExperimentConfig:
    """A flagfile's settings, changed by this command line's flags."""
    flag_values = flags.FlagValues()
    flag_tree.define(ExperimentConfig(), flag_values)
    given = [f"--{leaf}={_as_text(value)}" for leaf, value in flag_tree.given(FLAGS).items()]
    flag_tree.parse(["estimate", f"--flagfile={name}", *given], flag_values)
    return programs.config_of_flags(flag_values)


def _as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _first_that_fits(name: str, config: ExperimentConfig, slices: list[str]) -> tuple[str, dict[str, Any]]:
    """The line of the first slice on which training fits."""
    refused: dict[str, Any] = {}
    for topology in slices:
        for mesh, remat in _choices(config, topologies.n_device(topology)):
            changed = config_tree.replace(
                config,
                {"mesh.data": mesh.data, "mesh.fsdp": mesh.fsdp, "mesh.tensor": mesh.tensor, "model.remat": remat},
            )
            parts, _ = _assemble(changed, topology)
            try:
                compiled = estimate.training(parts)
            except DoesNotFitError as error:
                refused = _record(parts, topology, "training", None) | {"does_not_fit": str(error)}
                continue
            return _line(name, parts, topology, compiled), _record(parts, topology, "training", compiled)
    if not refused:
        rows, heads = config.train.batch_size // config.train.grad_accum_steps, config.model.n_head
        return f"| {name} | no mesh of {slices[-1]} divides its {rows} rows and {heads} heads |", {
            "topology": slices[-1]
        }
    mesh = " x ".join(map(str, refused["mesh"].values()))
    return f"| {name} | {slices[-1]}, {mesh}: {refused['does_not_fit']} |", refused


def _choices(config: ExperimentConfig, n_device: int) -> Iterator[tuple[MeshConfig, Remat]]:
    """Meshes over all devices that a configuration admits, and what is kept for the backward pass.

    That with no more on `model` than there must be, and of those the one with the most on `fsdp`; with what the
    configuration keeps, and then with everything computed again.
    """
    model, rows = config.model, config.train.batch_size // config.train.grad_accum_steps
    for shared in range(1, n_device + 1):
        if n_device % shared or model.n_head % shared or model.d_inner % shared or rows % (n_device // shared):
            continue
        devices = n_device // shared
        fsdp = next(n for n in range(devices, 0, -1) if devices % n == 0 and model.d_model % n == 0)
        mesh = MeshConfig(data=devices // fsdp, fsdp=fsdp, tensor=shared)
        for remat in dict.fromkeys((model.remat, Remat.FULL)):
            yield mesh, remat
        return


def _line(name: str, parts: RunComponents, topology: str, compiled: Compiled) -> str:
    config, held = parts.config, report.device_bytes(parts)
    chip = CHIPS[topologies.split(topology)[0]]
    least = bounds(estimate.update_work(parts, compiled=compiled), chip)
    sizes = (
        held["parameters"] + held["optimizer"],
        held["segment memory"],
        compiled.scratch,
        compiled.needed,
        chip.memory,
    )
    cells = [
        name,
        f"{config.train.batch_size} x {config.train.segment_len}, {config.train.mem_len}",
        topology,
        " x ".join(str(size) for size in parts.mesh.shape.values()),
        config.model.remat,
        *map(_told, sizes),
        f"{1e3 * least.overlapped:.1f} to {1e3 * least.in_turn:.1f} ms",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
