"""Writes one HTML page about one or several runs: learning curves, results, settings, time, samples.

    python -m experiments.report runs/mine --out=report.html
    python -m experiments.report runs/mine runs/other --out=report.html
    python -m experiments.report runs/sweep --out=report.html

Each word is the workdir of a run (of an ensemble: with all of its members), or a folder of workdirs as a sweep's. A run
may still be training. The page is one file that loads nothing, for light and dark screens of any width.
"""

import os
import shlex
import sys

from absl import flags

from txl_jax.cli import runner
from txl_jax.errors import UserError
from txl_jax.run_report.page import make_page
from txl_jax.run_report.run_records import read_runs
from txl_jax.runtime.storage import as_path, make_folder, write

FLAGS = flags.FLAGS


def main() -> None:
    """Parses the flags and writes the page."""
    flags.DEFINE_string("out", "report.html", "File of the page.")
    paths = runner.parse_or_exit(groups=(), takes_words=True)
    sys.exit(runner.guarded(lambda: _run(paths)))


def _run(paths: list[str]) -> int:
    if not paths:
        raise UserError("no run was given; name workdirs, as python -m experiments.report runs/mine --out=report.html")
    runs = read_runs(paths)
    out = as_path(FLAGS.out)
    make_folder(os.path.dirname(out))
    command = shlex.join(["python", "-m", "experiments.report", *paths, f"--out={FLAGS.out}"])
    write(out, make_page(runs, command=command).encode())
    print(f"report    {out}: {len(runs)} run{'s' if len(runs) > 1 else ''}")
    return 0


if __name__ == "__main__":
    main()
