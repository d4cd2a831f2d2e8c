"""Runs the code blocks of README and the guides as they are written: each page's in order, in a
copy of the clone.

`blocks.toml` has what pages presuppose, how steps are shortened, and why steps are skipped. A step
that it does not name runs as written.
"""

import collections
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from support import ROOT, pages
from support.pages import PAGES, Step
from support.terminal import Terminal, TerminalError

TABLE = tomllib.loads(Path(__file__).with_name("blocks.toml").read_text())
# A step that takes longer needs a row of the table. The longest that runs as written, the
# quickstart, takes four minutes on two quiet cores, and took eleven on busy ones.
SECONDS = 1200.0
SECONDS_TO_ANSWER = 120.0  # Of a server.
SHOWN_OUTPUT = 6000  # Characters of a failing page's output.


@dataclasses.dataclass(frozen=True)
class Row:
    """What the table says about a step. The head of blocks.toml explains the fields."""

    page: str
    begins: str
    flags: str = ""
    skip: str = ""
    file: str = ""
    then: str = ""
    stays: bool = False
    answers: str | None = None

    def is_about(self, step: Step) -> bool:
        """Returns whether the step is on this row's page and begins with its words."""
        return step.page == self.page and step.name.startswith(self.begins)


ROWS = [Row(**row) for row in TABLE["step"]]
AS_WRITTEN = Row(page="", begins="")


def row_of(step):
    """Returns the row of a step, or `AS_WRITTEN`."""
    rows = [row for row in ROWS if row.is_about(step)]
    assert len(rows) <= 1, f"{step.page}:{step.line} has more than one row: {rows}"
    if rows:
        return rows[0]
    return AS_WRITTEN


def with_names(text):
    """Returns a text of the table with the flags that it names, such as `{sizes}`."""
    for name, flags in TABLE["flags"].items():
        text = text.replace(f"{{{name}}}", flags.strip())
    return text


PAGES_WITH_STEPS = [page for page in PAGES if pages.steps(page)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.page}: {row.begins}")
def test_a_row_of_the_table_is_about_one_step(row):
    steps = [step for step in pages.steps(row.page) if row.is_about(step)]
    assert len(steps) == 1, f"the row must begin like one step of {row.page}, got {steps}"
    actions = [action for action in (row.flags, row.skip, row.file, row.stays) if action]
    assert actions, "it must say what differs"
    assert not row.skip or actions == [row.skip]


@pytest.mark.parametrize("page", PAGES_WITH_STEPS)
def test_data_on_a_page_has_a_row_that_names_its_file(page):
    for step in pages.steps(page):
        if step.language not in ("sh", "python"):
            row = row_of(step)
            assert row.file or row.skip, f"{page}:{step.line}: name its file in blocks.toml"


def test_what_pages_presuppose_is_made_for_a_page():
    uses = collections.Counter()
    for page in TABLE["page"]:
        assert page["name"] in PAGES_WITH_STEPS, page["name"]
        uses.update(page.get("given", []))
    assert uses.keys() == {given["name"] for given in TABLE["given"]}


def copy_of_clone(folder):
    """Copies the files of the clone that git does not ignore into a new directory."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        source = ROOT / name
        if source.is_file():  # Not one that was deleted, but not yet in git.
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def write_texts(folder):
    """Writes the texts that pages name: prose of this project, and its lines."""
    prose = "".join((ROOT / page).read_text() for page in PAGES).encode("ascii", "ignore")
    (folder / "book.txt").write_bytes(prose[:60_000])
    (folder / "new.txt").write_bytes(prose[60_000:100_000])
    lines = [line for line in prose[:20_000].splitlines() if line]
    (folder / "lines.txt").write_bytes(b"\n".join(lines[:20]) + b"\n")
    (folder / "prompts.txt").write_bytes(b"Once upon\nIt was\n")


def make_environment(folder):
    """Makes a virtual environment in `.venv` that has the packages of this one.

    What a page installs is only in the new one.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=folder, check=True)
    [packages] = (folder / ".venv" / "lib").glob("python*/site-packages")
    # The clone comes first, as in an editable installation.
    paths = [str(folder), *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "parent.pth").write_text("\n".join(paths) + "\n")
    pip = folder / ".venv" / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec python -m pip "$@"\n')
    pip.chmod(0o755)


def environment_of(folder):
    """Returns the environment variables of a reader whose `.venv` is active."""
    variables = dict(os.environ)
    for name in list(variables):
        # Settings of this suite.
        if name.startswith(("JAX_", "XLA_", "TXL_", "PYTEST", "PYTHONPATH")):
            del variables[name]
    variables["JAX_PLATFORMS"] = "cpu"
    bins = [str(folder / ".venv" / "bin"), str(Path(sys.executable).parent)]
    variables["PATH"] = os.pathsep.join([*bins, variables["PATH"]])
    return variables


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """Returns a function that copies a run of `blocks.toml` into a directory.

    Each run is trained once.
    """
    shelf = tmp_path_factory.mktemp("given")
    copy_of_clone(shelf)
    write_texts(shelf)
    make_environment(shelf)
    commands = {row["name"]: with_names(row["command"]) for row in TABLE["given"]}

    def copy(name, folder):
        if not (shelf / name).exists():
            log = shelf / "log.txt"
            terminal = Terminal(shelf, environment_of(shelf), log)
            try:
                terminal.run(commands[name], SECONDS)
            except TerminalError as error:
                pytest.fail(f"{name}: {error}\n{log.read_text()[-SHOWN_OUTPUT:]}")
            finally:
                terminal.close()
        shutil.copytree(shelf / name, folder / name)

    return copy


@pytest.fixture
def only_server(tmp_path_factory, testrun_uid):
    """Waits until no other page may have a server: all of them listen on the same port."""
    lock = tmp_path_factory.getbasetemp().parent / f"server-{testrun_uid}.lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_step(terminal, step, row, folder):
    """Runs, writes or starts a step as its row says."""
    if row.file:
        target = folder / row.file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(step.source)
        if row.then:
            terminal.run(row.then, SECONDS)
    elif step.language == "python":
        terminal.run_python(f"{step.page}:{step.line}", step.source, SECONDS)
    else:
        command = step.source
        if row.flags:
            command = pages.with_flags(command, with_names(row.flags))
        if row.stays:
            terminal.start(command, row.answers, SECONDS_TO_ANSWER)
        else:
            terminal.run(command, SECONDS)


@pytest.mark.nightly(part="pages")
@pytest.mark.parametrize("page", PAGES_WITH_STEPS)
def test_a_page_runs_as_written(page, tmp_path, given, request):
    steps = pages.steps(page)
    if any(row_of(step).stays for step in steps):
        request.getfixturevalue("only_server")
    folder = tmp_path / "clone"
    log = tmp_path / "log.txt"
    copy_of_clone(folder)
    write_texts(folder)
    if not any("venv .venv" in step.source for step in steps):
        make_environment(folder)

    terminal = Terminal(folder, environment_of(folder), log)
    try:
        for row in TABLE["page"]:
            if row["name"] != page:
                continue
            for name in row.get("given", []):
                given(name, folder)
            terminal.run(with_names(row.get("before", "true")), SECONDS)
            terminal.run_python("blocks.toml", row.get("python", ""), SECONDS)
        for step in steps:
            row = row_of(step)
            if row.skip:
                print(f"skipped   {page}:{step.line}: {step.name[:100]}\n          {row.skip}")
                continue
            began = time.monotonic()
            try:
                run_step(terminal, step, row, folder)
            except TerminalError as error:
                output = log.read_text(errors="replace")[-SHOWN_OUTPUT:]
                pytest.fail(f"{page}:{step.line}: {error}\n{step.source}\n\n{output}")
            print(f"{time.monotonic() - began:7.1f} s {page}:{step.line}: {step.name[:100]}")
        terminal.check_started()
    finally:
        terminal.close()
    shutil.rmtree(folder)
