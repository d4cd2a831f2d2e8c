"""Measures what a long sequence costs, and how far back a model finds a repeat.

    python -m benchmarks.long_sequences cost stream 1048576
    python -m benchmarks.long_sequences cost window 16384
    python -m benchmarks.long_sequences table
    python -m benchmarks.long_sequences repeats runs/genome --fasta=genome.fa --bed=repeats.bed

`cost` scores a random sequence with a small model in one of three ways, and adds a row to a CSV
file: the memory by the compiler, and the measured processor time, which is summed over the cores,
because other programs change it less than wall time. All three call the same module.

- `stream` reads segments, and passes the memory from each to the next.
- `window` reads the whole sequence as one segment without memory, with attention in tiles.
- `stored` is `window` with attention that stores all scores.

With --compile_only, the sequence is not scored, because it is too long for this machine or for your
patience. Then the row has no time. `table` prints the rows as Markdown.

`repeats` scores one record of a FASTA file in a stream, with a model that was trained on others. A
BED file says where the second copy of each repeat begins and ends, and how far back its first copy
lies. It adds a row for each interval of distances to another CSV file: the mean bits per symbol in
second copies. Symbols near the beginning of a copy do not count, since no model can know yet that
it is one. docs/sequences.md makes both files.
"""

import argparse
import csv
import dataclasses
import itertools
import math
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import txl_jax
from benchmarks import records
from txl_jax import LanguageModel, Memory, ModelConfig, NormPlace, TransformerXL
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.ops.attention import AttentionPaths

CSV = Path(__file__).with_name("long_sequences.csv")
REPEATS_CSV = Path(__file__).with_name("long_sequences_repeats.csv")

# A, C, G, T and N.
SYMBOLS = 5
# Sizes of the model of docs/sequences.md.
MODEL = ModelConfig(
    n_layer=2, d_model=128, n_head=4, d_head=32, d_inner=512, layer_norm=NormPlace.PRE
)
# Implementation of attention for each way to read a sequence.
ATTENTION = {"stream": "tiled", "window": "tiled", "stored": "reference"}
# How a table calls the ways.
HEADINGS = {
    "stream": "stream",
    "window": "window in tiles",
    "stored": "window, all scores",
}

# Symbols at the beginning of a second copy that do not count. 12 random symbols of four kinds occur
# by chance in one of 16 million places.
UNSCORED = 12
# Limits of the intervals of distances. Each has one of the periods of docs/sequences.md.
DISTANCES = (1, 128, 256, 384, 512, 2048)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Memory and time of one sequence. The fields are the columns of the file."""

    machine: str
    date: str
    versions: str
    command: str
    # A key of `ATTENTION`.
    method: str
    tokens: int
    # Tokens per segment, and tokens of memory.
    segment_len: int
    mem_len: int
    # Of the compiled function that reads a segment: parameters, tokens, memory, results, temporary
    # arrays.
    peak_bytes: int
    # Time of a CPU, summed over cores, of reading the whole sequence: the least of some runs,
    # without compilation. Empty if it did not run.
    processor_seconds: float | str


@dataclasses.dataclass(frozen=True)
class RepeatRow:
    """Bits in second copies at some distances. The fields are the columns of the file."""

    machine: str
    date: str
    versions: str
    command: str
    n_layer: int
    mem_len: int
    # Distances from `nearest` to `farthest` - 1.
    nearest: int
    farthest: int
    repeats: int
    symbols: int
    # Mean over all scored symbols.
    bits: float
    # Standard error of the mean of the repeats' means.
    standard_error: float


class Repeat(NamedTuple):
    """Second copy of a repeat."""

    start: int
    end: int  # Exclusive.
    distance: int  # From the second copy back to the first, in symbols.


# Cost


def read_segment(
    model: TransformerXL, params: Any, tokens: jax.Array, targets: jax.Array, memory: Memory
) -> tuple[jax.Array, Memory]:
    """Scores a segment.

    Args:
      model: The module.
      params: Its parameters.
      tokens: int32 [1, L].
      targets: int32 [1, L], the token after each token, or -1 if it is not scored.
      memory: The memory before the segment.

    Returns:
      The summed loss in nats, and the memory after the segment.
    """
    variables = {"params": params}
    # Without mutable collections, `apply` returns only what the module does.
    result: Any = model.apply(variables, tokens, memory)
    hidden, memory = result
    nats: Any = model.apply(variables, hidden, targets, method=model.nll)
    return nats.sum(), memory


class Reader:
    """Reads sequences in segments of one length, with one compiled function."""

    def __init__(self, config: ModelConfig, method: str, *, segment_len: int, mem_len: int):
        """Compiles the function. Its parameters are random.

        Args:
          config: The model's sizes.
          method: A key of `ATTENTION`.
          segment_len: L.
          mem_len: M. 0 means that segments are independent.
        """
        attention = ATTENTION[method]
        paths = AttentionPaths(training=attention, cached=attention)
        self._model = TransformerXL(config, SYMBOLS, attention=paths)
        self._segment_len = segment_len
        self._memory = self._model.init_memory(batch_size=1, mem_len=mem_len)
        # Parameters do not depend on lengths.
        first = jnp.zeros((1, 1), jnp.int32)
        no_memory = self._model.init_memory(batch_size=1, mem_len=0)
        self._params = self._model.init(jax.random.key(0), first, no_memory)["params"]

        def read(*arguments: Any) -> tuple[jax.Array, Memory]:
            return read_segment(self._model, *arguments)

        shape = jax.ShapeDtypeStruct((1, segment_len), jnp.int32)
        lowered = jax.jit(read).lower(self._params, shape, shape, self._memory)
        self._compiled = lowered.compile()

    @property
    def peak_bytes(self) -> int:
        """Bytes of the compiled function's arguments, results and temporary arrays.

        The compiler's own peak does not include temporary arrays on a CPU.
        """
        sizes = self._compiled.memory_analysis()
        assert sizes is not None  # Some backends do not have an analysis.
        return int(
            sizes.argument_size_in_bytes
            + sizes.output_size_in_bytes
            + sizes.temp_size_in_bytes
            - sizes.alias_size_in_bytes
        )

    def nats(self, sequence: np.ndarray) -> float:
        """Returns the summed loss of all symbols of a sequence, ids [T], except the first.

        T must be a multiple of the segment length.
        """
        targets = np.append(sequence[1:], -1)
        memory = self._memory
        losses = []
        for start in range(0, len(sequence), self._segment_len):
            segment = slice(start, start + self._segment_len)
            inputs = np.asarray(sequence[None, segment], np.int32)
            outputs = np.asarray(targets[None, segment], np.int32)
            nats, memory = self._compiled(self._params, inputs, outputs, memory)
            losses.append(nats)
        return math.fsum(map(float, losses))


def measure_cost(
    method: str, tokens: int, *, segment_len: int, mem_len: int, calls: int, command: str
) -> Cost:
    """Compiles the reading of a sequence, and reads it `calls` times. 0 means only to compile.

    Raises:
      UserError: If the sequence is not a whole number of segments.
    """
    if method != "stream":
        segment_len = tokens
        mem_len = 0
    if tokens % segment_len:
        raise UserError(f"tokens must be a multiple of {segment_len}, got {tokens}. Change them.")
    reader = Reader(MODEL, method, segment_len=segment_len, mem_len=mem_len)

    seconds: float | str = ""
    if calls:
        sequence = np.random.default_rng(0).integers(0, SYMBOLS, tokens)
        durations = []
        for _ in range(calls):
            began = time.process_time()
            reader.nats(sequence)
            durations.append(time.process_time() - began)
        seconds = min(durations)
    return Cost(
        **records.origin(command, records.describe_versions("jax")),
        method=method,
        tokens=tokens,
        segment_len=segment_len,
        mem_len=mem_len,
        peak_bytes=reader.peak_bytes,
        processor_seconds=seconds,
    )


# Repeats


def read_fasta(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the ids, uint8 [T], of each record of a FASTA file.

    A, C, G and T, in upper or lower case, are 0 to 3. All other symbols are 4.

    Raises:
      UserError: If the file does not begin with a header, such as a compressed file.
    """
    codes = np.full(256, 4, np.uint8)
    codes[list(b"ACGT")] = range(4)
    codes[list(b"acgt")] = range(4)
    name = ""
    lines: list[bytes] = []
    with path.open("rb") as file:
        if file.read(1) != b">":
            raise UserError(f"{path} must begin with '>', as FASTA files do. Decompress it first.")
        file.seek(0)
        for line in itertools.chain(file, [b">"]):  # A last header ends the last record.
            if not line.startswith(b">"):
                lines.append(line.strip())
                continue
            if lines:
                yield name, codes[np.frombuffer(b"".join(lines), np.uint8)]
            # The name ends at the first white space. A description follows.
            name = (line[1:].decode().split() or [""])[0]
            lines = []


def read_bed(path: Path, record: str) -> list[Repeat]:
    """Returns the repeats of one record with symbols that are scored.

    The fourth column of the BED file is the distance.

    Raises:
      UserError: If a line does not have these columns.
    """
    repeats = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        columns = line.split()
        if not columns or columns[0] != record:
            continue
        try:
            repeat = Repeat(*map(int, columns[1:4]))
        except (TypeError, ValueError):
            raise UserError(
                f"{path}, line {number} must have a name, a start, an end and a distance, got "
                f"{line!r}. Correct it."
            ) from None
        if repeat.end - repeat.start > UNSCORED:
            repeats.append(repeat)
    return repeats


def bits_of_repeats(nats: np.ndarray, repeats: Iterable[Repeat]) -> list[np.ndarray]:
    """Returns the bits of each repeat's scored symbols.

    Args:
      nats: Floats [T - 1], the losses of all symbols of the record except the first.
      repeats: Second copies. The first `UNSCORED` symbols of each do not count.
    """
    bits = nats / math.log(2)
    # The loss of symbol t is at t - 1.
    return [bits[repeat.start + UNSCORED - 1 : repeat.end - 1] for repeat in repeats]


def repeat_rows(
    nats: np.ndarray, repeats: Sequence[Repeat], *, limits: Sequence[int], **columns: Any
) -> list[RepeatRow]:
    """Returns a row for each interval of distances that has at least two repeats.

    Args:
      nats: Floats [T - 1], the losses of all symbols of the record except the first.
      repeats: Second copies.
      limits: Limits of the intervals, in rising order.
      columns: The rows' other columns.
    """
    rows = []
    for nearest, farthest in itertools.pairwise(limits):
        group = [repeat for repeat in repeats if nearest <= repeat.distance < farthest]
        if len(group) < 2:
            continue

        bits = bits_of_repeats(nats, group)
        bits_of_symbols = np.concatenate(bits)
        means = [copy.mean() for copy in bits]
        standard_error = np.std(means, ddof=1) / math.sqrt(len(means))
        row = RepeatRow(
            **columns,
            nearest=nearest,
            farthest=farthest,
            repeats=len(group),
            symbols=len(bits_of_symbols),
            bits=float(bits_of_symbols.mean()),
            standard_error=float(standard_error),
        )
        rows.append(row)
    return rows


def with_mem_len(model: LanguageModel, mem_len: int) -> LanguageModel:
    """Returns the same model with another memory length in evaluation."""
    config = config_tree.replace(model.config, {"eval.mem_len": mem_len})
    components = dataclasses.replace(model.components, config=config)
    return dataclasses.replace(model, components=components)


# The files


def add_rows(path: Path, rows: Sequence[Cost] | Sequence[RepeatRow]) -> None:
    """Adds rows of one kind to a file. Their fields are its columns."""
    formatted = []
    for row in rows:
        cells = dataclasses.asdict(row)
        for column, value in cells.items():
            if isinstance(value, float):
                cells[column] = f"{value:.4g}"
        formatted.append(cells)
    records.append(path, list(formatted[0]), formatted)


# Commands


def cost_command(arguments: argparse.Namespace, command: str) -> None:
    """Measures one sequence, and adds its row."""
    cost = measure_cost(
        arguments.method,
        arguments.tokens,
        segment_len=arguments.segment_len,
        mem_len=arguments.mem_len,
        calls=0 if arguments.compile_only else arguments.calls,
        command=command,
    )
    add_rows(arguments.csv, [cost])
    seconds = cost.processor_seconds
    time_text = "compiled only" if seconds == "" else f"{seconds:.3g} s of processor time"
    print(f"{cost.method}, {cost.tokens:,} tokens: {cost.peak_bytes / 1e6:,.1f} MB, {time_text}")


def repeats_command(arguments: argparse.Namespace, command: str) -> None:
    """Scores a record, and adds a row for each interval of distances.

    Raises:
      UserError: If the FASTA file does not have the record.
    """
    sequences = dict(read_fasta(arguments.fasta))
    if arguments.record not in sequences:
        raise UserError(
            f"--record must be one of {', '.join(sequences)}, got {arguments.record}. Change it."
        )
    ids = sequences[arguments.record][: arguments.symbols]
    model = txl_jax.load(arguments.workdir)
    if arguments.mem_len is not None:
        model = with_mem_len(model, arguments.mem_len)

    began = time.perf_counter()
    [nats] = model.score([ids], per_token=True, batch_size=1)
    print(f"{len(ids):,} symbols in {time.perf_counter() - began:.3g} s")

    repeats = read_bed(arguments.bed, arguments.record)
    rows = repeat_rows(
        nats,
        [repeat for repeat in repeats if repeat.end <= len(ids)],
        limits=DISTANCES,
        **records.origin(command, records.describe_versions("jax")),
        n_layer=model.config.model.n_layer,
        mem_len=model.config.eval.mem_len,
    )
    if not rows:
        raise UserError(
            f"{arguments.bed} must have two repeats of {arguments.record} at similar distances, "
            f"within its first {len(ids):,} symbols. Pass other files."
        )
    add_rows(arguments.csv, rows)
    for row in rows:
        print(
            f"distance {row.nearest:,} to {row.farthest - 1:,}: {row.bits:.3f} bits per symbol, "
            f"standard error {row.standard_error:.3f}, {row.repeats:,} repeats"
        )


def table(rows: Iterable[dict[str, str]]) -> list[str]:
    """Returns the rows of the file of costs as lines of Markdown, one for each length.

    A cell is empty if the file has no row or no time for it. Memory is in megabytes of 10^6 bytes.
    """
    megabytes = {}
    seconds = {}
    for row in rows:
        key = (row["method"], int(row["tokens"]))
        megabytes[key] = f"{int(row['peak_bytes']) / 1e6:,.0f}"
        if row["processor_seconds"]:
            number = float(row["processor_seconds"])
            seconds[key] = f"{number:.0f}" if number >= 10 else f"{number:.2g}"

    headings = ["tokens"]
    for name in HEADINGS.values():
        headings += [f"{name}, MB", f"{name}, s"]
    lines = [headings, ["---"] * len(headings)]
    for tokens in sorted({tokens for _, tokens in megabytes}):
        line = [f"{tokens:,}"]
        for method in HEADINGS:
            line.append(megabytes.get((method, tokens), ""))
            line.append(seconds.get((method, tokens), ""))
        lines.append(line)
    return [f"| {' | '.join(line)} |" for line in lines]


def table_command(arguments: argparse.Namespace, command: str) -> None:
    """Prints the table of costs."""
    del command
    with arguments.csv.open(newline="") as file:
        print("\n".join(table(csv.DictReader(file))))


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    cost = commands.add_parser("cost", help="Measure memory and time of one sequence.")
    cost.set_defaults(run=cost_command)
    cost.add_argument("method", choices=list(ATTENTION), help="How the sequence is read.")
    cost.add_argument("tokens", type=int, help="Length of the sequence.")
    cost.add_argument("--segment_len", type=int, default=512, help="Tokens per segment (stream).")
    cost.add_argument("--mem_len", type=int, default=512, help="Tokens of memory (stream).")
    cost.add_argument("--calls", type=int, default=3, help="Runs. The least time counts.")
    cost.add_argument("--compile_only", action="store_true", help="Do not score the sequence.")
    cost.add_argument("--csv", type=Path, default=CSV, help="File of the rows.")

    printing = commands.add_parser("table", help="Print costs as Markdown.")
    printing.set_defaults(run=table_command)
    printing.add_argument("--csv", type=Path, default=CSV, help="File of the rows.")

    repeats = commands.add_parser("repeats", help="Measure bits in repeats by their distance.")
    repeats.set_defaults(run=repeats_command)
    repeats.add_argument("workdir", help="Run of the trained model.")
    repeats.add_argument("--fasta", type=Path, default=Path("genome.fa"), help="Sequences.")
    repeats.add_argument("--bed", type=Path, default=Path("repeats.bed"), help="Second copies.")
    repeats.add_argument("--record", default="chr3", help="Record to score.")
    repeats.add_argument("--symbols", type=int, help="Score only so many. Default: all.")
    repeats.add_argument("--mem_len", type=int, help="Tokens of memory. Default: the run's.")
    repeats.add_argument("--csv", type=Path, default=REPEATS_CSV, help="File of the rows.")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs one of the commands, and returns the exit code."""
    if words is None:
        words = sys.argv[1:]
    arguments = make_parser().parse_args(words)
    command = f"python -m benchmarks.long_sequences {shlex.join(words)}"
    try:
        arguments.run(arguments, command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
