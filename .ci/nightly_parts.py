"""The parts of the nightly tests: the table in parts.toml, and the order in which they are due.

`nightly` runs the parts. This file reads the table, asks git what changed since a part last passed,
and records that a part passed.
"""

import dataclasses
import math
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / ".ci" / "parts.toml"

# A longer part would rarely fit behind the other tests of `.ci/run`, so it is split into parts of
# this length.
MAX_MINUTES = 15


@dataclasses.dataclass(frozen=True)
class Part:
    """A row of parts.toml, whose head explains the fields."""

    name: str
    about: str
    minutes: float
    machine: str
    passed: str
    covers: tuple[str, ...]
    python: str = "3.11"
    install: tuple[tuple[str, ...], ...] = ()
    constraints: str | None = None
    select: str | None = None
    paths: tuple[str, ...] = ()
    rest_of: tuple[str, ...] = ()
    processes: int | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    debian: tuple[str, ...] = ()
    may_skip: bool = False
    needs_root: bool = False
    needs_original: bool = False

    @property
    def folder(self) -> Path:
        """The directory of the part's virtual environment."""
        if self.constraints is not None:
            return ROOT / f".venv-{self.constraints}"  # Made by `.ci/versions`.
        return ROOT / f".venv-nightly-{self.name}"

    def pytest_arguments(self) -> list[str]:
        """Returns the arguments of pytest that select the part's tests."""
        arguments = []
        if self.select is not None:
            arguments += ["-m", self.select]
        if self.processes is not None:
            arguments += ["-n", str(self.processes)]
        for path in self.rest_of:
            arguments.append(f"--deselect={path}")
        return [*arguments, *self.paths]


def read_parts(text: str | None = None) -> tuple[list[Part], dict[str, float]]:
    """Reads the table.

    Args:
      text: The table. If None, the contents of parts.toml.

    Returns:
      The parts in the order of the table, and by the name of each machine the minutes that README's
      test command took there, installation included.

    Raises:
      ValueError: If a row names a machine that the table does not have.
      TypeError: If a row has an unknown field, or lacks one.
    """
    if text is None:
        text = TABLE.read_text()
    table = tomllib.loads(text)
    machines = {machine["name"]: machine["default_minutes"] for machine in table["machine"]}
    parts = []
    for row in table["part"]:
        part = Part(**{name: _frozen(value) for name, value in row.items()})
        if part.machine not in machines:
            raise ValueError(
                f"part {part.name}: machine must be one of {list(machines)}, got {part.machine!r}"
            )
        parts.append(part)
    return parts, machines


def _frozen(value):
    """Returns a value of the table with tuples instead of lists."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return value


class History(Protocol):
    """What the order depends on: the history of the checkout. `Git` is the real one."""

    def commits_since(self, commit: str) -> float:
        """Returns how many commits HEAD is ahead of an ancestor.

        Returns infinity if the clone lacks the ancestor.
        """

    def has_changed(self, commit: str, patterns: Sequence[str]) -> bool:
        """Returns whether a file that a pattern matches has changed.

        An ancestor is compared with the checkout.
        """


class Git:
    """The history of a clone."""

    def __init__(self, root: Path = ROOT):
        self._root = root

    def commits_since(self, commit: str) -> float:
        """Returns how many commits HEAD is ahead of an ancestor.

        Returns infinity if the clone lacks the ancestor.
        """
        # A commit that exists but is no ancestor of HEAD was rewritten or belongs to a branch. A
        # fresh clone may lack it, so it counts as lacking everywhere.
        is_ancestor = self._git("merge-base", "--is-ancestor", commit, "HEAD")
        if is_ancestor.returncode != 0:
            return math.inf
        count = self._git("rev-list", "--count", f"{commit}..HEAD")
        count.check_returncode()
        return int(count.stdout)

    def has_changed(self, commit: str, patterns: Sequence[str]) -> bool:
        """Returns whether a file that a pattern matches has changed.

        An ancestor is compared with the checkout.
        """
        pathspecs = [f":(glob){pattern}" for pattern in patterns]
        difference = self._git("diff", "--name-only", commit, "--", *pathspecs)
        difference.check_returncode()
        return bool(difference.stdout)

    def commit(self, name: str) -> str:
        """Returns the full hash of a commit.

        Raises:
          ValueError: If HEAD does not contain the commit.
        """
        found = self._git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        commit = found.stdout.strip()
        if found.returncode != 0 or math.isinf(self.commits_since(commit)):
            raise ValueError(f"--at must be a commit in the history of HEAD, got {name!r}")
        return commit

    def _git(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=self._root, capture_output=True, text=True)


@dataclasses.dataclass(frozen=True)
class Due:
    """How much a part is due."""

    part: Part
    # Commits since it passed. Infinity if it never passed, or at a commit that the clone lacks.
    age: float
    # Whether a file that it covers changed since then.
    has_changed: bool

    def __str__(self) -> str:
        if math.isinf(self.age):
            return "never passed in this history"
        state = "its files changed" if self.has_changed else "its files are the same"
        return f"passed {self.age} commits ago at {self.part.passed[:8]}, {state}"


def due_order(parts: Iterable[Part], history: History) -> list[Due]:
    """Sorts parts by how much they are due.

    First come the parts whose files changed since they passed (or that never passed), then the
    others. Among these the part whose commit is farthest back comes first, and among equals the
    order of the table decides. The result depends on the checkout and its history only, not on the
    clock or on the machine.
    """
    rows = []
    for part in parts:
        age = history.commits_since(part.passed)
        has_changed = math.isinf(age) or history.has_changed(part.passed, part.covers)
        rows.append(Due(part, age, has_changed))
    return sorted(rows, key=lambda due: (not due.has_changed, -due.age))


def record_passed(text: str, names: Sequence[str], commit: str) -> str:
    """Returns the text of the table, in which the named parts passed at a commit.

    Comments and the order of the rows stay, since the text is edited line by line: the standard
    library reads TOML and does not write it.
    """
    row = None
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith("[["):
            row = None
        name = re.match(r'name = "(.*)"', line)
        if name:
            row = name[1]
        if line.startswith("passed = ") and row in names:
            line = f'passed = "{commit}"\n'
        lines.append(line)
    return "".join(lines)


def find_python(version: str) -> str | None:
    """Returns an interpreter of this version ("3.11"), from the PATH or from pyenv, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [
        f"python{version}",
        *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"))),
    ]
    for candidate in candidates:
        # pyenv has commands on the PATH for versions that are not active, and these fail.
        if (
            shutil.which(candidate)
            and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0
        ):
            return candidate
    return None
