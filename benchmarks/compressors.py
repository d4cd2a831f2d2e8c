"""Compares the sizes of a text after experiments.compress and after other compressors.

    PROGRAM="python benchmarks/compressors.py"
    $PROGRAM split --workdir=runs/quickstart --out=python
    $PROGRAM others --text=python/test --train=python/train
    $PROGRAM model --text=python/test --workdir=runs/quickstart -- --streams=1

`split` writes the splits of a run's text as files. `others` compresses a file with gzip, bzip2, xz,
zstd and PPMd, alone and after the training text: what a compressor adds to the compressed training
text, and for zstd with the training text as a dictionary (--patch-from). `model` compresses the
file with a run's model, decompresses it in another process, and compares. Words after -- are flags
of experiments.compress. Rows are added to a CSV file.

gzip, bzip2, xz and zstd must be installed, and pyppmd (pip install pyppmd).
"""

import argparse
import csv
import datetime
import importlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from txl_jax.data.corpus import read_corpus
from txl_jax.runs.run import Run
from txl_jax.runtime.environment import device_kind

ROOT = Path(__file__).resolve().parents[1]
CSV = ROOT / "benchmarks" / "compression.csv"
COLUMNS = (
    "machine",
    "date",
    "versions",
    "text",
    "text bytes",
    "method",
    "after",
    "bytes",
    "bits per byte",
    "kB/s",
    "kB/s back",
    "command",
)
# Filters of standard input to standard output.
FILTERS = {
    "gzip -9": ["gzip", "-9"],
    "bzip2 -9": ["bzip2", "-9"],
    "xz -9e": ["xz", "-9e"],
    "zstd -22": ["zstd", "--ultra", "-22", "--long=27", "-q"],
}
PPMD_ORDERS = (8, 16)
# Enough memory that PPMd never discards its model.
PPMD_MEMORY = 1 << 30

# Compresses bytes.
Compressor = Callable[[bytes], bytes]


def main(words: Sequence[str] | None = None) -> None:
    """Runs one of the three commands."""
    arguments = _parser().parse_args(words)
    arguments.act(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    split = commands.add_parser("split", help="write the splits of a run's text as files")
    split.add_argument("--workdir", required=True, help="the run")
    split.add_argument("--out", type=Path, required=True, help="the directory of the files")
    split.set_defaults(act=write_splits)

    others = commands.add_parser("others", help="compress a file with other compressors")
    others.add_argument("--text", type=Path, required=True, help="the file")
    others.add_argument("--train", type=Path, required=True, help="the training text")
    others.add_argument("--csv", type=Path, default=CSV, help="where rows are added")
    others.set_defaults(act=measure_others)

    model = commands.add_parser("model", help="compress a file with experiments.compress")
    model.add_argument("--text", type=Path, required=True, help="the file")
    model.add_argument("--workdir", required=True, help="the run whose model compresses")
    model.add_argument("--csv", type=Path, default=CSV, help="where a row is added")
    model.add_argument("flags", nargs="*", help="flags of experiments.compress, after --")
    model.set_defaults(act=measure_model)
    return parser


def write_splits(arguments: argparse.Namespace) -> None:
    """Writes the files train, valid and test."""
    run = Run.read(arguments.workdir)
    with tempfile.TemporaryDirectory() as scratch:
        corpus = read_corpus(run.config.data, "", scratch, vocabulary=run.text.vocabulary)
        arguments.out.mkdir(parents=True)
        for name in ("train", "valid", "test"):
            text = corpus.vocabulary.decode(getattr(corpus, name))
            (arguments.out / name).write_bytes(text)


def measure_others(arguments: argparse.Namespace) -> None:
    """Adds two rows for each compressor: alone, and after the training text."""
    text = arguments.text.read_bytes()
    train = arguments.train.read_bytes()
    for method, compress in _compressors():
        before = time.perf_counter()
        alone = len(compress(text))
        seconds = time.perf_counter() - before
        _add_row(arguments, text, method, size=alone, seconds=seconds)
        if method == "zstd -22":
            after = _zstd_after(arguments.train, arguments.text)
        else:
            after = len(compress(train + text)) - len(compress(train))
        _add_row(arguments, text, method, size=after, after=str(arguments.train))


def _compressors() -> Iterator[tuple[str, Compressor]]:
    """Yields the other compressors by name."""

    def make_filter(command: list[str]) -> Compressor:
        def compress(text: bytes) -> bytes:
            return subprocess.run(command, input=text, stdout=subprocess.PIPE, check=True).stdout

        return compress

    def make_ppmd(order: int) -> Compressor:
        pyppmd = importlib.import_module("pyppmd")

        def compress(text: bytes) -> bytes:
            encoder = pyppmd.Ppmd7Encoder(order, PPMD_MEMORY)
            return encoder.encode(text) + encoder.flush()

        return compress

    for name, command in FILTERS.items():
        yield name, make_filter(command)
    for order in PPMD_ORDERS:
        yield f"PPMd order {order}", make_ppmd(order)


def _zstd_after(train: Path, text: Path) -> int:
    """Returns the bytes of zstd with the training text as a dictionary."""
    command = [*FILTERS["zstd -22"], f"--patch-from={train}", str(text), "-c"]
    return len(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measure_model(arguments: argparse.Namespace) -> None:
    """Adds a row for experiments.compress, unless the text does not come back."""
    text = arguments.text.read_bytes()
    program = [sys.executable, "-m", "experiments.compress"]
    model = f"--model={arguments.workdir}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "text.txl")
        again = Path(scratch, "text")
        command = [str(arguments.text), model, f"--out={file}", *arguments.flags]
        seconds = _seconds(subprocess.check_output([*program, *command], env=environment))
        command = ["--decompress", str(file), model, f"--out={again}"]
        seconds_back = _seconds(subprocess.check_output([*program, *command], env=environment))
        if again.read_bytes() != text:
            sys.exit(f"error: {arguments.text} did not come back")
        size = file.stat().st_size
    method = " ".join(["experiments.compress", *arguments.flags])
    _add_row(
        arguments,
        text,
        method,
        size=size,
        seconds=seconds,
        seconds_back=seconds_back,
        after=f"the training of {arguments.workdir}",
    )


def _seconds(output: bytes) -> float:
    """Returns the seconds of the coding itself, from the program's line of the result."""
    [line] = [line for line in output.decode().splitlines() if line.startswith("result ")]
    speed = float(line.split(", ")[-1].removesuffix(" kB/s"))
    n_bytes = float(line.split()[1].replace(",", ""))
    return n_bytes / 1000 / speed


def _add_row(
    arguments: argparse.Namespace,
    text: bytes,
    method: str,
    *,
    size: int,
    seconds: float | None = None,
    seconds_back: float | None = None,
    after: str = "",
) -> None:
    """Adds a row to the file, and prints it.

    Args:
      arguments: The command line.
      text: What was compressed.
      method: Name of the compressor.
      size: Compressed size in bytes.
      seconds: Duration of compressing, or None if it was not measured.
      seconds_back: Duration of decompressing, or None if it was not measured.
      after: What the compressor had read before, or "" for nothing.
    """
    bits_per_byte = f"{8 * size / len(text):.3f}"
    origin = {
        "machine": device_kind(),
        "date": datetime.date.today().isoformat(),
        "versions": f"jax {importlib.metadata.version('jax')}",
        "command": " ".join(["python", "benchmarks/compressors.py", *sys.argv[1:]]),
    }
    result = {
        "text": str(arguments.text),
        "text bytes": len(text),
        "method": method,
        "after": after,
        "bytes": size,
        "bits per byte": bits_per_byte,
        "kB/s": _speed(text, seconds),
        "kB/s back": _speed(text, seconds_back),
    }
    is_new = not arguments.csv.exists()
    with open(arguments.csv, "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(origin | result)

    place = f"after {after}" if after else "alone"
    print(f"{method:40} {place:40} {size:>10,}  {bits_per_byte}", flush=True)


def _speed(text: bytes, seconds: float | None) -> str:
    """Returns kB/s, or an empty cell if the duration was not measured."""
    if seconds is None:
        return ""
    return f"{len(text) / 1000 / seconds:.3g}"


if __name__ == "__main__":
    main()
