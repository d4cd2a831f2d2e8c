"""The implementations of attention compiled for devices that are not at hand: memory, bytes moved, arrays written.

Each program is compiled in a process of its own, as a compiler may crash: libtpu 0.0.42.1 does on some references with
dropout (a stack overflow).
"""

import concurrent.futures
import dataclasses
import datetime
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from txl_jax.bench import memory_traffic, topologies
from txl_jax.bench.attention_cases import Case, abstract_inputs, find_implementation, has_positions, make_function
from txl_jax.bench.output import Log
from txl_jax.errors import UserError
from txl_jax.runtime import environment

_HEAD = "| configuration | task | rows x heads x queries x keys, width | device |"


def run(
    cases: Sequence[Case], given: Sequence[str], paths: Sequence[str], log: Log
) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Compiles the paths of each case for the first device of each topology; prints a table.

    Args:
      cases: sizes.
      given: topologies.
      paths: "reference", "tiled", "fused", "plain"; others are left out.
      log: called with each line.

    Returns:
      versions, and a record per row.

    Raises:
      UserError: a compiler is not installed.
    """
    versions = {"jax": jax.__version__}
    for topology in given:
        if missing := topologies.missing_compiler(topology):
            raise UserError(f"--topology={topology} needs its compiler and {missing}")
        versions |= topologies.compiler_versions(topology)
    versions |= {"date": datetime.date.today().isoformat()}
    log(", ".join(f"{name} {value}" for name, value in versions.items()))
    paths = [path for path in paths if path != "cudnn"]
    log(f"\n{_HEAD} {' | '.join(paths)} |\n|{'---|' * (4 + len(paths))}")
    records = []
    with _Workers() as workers:
        for case in cases:
            for topology in given:
                row = [workers.compile(case, path, topology) for path in paths]
                records += row
                log(format_row(row))
    for line in format_verdicts(records):
        log(line)
    return versions, records


def compile_case(case: Case, path: str, topology: str) -> dict[str, Any]:
    """Compiles one path of a case for the first device of a topology; returns the row's record."""
    found = topologies.devices(topologies.smallest(topology))
    assert found is not None, "checked before"
    device = found[0]
    record: dict[str, Any] = {**dataclasses.asdict(case), "shape": case.shape, "topology": topology, "path": path}
    implementation, reason = find_implementation(case, path, device.platform, device.device_kind)
    if implementation is None:
        return record | {"refused": reason}
    record |= {"implementation": str(implementation), "refused": None}
    start = time.monotonic()
    function = make_function(case, implementation, positions=has_positions(path))
    try:
        compiled = topologies.lower_for(device, function, abstract_inputs(case)).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        return record | {"refused": f"the compiler: {str(error).partition(chr(10))[0][:300]}"}
    written = max(memory_traffic.arrays_written(compiled.as_text()), key=lambda array: array.size)
    return record | {
        "scratch_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "bytes_accessed": memory_traffic.bytes_of_program(compiled),
        "scores_written": str(written) if written.size >= case.scores_size else None,
        "compile_seconds": time.monotonic() - start,
    }


def format_row(records: Sequence[Mapping[str, Any]]) -> str:
    """Formats the table row of a case on a device from the records of its paths."""
    first = records[0]
    reference = next((each for each in records if each["path"] == "reference"), {})
    cells = [_format_path(each, reference.get("bytes_accessed")) for each in records]
    return f"| {' | '.join([first['config'], first['task'], first['shape'], first['topology'], *cells])} |"


def _format_path(record: Mapping[str, Any], bytes_of_reference: float | None) -> str:
    """Formats scratch, bytes, the ratio of the reference's bytes to them, and what the path is."""
    if record.get("refused"):
        return str(record["refused"])
    n_bytes, name = record["bytes_accessed"], record["implementation"]
    cell = f"{environment.megabytes(record['scratch_bytes'])}, {environment.megabytes(n_bytes)}"
    if record["path"] == "reference":
        return cell
    ratio = "" if bytes_of_reference is None else f" (1/{bytes_of_reference / n_bytes:.2g})"
    scores = "" if record["scores_written"] is None else f", writes {record['scores_written']}"
    return f"{cell}{ratio}: {name.removeprefix('fused ')}{scores}"


def format_verdicts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names which paths write an array with a score for each pair, and which do not."""
    lines = []
    compiled = [record for record in records if "scratch_bytes" in record]
    for path in dict.fromkeys(record["path"] for record in compiled):
        of_path = [record for record in compiled if record["path"] == path]
        with_scores = [record for record in of_path if record["scores_written"]]
        named = sorted({f"{each['config']} {each['task']} on {each['topology']}" for each in with_scores})
        where = "" if len(with_scores) in (0, len(of_path)) else f": {', '.join(named)}"
        lines.append(
            f"{path}: {len(with_scores)} of {len(of_path)} programs write an array of rows x heads x queries x keys"
            f"{where}"
        )
    return ["", *lines]


class _Workers:
    """A process that compiles, and another one after a crash."""

    def __enter__(self) -> "_Workers":
        self._pool = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def compile(self, case: Case, path: str, topology: str) -> dict[str, Any]:
        """Runs `compile_case` in the process; a record with the crash if there is one."""
        try:
            return self._pool.submit(compile_case, case, path, topology).result()
        except concurrent.futures.process.BrokenProcessPool:
            self._pool = self._start()
            facts = {**dataclasses.asdict(case), "shape": case.shape, "topology": topology, "path": path}
            return facts | {"refused": "the compiler crashed"}

    @staticmethod
    def _start() -> concurrent.futures.ProcessPoolExecutor:
        return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
