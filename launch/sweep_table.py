"""The results of a sweep's runs as one table, read from their folders."""

import csv
import fcntl
import io
import json
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from launch import sweep_means
from launch.sweep_file import Run, Sweep
from txl_jax.config import tree as config_tree
from txl_jax.metrics import Totals
from txl_jax.run_report.run_records import RunRecords, read_runs, swept_settings
from txl_jax.runs.checkpoints import latest_folder
from txl_jax.runs.run import holds_run
from txl_jax.runtime.environment import duration
from txl_jax.runtime.storage import exists, is_dir, is_remote, make_folder, names, read, write_json
from txl_jax.runtime.storage import write as write_file

_ENDED = "sweep.json"  # The exit code of a run's last process, and the seconds of all of them.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def note_end(run: Run, *, seconds: float, code: int) -> None:
    """Records the end of a run's process: its exit code, and its time added to that of earlier ones."""
    ended = {"seconds": _ended(run).get("seconds", 0.0) + seconds, "exit_code": code}
    write_json(os.path.join(run.folder, _ENDED), ended)


def write(sweep: Sweep, out: str) -> int:
    """Prints the table and writes results.csv; returns the exit code: 1 if a run has failed."""
    rows = [_row(sweep, run) for run in sweep.runs]
    _write(sweep.names, rows, out)
    return int(any(row["state"].startswith("failed") for row in rows))


def write_runs(paths: Sequence[str], out: str | None) -> int:
    """Does the same for the runs in folders, wherever they were trained; without `out` it only prints.

    Raises:
      UserError: a folder holds no run.
    """
    runs = read_runs(paths)
    names = swept_settings(runs)
    _write(names, [_row_of_records(run, names) for run in runs], out)
    return 0


def _write(names: Sequence[str], rows: Sequence[dict[str, Any]], out: str | None) -> None:
    tables = {"results": (["run", *names, *_MEASURED, "state"], rows)}
    if averaged := sweep_means.means(names, rows):
        tables["means"] = (sweep_means.columns(names), averaged)
    print()
    for line in _markdown(names, rows):
        print(line)
    if averaged:
        print()
        for line in sweep_means.markdown(names, averaged):
            print(line)
    if out is None:
        return
    make_folder(out)
    print()
    for name, (columns, content) in tables.items():
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(content)
        path = os.path.join(out, f"{name}.csv")
        write_file(path, text.getvalue().encode())
        print(f"{name:<10}{path}", flush=True)


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
    return f"stopped after step {step}" if exists(os.path.join(run.folder, "sweep.log")) or step else "not started"


_MEASURED = ("best_valid", "test", "measure", "steps", "seconds")


def _row(sweep: Sweep, run: Run) -> dict[str, Any]:
    """Returns a row of results.csv."""
    in_effect = config_tree.to_dict(run.config) | dict(run.differs)
    row = {"run": run.name, **{name: in_effect.get(name, "") for name in sweep.names}, "state": state_of(run)}
    if seconds := _ended(run).get("seconds"):
        row["seconds"] = round(seconds, 1)
    found = read_runs([run.folder])[0] if holds_run(run.folder) else None
    if found is None:
        return row
    if "seconds" not in row and found.training_seconds:  # Of a run that another machine has started.
        row["seconds"] = round(found.training_seconds, 1)
    if run.results is None:
        return row | _best_so_far(found)
    return row | _scores(found) | {"steps": run.results["steps"]}


def _row_of_records(run: RunRecords, names: Sequence[str]) -> dict[str, Any]:
    """The same for a run without a file that describes it."""
    values = config_tree.to_dict(run.config)
    row: dict[str, Any] = {
        "run": run.name,
        **{name: config_tree.format_value(values[name]) for name in names},
        "state": run.state,
    }
    if run.training_seconds:
        row["seconds"] = round(run.training_seconds, 1)
    if run.results is None:
        return row | _best_so_far(run)
    return row | _scores(run) | {"steps": run.results.get("steps", run.last_step)}


def _best_so_far(run: RunRecords) -> dict[str, Any]:
    return {"best_valid": run.best_valid[1], "measure": str(run.measure)} if run.best_valid else {}


def _scores(run: RunRecords) -> dict[str, Any]:
    found = {name: (run.results or {}).get(name) for name in ("best_valid", "test")}
    values = {name: Totals(score["loss"], 1).value(run.measure) for name, score in found.items() if score}
    return values | {"measure": str(run.measure)}


def _markdown(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as a Markdown table."""
    cells = [
        [
            row["run"],
            *(row[name] for name in names),
            sweep_means.score(row, "best_valid"),
            sweep_means.score(row, "test"),
            row.get("steps", ""),
            duration(row["seconds"]) if "seconds" in row else "",
            row["state"],
        ]
        for row in rows
    ]
    return sweep_means.markdown_table(["run", *names, "best valid", "test", "steps", "time", "state"], cells)


def _ended(run: Run) -> dict[str, Any]:
    try:
        return json.loads(read(os.path.join(run.folder, _ENDED)))
    except (FileNotFoundError, ValueError):  # Without it the table lacks a number; no run needs it.
        return {}


def _saved_steps(run: Run) -> list[int]:
    latest = latest_folder(run.folder)
    return [int(name) for name in names(latest) if name.isdigit()] if is_dir(latest) else []


def is_running(run: Run) -> bool:
    """Returns whether a process is training in the folder, here or on a host that shares the file system's locks."""
    if is_remote(run.folder):  # Object storage has no locks.
        return False
    try:
        with open(os.path.join(run.folder, ".lock")) as handle:
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
    lines = read(os.path.join(run.folder, "sweep.log")).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")[:300]
