"""What every file of measurements has: where a row comes from, and how rows are appended.

`compressors.py` and `parity.py` run as scripts (`python benchmarks/parity.py`), which cannot import
this module.
"""

import csv
import datetime
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from txl_jax.runtime.environment import device_kind


def describe_versions(*packages: str) -> str:
    """Returns the versions of packages and of Python."""
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def origin(command: str, versions: str, *, note: str = "") -> dict[str, str]:
    """Returns the columns that say where and how a row was measured.

    Args:
      command: The command that measures it.
      versions: From `describe_versions`.
      note: What else matters about the machine, such as "1 core".
    """
    machine = device_kind()
    if note:
        machine += f", {note}"
    return {
        "machine": machine,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "command": command,
    }


def append(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows to a CSV file, which begins with the names of its columns.

    All rows are in one write, since multiple processes may append at the same time.
    """
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)
