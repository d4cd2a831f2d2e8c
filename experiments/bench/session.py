"""Measures the claims of `experiments.bench.estimate` on a device, in a few minutes.

    python -m experiments.bench.session --minutes=5               # Rerun to continue.
    python -m experiments.bench.session --miniature --minutes=5   # Small sizes, on a CPU.

Time on an accelerator is expensive, and it may end at any moment. This command therefore measures
in parts, the most informative first. Each part runs in a separate process with a limit in seconds.
If a part fails, hangs or runs out of memory, this is noted and the next part starts. Results are
written after each part. The command does not start a part whose limit exceeds the rest of
--minutes, and lists the remaining parts. Rerun it to measure them.

The page (session.md in --out) shows the device's own peaks (a large matmul, a large copy), whole
training steps and generated tokens, each with the time that its compiled program needs for its
bytes and operations, and where the time of a step goes, by operation. Please attach it to a report
about speed.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from typing import IO, Any

import jax

from experiments.bench import session_parts, timing
from experiments.bench.session_parts import PARTS, Part
from txl_jax import cli
from txl_jax.config.config_tree import require, setting
from txl_jax.errors import one_line
from txl_jax.runtime import environment, storage

_NAMES = tuple(part.name for part in PARTS)
_LAST_LINES = 12  # Of a failed part's output, for the page.


@dataclasses.dataclass(frozen=True)
class Plan(cli.Plan):
    """Settings of the session."""

    minutes: float = setting(
        5.0, "Minutes that this command may take. Rerun it to measure the remaining parts."
    )
    parts: tuple[str, ...] = setting(
        (), f"Parts to measure, separated by commas ({', '.join(_NAMES)}). If empty, all."
    )
    miniature: bool = setting(
        False, "Measure the same parts with small sizes, to try this command on a CPU."
    )
    again: bool = setting(
        False, "Repeat parts that were measured, have failed or have reached their limit."
    )
    out: str = setting(
        "session", "Directory for session.md and the parts' results. Created if missing.", path=True
    )
    inside: str | None = setting(
        None, "Measure this part in this process, without a limit. The command itself passes it."
    )

    def validate(self) -> None:
        """Raises `UserError` if a part is unknown, or --minutes is too short for a part."""
        super().validate()
        for name in (*self.parts, self.inside):
            require(
                name is None or name in _NAMES,
                f"parts must be of {', '.join(_NAMES)}, got {name!r}",
            )
        # A part with a longer limit would never start.
        longest = max(part.limit for part in self.chosen_parts) / 60
        require(
            self.minutes >= longest,
            f"minutes must be at least {longest:.3g}, the longest limit of the chosen parts, got "
            f"{self.minutes}",
        )

    @property
    def folder(self) -> str:
        """Directory of the results. Results in miniature have a separate directory."""
        return os.path.join(self.out, "miniature") if self.miniature else self.out

    @property
    def chosen_parts(self) -> list[Part]:
        """Parts to measure, in order of importance."""
        return [part for part in PARTS if part.name in (self.parts or _NAMES)]


def run(plan: Plan, job: cli.Job) -> int:
    """Measures the remaining parts, each in a separate process, and writes the page.

    This process itself never uses the device, because the parts need its memory. Returns 1 if a
    part has failed, otherwise 0.
    """
    del job  # The parts choose their own configurations.
    storage.make_folder(plan.folder)
    if plan.inside is not None:
        _measure_here(plan, plan.inside)
        return 0

    end = time.monotonic() + 60 * plan.minutes
    left_out = []
    failed = []
    for part in plan.chosen_parts:
        if _read_result(plan, part.name) is not None and not plan.again:
            continue
        # Reserve a second for this command itself.
        if time.monotonic() + part.limit > end + 1:
            left_out.append(part)
            continue
        print(f"{part.name:<24}{part.about} (at most {part.limit} s)", flush=True)
        result = _measure_in_process(plan, part)
        # The part has written its result itself, unless it failed.
        _write_result(plan, part.name, result)
        _write_page(plan)
        if "failure" in result:
            failed.append(part)
        outcome = result.get("failure") or f"was measured in {result['seconds']:.0f} s"
        print(f"{'':<24}It {outcome}.", flush=True)

    page = _write_page(plan)
    print(f"\n{page}\n\npage      {_page_path(plan)}")
    if failed:
        names = ",".join(part.name for part in failed)
        print(
            f"failed    {names}. Each has a log next to the page. --again --parts={names} retries."
        )
    if left_out:
        names = ",".join(part.name for part in left_out)
        advice = f"--again --parts={names} measures them." if plan.again else "Run it again."
        print(f"left      {names}. {advice}")
    return 1 if failed else 0


def _measure_here(plan: Plan, name: str) -> None:
    """Measures one part in this process and writes its result."""
    require(
        plan.miniature or jax.default_backend() != "cpu",
        "a session must run on an accelerator, got a CPU. Pass --miniature to try it on a CPU.",
    )
    part = next(part for part in PARTS if part.name == name)
    start = time.monotonic()
    tables = part.measure(session_parts.Sizes(plan.miniature), plan.folder)
    result = {
        "machine": timing.machine(),
        "tables": [dataclasses.asdict(table) for table in tables],
        "seconds": time.monotonic() - start,
    }
    _write_result(plan, name, result)


def _measure_in_process(plan: Plan, part: Part) -> dict[str, Any]:
    """Measures a part in a separate process.

    Returns its result: always "seconds", and, if it has failed, "failure" (such as "failed with
    exit code 1") instead of its tables.
    """
    # The result of an earlier command must not be mistaken for this one's.
    path = _result_path(plan, part.name)
    if os.path.exists(path):
        os.remove(path)
    command = [sys.executable, "-m", "experiments.bench.session", f"--inside={part.name}"]
    command.append(f"--out={plan.out}")
    if plan.miniature:
        command.append("--miniature")
    if plan.compilation_cache is not None:
        command.append(f"--compilation_cache={plan.compilation_cache}")

    start = time.monotonic()
    log_path = os.path.join(plan.folder, f"{part.name}.log")
    with open(log_path, "wb") as log:
        failure = _run_alone(command, log, part.limit)
    result = None if failure else _read_result(plan, part.name)
    if result is not None:
        return result
    with open(log_path, encoding="utf-8", errors="replace") as log:
        last_lines = [one_line(line) for line in log.read().splitlines()[-_LAST_LINES:]]
    return {
        "failure": failure or "ended without a result",
        "output": last_lines,
        "seconds": time.monotonic() - start,
    }


def _run_alone(command: list[str], log: IO[bytes], limit: float) -> str:
    """Runs a command with a limit in seconds. Returns why it failed, or an empty string.

    When this function returns, no process of the command is left, because a process that still
    holds the device's memory would spoil the next part.
    """
    process = subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"did not end within its {limit} s"
    finally:
        # The command leads a process group, and some of its processes may outlive it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "" if code == 0 else f"failed with exit code {code}"


def _result_path(plan: Plan, name: str) -> str:
    return os.path.join(plan.folder, f"{name}.json")


def _page_path(plan: Plan) -> str:
    return os.path.join(plan.folder, "session.md")


def _write_result(plan: Plan, name: str, result: dict[str, Any]) -> None:
    storage.write(_result_path(plan, name), json.dumps(result, indent=1).encode())


def _read_result(plan: Plan, name: str) -> dict[str, Any] | None:
    """Returns a part's result, or None if its file is missing or unreadable."""
    try:
        with open(_result_path(plan, name), "rb") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _write_page(plan: Plan) -> str:
    """Writes the page of all results so far, and returns it."""
    results = {}
    for part in PARTS:
        result = _read_result(plan, part.name)
        if result is not None:
            results[part] = result
    lines = ["# Measured and estimated"]
    machines = {result["machine"] for result in results.values() if "machine" in result}
    for machine in sorted(machines):
        lines += ["", machine]
    lines += ["", session_parts.LEGEND]
    if plan.miniature:
        lines += ["", "**In miniature: these numbers say nothing about the model or the device.**"]
    for part, result in results.items():
        lines += ["", f"## {part.name}: {part.about}", ""]
        if "failure" in result:
            lines += [f"It {result['failure']}.", "", *(f"    {line}" for line in result["output"])]
            continue
        for table in result["tables"]:
            lines += [*environment.table(table["columns"], table["rows"]), ""]
        lines.append(f"{result['seconds']:.0f} s with compilation")
    missing = [part.name for part in PARTS if part not in results]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}"]
    page = "\n".join(lines)
    storage.write(_page_path(plan), f"{page}\n".encode())
    return page


if __name__ == "__main__":
    cli.main(run, Plan)
