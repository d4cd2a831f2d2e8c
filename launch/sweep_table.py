"""The results of a sweep's runs as one table, read from their folders."""

import csv
import fcntl
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.sweep_file import Run, Sweep
from txl_jax.config import tree as config_tree
from txl_jax.metrics import Totals
from txl_jax.runtime.environment import duration
from txl_jax.runtime.files import write_json

_ENDED = "sweep.json"  # The exit code of a run's last process, and the seconds of all of them.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def note_end(run: Run, *, seconds: float, code: int) -> None:
    """Records the end of a run's process: its exit code, and its time added to that of earlier ones."""
    write_json(run.folder / _ENDED, {"seconds": _ended(run).get("seconds", 0.0) + seconds, "exit_code": code})


def write(sweep: Sweep, out: Path) -> int:
    """Prints the table and writes results.csv; returns the exit code: 1 if a run has failed."""
    rows = [_row(sweep, run) for run in sweep.runs]
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["run", *sweep.names, *_MEASURED, "state"], restval="")
        writer.writeheader()
        writer.writerows(rows)
    print()
    for line in _markdown(sweep, rows):
        print(line)
    print(f"\nresults   {out / 'results.csv'}", flush=True)
    return int(any(row["state"].startswith("failed") for row in rows))


def state_of(run: Run) -> str:
    """Returns the state of a run: not started, running, stopped, failed or finished."""
    if run.results is not None:
        return "finished"
    step = max(_saved_steps(run), default=0)
    if is_running(run):
        return f"running, saved after step {step}"
    code = _ended(run).get("exit_code", 0)
    if code and code not in [sign for number in _STOP_SIGNALS for sign in (-number, 128 + number)]:
        return f"failed: {_failure(run, code)}"
    return f"stopped after step {step}" if (run.folder / "sweep.log").exists() or step else "not started"


_MEASURED = ("best_valid", "test", "measure", "steps", "seconds")


def _row(sweep: Sweep, run: Run) -> dict[str, Any]:
    """A line of results.csv."""
    in_effect = config_tree.to_dict(run.config) | dict(run.differs)
    row = {"run": run.name, **{name: in_effect.get(name, "") for name in sweep.names}, "state": state_of(run)}
    if seconds := _ended(run).get("seconds"):
        row["seconds"] = round(seconds, 1)
    results = run.results
    if results is None:
        return row
    measure = run.workdir.load()[1].vocabulary.measure
    scores = {"best_valid": results["best_valid"], "test": results["test"]}
    values = {name: Totals(score["loss"], 1).value(measure) for name, score in scores.items() if score}
    return row | values | {"measure": str(measure), "steps": results["steps"]}


def _markdown(sweep: Sweep, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows as a Markdown table."""
    columns = ["run", *sweep.names, "best valid", "test", "steps", "time", "state"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        cells = [row["run"], *(row[name] for name in sweep.names)]
        cells += [_score(row, "best_valid"), _score(row, "test"), row.get("steps", "")]
        cells += [duration(row["seconds"]) if "seconds" in row else "", row["state"]]
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _score(row: dict[str, Any], name: str) -> str:
    digits = 2 if row.get("measure") == "ppl" else 4
    return f"{row['measure']} {row[name]:.{digits}f}" if name in row else ""


def _ended(run: Run) -> dict[str, Any]:
    try:
        return json.loads((run.folder / _ENDED).read_text())
    except (FileNotFoundError, ValueError):  # Without it the table lacks a number; no run needs it.
        return {}


def _saved_steps(run: Run) -> list[int]:
    return [int(path.name) for path in run.workdir.latest.glob("*") if path.name.isdigit()]


def is_running(run: Run) -> bool:
    """Returns whether a process is training in the folder, here or on a host that shares the file system's locks."""
    try:
        with open(run.folder / ".lock") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _failure(run: Run, code: int) -> str:
    """The last line that the run printed, or the signal that killed it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = (run.folder / "sweep.log").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")[:300]
