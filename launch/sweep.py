r"""Runs a hyperparameter sweep from one file, on one machine or many.

The command starts the runs, resumes them, and shows a table of results.

    python -m launch.sweep sweep.toml --out=runs/sweep --jobs=2
    python -m launch.sweep sweep.toml --out=runs/sweep --table
    python -m launch.sweep --table runs/one gs://bucket/runs/two
    python -m launch.sweep sweep.toml --out=gs://bucket/sweep \
        --storage=postgresql://me@host/db --jobs=8 --print=sky

The file lists the settings of the runs, named like the command's flags. Write None as "none":

    program = "ptb"                       # python -m experiments.ptb
    base.train.steps = 2000               # for all runs
    grid.seed = [1, 2, 3]                 # every combination is a run

docs/launch.md describes the other tables: [[runs]], [random], [sampler] and [pruner]. Each run has
a directory in --out, named after the settings in which it differs, with its output in sweep.log. To
resume a sweep, or to join it from another machine, rerun the same command. Ctrl-C saves all runs.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import optuna  # noqa: F401 (`study` and `sweep_file` use it.)
except ImportError as error:
    sys.exit(f"error: sweeps require Optuna ({error}). Run pip install '.[sweep]'.")

from launch import study
from launch.sweep_file import LOG, Sweep
from txl_jax.config.config_tree import require
from txl_jax.errors import UserError, describe_system_error, one_line
from txl_jax.runs import run_tables
from txl_jax.runtime import output, remote, storage


def main(argv: Sequence[str]) -> int:
    """Runs the sweep and returns the exit code.

    The exit code is 0, 1 (a run failed), 2 (usage), 75 (no database), 141 or 128 + signal.
    """
    output.prepare()
    flags = _parsed(argv[1:])
    remote.shorten_storage_logs()
    try:
        return _run(flags)
    except study.UNREACHABLE as error:
        print(
            f"error: the database of the study is unreachable ({study.reason(error)}). Check "
            "--storage, and rerun the same command.",
            file=sys.stderr,
        )
        return os.EX_TEMPFAIL
    except OSError as error:
        print(f"error: {one_line(describe_system_error(error))}", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "launch.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("files", nargs="*", help="the sweep file, or with --table directories of runs")
    add("--out", help="directory or bucket for runs and tables, created if missing")
    add(
        "--storage",
        help="database of the study (default: sqlite:///OUT/study.db). Multiple machines need "
        "postgresql://USER@HOST/DATABASE, with the password in PGPASSWORD",
    )
    add("--jobs", type=int, metavar="N", default=1, help="number of runs at a time (default: 1)")
    add(
        "--gpus",
        type=lambda text: text.split(","),
        help="GPUs to use, such as 0,1, with one run at a time on each",
    )
    add(
        "--table",
        action="store_true",
        help="train nothing: print the table of results, and write it to results.csv and "
        "means.csv in --out",
    )
    add("--dry_run", action="store_true", help="only print the commands of the unfinished runs")
    add(
        "--print",
        choices=["sky"],
        help="only print commands that start --jobs workers as managed jobs of SkyPilot",
    )
    return parser.parse_args(words)


def _run(flags: argparse.Namespace) -> int:
    """Runs the task that the flags select, and returns the exit code."""
    if flags.table and flags.files and not flags.files[0].endswith(".toml"):
        return _compare_runs(flags)
    _check_flags(flags)

    sky_commands = _sky(flags) if flags.print else []
    sweep = Sweep(Path(flags.files[0]), storage.as_path(flags.out))
    if flags.table:
        return _write_results(sweep) or output.exit_code()
    if flags.print or flags.dry_run:
        commands = sky_commands or [
            run.command for run in sweep.runs.values() if run.results is None
        ]
        print(*map(shlex.join, commands), sep="\n")
        return output.exit_code()

    storage.make_folder(sweep.out)
    url = study.database(flags.storage) if flags.storage else study.database_in(sweep.out)
    worker = study.Worker(sweep, url, flags.gpus or [None] * flags.jobs)
    for line in _start_lines(flags, sweep):
        print(line, flush=True)
    worker.run()
    code = _write_results(sweep)
    print(*worker.report(), sep="\n", flush=True)
    if worker.signal_number:
        print("continue  rerun the same command: it resumes the stopped runs", flush=True)
    return 128 + worker.signal_number if worker.signal_number else code


def _start_lines(flags: argparse.Namespace, sweep: Sweep) -> list[str]:
    """Returns lines that say where to see the runs, and warn of changed steps."""
    lines = []
    # In a bucket, the output of a run is written when it ends.
    if not storage.is_remote(sweep.out):
        lines.append(f"logs      tail -f {shlex.quote(sweep.out)}/*/{LOG}")
    [file] = flags.files
    show = ["python", "-m", "launch.sweep", file, f"--out={flags.out}", "--table"]
    lines.append(f"progress  {shlex.join(show)}")

    changed = [
        run
        for run in sweep.runs.values()
        if run.recorded_steps not in (None, run.config.train.steps)
    ]
    if changed:
        first = changed[0]
        lines.append(
            f"warning   train.steps has changed in {len(changed)} of {len(sweep.runs)} runs, such "
            f"as {first.name}: {first.config.train.steps:,}, was {first.recorded_steps:,}. The "
            "learning rate jumps to the new schedule, unless optimizer.decay_steps is set."
        )
    return lines


def _check_flags(flags: argparse.Namespace) -> None:
    """Raises `UserError` if flags are missing or out of range."""
    require(
        len(flags.files) == 1,
        f"one file must be passed, such as sweep.toml, got {' '.join(flags.files) or 'none'}",
    )
    require(flags.jobs > 0, f"--jobs must be at least 1, got {flags.jobs}")
    require(flags.out, "--out is required: the directory of the runs. Pass --out=PATH.")
    needs_database = storage.is_remote(flags.out) and not flags.table and not flags.dry_run
    require(
        flags.storage or not needs_database,
        "--storage=postgresql://USER@HOST/DATABASE is required for a bucket, got "
        f"--out={flags.out}",
    )


def _sky(flags: argparse.Namespace) -> list[Sequence[str]]:
    """Returns a command for each managed job: a worker of the study on a separate machine."""
    is_shared = (
        storage.is_remote(flags.out) and flags.storage and study.database(flags.storage).host
    )
    require(
        is_shared,
        "SkyPilot jobs share a bucket and a database. Set "
        "--out=gs://BUCKET/DIRECTORY and --storage.",
    )
    worker = ["python", "-m", "launch.sweep", *flags.files]
    worker += [f"--out={flags.out}", f"--storage={flags.storage}"]
    start = ["sky", "jobs", "launch", "launch/sky.yaml", "--yes", "--detach-run"]
    start.append(f"--env=RUN={shlex.join(worker)}")
    if "PGPASSWORD" in os.environ:
        # SkyPilot reads the value from the environment, so the printed command contains no secret.
        start.append("--secret=PGPASSWORD")
    name = os.path.basename(flags.out.rstrip("/"))
    return [[*start, f"--name={name}-{number}"] for number in range(1, flags.jobs + 1)]


def _compare_runs(flags: argparse.Namespace) -> int:
    """Writes the table of any runs, without a sweep file. Returns the exit code."""
    runs = run_tables.read_runs(flags.files)
    names = run_tables.swept_settings(runs)
    rows = [run.row(names) for run in runs]
    _write_table(names, rows, storage.as_path(flags.out) if flags.out else None)
    return output.exit_code()


def _write_results(sweep: Sweep) -> int:
    """Writes the table of a sweep's runs. Returns the exit code, 1 if a run has failed."""
    rows = [run.row(sweep.names) for run in sweep.known_runs()]
    _write_table(sweep.names, rows, sweep.out)
    has_failed = any(row["state"].startswith("failed") for row in rows)
    return int(has_failed)


def _write_table(names: Sequence[str], rows: Sequence[dict[str, Any]], out: str | None) -> None:
    """Prints the table and the means over seeds.

    If `out` is passed, they are also written to results.csv and means.csv there.
    """
    print("", *run_tables.markdown(names, rows), "", sep="\n")
    if out is None:
        return
    storage.make_folder(out)
    columns = ["run", *names, *run_tables.MEASURED, "state"]
    _write_csv("results", columns, rows, out)
    _write_csv("means", run_tables.mean_columns(names), run_tables.means(names, rows), out)


def _write_csv(name: str, columns: Sequence[str], rows: Sequence[dict[str, Any]], out: str) -> None:
    """Writes a table and prints its path, unless it is empty."""
    if rows:
        path = os.path.join(out, f"{name}.csv")
        storage.write(path, run_tables.csv_file(columns, rows))
        print(f"{name:<10}{path}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
