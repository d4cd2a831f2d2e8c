"""The results of a sweep's runs as one table, read from their folders."""

import dataclasses
import fcntl
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from launch.sweep_file import Run, Sweep
from txl_jax.config import tree as config_tree
from txl_jax.runs import records
from txl_jax.runs.checkpoints import latest_folder
from txl_jax.runs.run import holds_run
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
    runs = records.read_runs(paths)
    names = records.swept_settings(runs)
    _write(names, [run.row(names) for run in runs], out)
    return 0


def _write(names: Sequence[str], rows: Sequence[dict[str, Any]], out: str | None) -> None:
    print("", *records.markdown(names, rows), sep="\n")
    if out is None:
        return
    make_folder(out)
    print()
    tables = {"results": (["run", *names, *records.MEASURED, "state"], rows)}
    if averaged := records.means(names, rows):
        tables["means"] = (records.mean_columns(names), averaged)
    for name, (columns, content) in tables.items():
        path = os.path.join(out, f"{name}.csv")
        write_file(path, records.csv_file(columns, content))
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


def _row(sweep: Sweep, run: Run) -> dict[str, Any]:
    """Returns a row of results.csv."""
    in_effect = config_tree.to_dict(run.config) | dict(run.differs)
    row = {"run": run.name, **{name: in_effect.get(name, "") for name in sweep.names}, "state": state_of(run)}
    if seconds := _ended(run).get("seconds"):
        row["seconds"] = round(seconds, 1)
    if not holds_run(run.folder):
        return row
    found = records.read_runs([run.folder])[0]
    # The recorded rates are the time of a run that another machine has started.
    return dataclasses.replace(found, results=run.results).row([]) | row


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
