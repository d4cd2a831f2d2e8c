"""Estimates what training each published preset needs on TPUs, and prints it as a table.

    python -m benchmarks.presets measure
    python -m benchmarks.presets table --price=1.20

`measure` compiles the training step of each preset for the smallest slice of one kind of TPU that
it fits on, and adds a row to a CSV file. The TPU is not needed, only its compiler (pip install
'jax[tpu]'). Presets that the file has for this kind of TPU are not compiled again. Each row has a
command of experiments.bench.estimate that prints the same numbers.

`table` prints the rows as Markdown, with chip hours, and with the cost at a price per chip hour.
Two estimates of the time follow from the compiled program (docs/estimates.md). The bound is the
longest of three least times: all matmuls, all bytes in memory, all integer operations, each at the
data sheet's peak. The roofline sum adds up the longest of the three for each operation. It is
neither a bound nor a prediction. Neither counts communication, evaluations or checkpoints.
"""

import argparse
import csv
import dataclasses
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import records
from experiments.bench import timing, topologies
from experiments.bench.chips import CHIPS
from experiments.bench.compile_tasks import compile_task, cost_of_task
from experiments.bench.estimate import meshes
from txl_jax import flops
from txl_jax.config import DType, ExperimentConfig, config_tree
from txl_jax.config.experiment import preset, preset_names
from txl_jax.errors import UserError
from txl_jax.runs.build import Built, build
from txl_jax.runtime.environment import is_out_of_memory
from txl_jax.sharding.mesh import make_mesh

CSV = Path(__file__).with_name("presets.csv")
# Presets of this package. All others are from a publication or a public script.
OWN = ("own_bytes", "own_subwords_gpu", "own_words", "ptb_small", "small")
HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Row:
    """What the training of a preset needs. The fields are the columns of the file."""

    machine: str
    date: str
    versions: str
    # Prints the same numbers.
    command: str
    preset: str
    # Kind of TPU, a key of `CHIPS`.
    tpu: str
    # The smallest slice that the training fits on.
    slice: str
    chips: int
    remat: str
    parameters: int
    # Training steps of the preset.
    steps: int
    # FLOPs of the whole training on all chips, by `txl_jax.flops`: without recomputation, and
    # without the tails of an adaptive softmax.
    training_flops: float
    # Peak of the compiled training step per chip, and the size of a chip's memory.
    peak_bytes: int
    memory_bytes: int
    # Least times of a step in seconds: of its matmuls, its bytes in memory, its integer operations.
    matmul_seconds: float
    memory_seconds: float
    integer_seconds: float
    # Sum over operations of the longest of the three, in seconds.
    roofline_seconds: float
    # Bytes that a chip sends to others in a step. Their time is not in the sums above.
    sent_bytes: float
    # Loops whose rounds depend on the text (tails of an adaptive softmax). One round is counted.
    assumed_loops: int

    @property
    def bound_seconds(self) -> float:
        """The longest of the three least times of a step."""
        return max(self.matmul_seconds, self.memory_seconds, self.integer_seconds)

    def chip_hours(self, step_seconds: float) -> float:
        """Returns the hours of the whole training, times the number of chips."""
        return self.steps * step_seconds * self.chips / HOUR


# Compiling


def published_presets() -> list[str]:
    """Returns the names of the published presets."""
    return [name for name in preset_names() if name not in OWN]


def measure_preset(name: str, tpu: str) -> Row:
    """Compiles the training step of a preset for the smallest slice of a TPU that it fits on.

    Args:
      name: A published preset.
      tpu: Kind of TPU, a key of `CHIPS`.

    Raises:
      UserError: If the TPU's compiler is not installed, or no slice is large enough.
    """
    config = config_tree.replace(preset(name), {"model.dtype": DType.BFLOAT16})
    for slice_name in topologies.slices(tpu):
        targets = topologies.devices(slice_name)
        if targets is None:
            raise UserError(
                "the TPU's compiler must be installed, got none. Run pip install 'jax[tpu]'."
            )
        for changes in meshes(config, len(targets)):
            changed = config_tree.replace(config, changes)
            built = _build(changed, targets)
            program = _compile_if_it_fits(built)
            if program is None:
                print(f"{name}: does not fit on {slice_name}", file=sys.stderr, flush=True)
                continue
            command = command_of(name, slice_name, changes)
            return _row(built, program, name=name, slice_name=slice_name, command=command)
    raise UserError(f"--tpu must have a slice that {name} fits on, got {tpu}. Pass another one.")


def _build(config: ExperimentConfig, targets: Sequence[Any]) -> Built:
    vocab_size = timing.vocab_size_of(config.data)
    return build(config, vocab_size=vocab_size, mesh=make_mesh(config.mesh, targets))


def _compile_if_it_fits(built: Built) -> Any:
    """Returns the compiled training step, or None if it needs more memory than a device has."""
    try:
        return compile_task(built, "training")
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise


def command_of(name: str, slice_name: str, changes: dict[str, Any]) -> str:
    """Returns the command that prints the numbers of a row."""
    words = ["python -m experiments.bench.estimate", f"--flagfile={name}"]
    words += ["--model.dtype=bfloat16", f"--topology={slice_name}", "--tasks=training"]
    for setting, value in changes.items():
        if setting == "mesh.data" or value == config_tree.get(ExperimentConfig(), setting):
            continue
        words.append(f"--{setting}={value}")
    return " ".join(words)


def _row(built: Built, program: Any, *, name: str, slice_name: str, command: str) -> Row:
    """Returns the row of a compiled training step."""
    config = built.config
    tpu = topologies.parse(slice_name).generation
    peaks = CHIPS[tpu].peaks
    cost = cost_of_task(built, "training", program)
    model_cost = flops.of_step(config, vocab_size=built.model.vocab_size, n_device=built.mesh.size)
    assert model_cost.flops is not None
    remat = built.remat.remat if built.remat is not None else config.model.remat
    return Row(
        **records.origin(command, records.describe_versions("jax", "libtpu")),
        preset=name,
        tpu=tpu,
        slice=slice_name,
        chips=built.mesh.size,
        remat=str(remat),
        parameters=built.num_parameters,
        steps=config.train.steps,
        training_flops=model_cost.flops * config.train.steps,
        peak_bytes=program.memory_analysis().peak_memory_in_bytes,
        memory_bytes=CHIPS[tpu].memory_bytes,
        matmul_seconds=cost.flops / peaks.flops,
        memory_seconds=cost.hbm_bytes / peaks.hbm_bytes,
        integer_seconds=cost.integer_ops / peaks.integer_ops,
        roofline_seconds=cost.roofline_seconds(peaks),
        sent_bytes=cost.sent_bytes,
        assumed_loops=len(cost.assumed_loops),
    )


# The file


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a file, or no rows if it does not exist."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="") as file:
        for values in csv.DictReader(file):
            typed: dict[str, Any] = {}
            for field in dataclasses.fields(Row):
                convert: Any = field.type
                typed[field.name] = convert(values[field.name])
            rows.append(Row(**typed))
    return rows


def add_row(path: Path, row: Row) -> None:
    """Adds a row to a file. Its fields are the columns."""
    cells = dataclasses.asdict(row)
    for column, value in cells.items():
        if isinstance(value, float):
            cells[column] = f"{value:.6g}"
    records.append(path, list(cells), [cells])


# The table

HEADINGS = (
    "preset",
    "parameters",
    "training FLOPs",
    "chips",
    "peak memory",
    "chip hours, at least",
    "by the roofline sum",
)


def table(rows: Iterable[Row], *, price: float | None) -> list[str]:
    """Returns the rows as lines of Markdown.

    Args:
      rows: The rows of one kind of TPU.
      price: Dollars per chip hour, or None for a table without cost.
    """
    headings = [*HEADINGS]
    if price is not None:
        headings.append(f"cost at ${price:.2f} per chip hour")
    lines = [_line(headings), _line(["---"] * len(headings))]
    for row in rows:
        bound = row.chip_hours(row.bound_seconds)
        roofline = row.chip_hours(row.roofline_seconds)
        cells = [
            f"`{row.preset}`",
            f"{row.parameters / 1e6:,.0f}M",
            _power_of_ten(row.training_flops),
            str(row.chips),
            f"{row.peak_bytes / 1e9:.1f} GB",
            two_digits(bound),
            two_digits(roofline),
        ]
        if price is not None:
            cells.append(f"{_dollars(price * bound)} to {_dollars(price * roofline)}")
        lines.append(_line(cells))
    return lines


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _power_of_ten(number: float) -> str:
    """Formats a large number as Markdown, such as "1.2e18"."""
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def _dollars(amount: float) -> str:
    return f"${amount:.2f}" if amount < 10 else f"${two_digits(amount)}"


def two_digits(number: float) -> str:
    """Formats a number with its two first digits, such as "1,900", "19", "1.9" or "0.19".

    Estimates have no more digits that mean something.
    """
    if number == 0:
        return "0"
    rounded = float(f"{number:.1e}")
    decimals = 1 - math.floor(math.log10(rounded))
    return f"{rounded:,.{max(decimals, 0)}f}"


# Commands


def measure_command(arguments: argparse.Namespace) -> None:
    """Compiles the presets that the file does not have, and adds their rows."""
    topologies.set_environment()
    present = {row.preset for row in read_rows(arguments.csv) if row.tpu == arguments.tpu}
    for name in arguments.presets or published_presets():
        if name in present:
            print(f"{arguments.csv} has {name} on {arguments.tpu}")
            continue
        row = measure_preset(name, arguments.tpu)
        add_row(arguments.csv, row)
        print(f"added to {arguments.csv}: {name} on {row.slice}", flush=True)


def table_command(arguments: argparse.Namespace) -> None:
    """Prints the table."""
    rows = [row for row in read_rows(arguments.csv) if row.tpu == arguments.tpu]
    rows.sort(key=lambda row: row.preset)
    print("\n".join(table(rows, price=arguments.price)))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    measure = commands.add_parser("measure", help="Compile presets and add their rows.")
    measure.set_defaults(command=measure_command)
    measure.add_argument("presets", nargs="*", help="Presets. Without any, all published ones.")
    printing = commands.add_parser("table", help="Print the rows as Markdown.")
    printing.set_defaults(command=table_command)
    printing.add_argument("--price", type=float, help="Dollars per chip hour.")
    tpus = [name for name, chip in CHIPS.items() if not chip.gpu]
    for command in (measure, printing):
        command.add_argument("--tpu", choices=tpus, default="v5e", help="Kind of TPU.")
        command.add_argument("--csv", type=Path, default=CSV, help="File of the rows.")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs one of the two commands, and returns the exit code."""
    arguments = make_parser().parse_args(words)
    try:
        arguments.command(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
