"""Tests that the commands of README and docs can be typed: programs, flags and flagfiles exist."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from support import ROOT
from txl_jax.config.experiment import preset_names

pytestmark = pytest.mark.full

PAGES = [ROOT / name for name in ("README.md", "BUILD.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
# Placeholders of the pages, not flags.
PLACEHOLDERS = {"FLAGS", "...", "NAME"}


def commands(page):
    """Yields the words of each command that starts a program of this project, without what follows a pipe."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m ((?:experiments|launch)\.[^\n`#]*)", text):
        if "$" not in line:
            yield shlex.split(re.split(r" 2>| \|", line)[0])


# Defines the flags of each program until it prints its help. In a process of its own: other tests define flags too.
LIST_FLAGS = """
import contextlib, io, json, runpy, sys
from absl.flags import FLAGS
found = {}
for program in sys.argv[1:]:
    before, sys.argv = set(FLAGS), [program, "--help"]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    found[program] = sorted(FLAGS)
    for name in set(FLAGS) - before:
        delattr(FLAGS, name)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def flag_names():
    """The flags of each program that the pages name."""
    names = {program for page in PAGES for program, *_ in commands(page) if program.startswith("experiments.")}
    names.discard("experiments.NAME")  # A placeholder.
    command = [sys.executable, "-c", LIST_FLAGS, *sorted(names)]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page, flag_names):
    for program, *words in commands(page):
        if program.startswith("launch."):
            continue  # tests/launch/test_docs.py runs those.
        for word in words:
            if word == "--":
                break
            if not word.startswith("--"):
                assert word in PLACEHOLDERS or not word.startswith("-"), (page.name, program, word)
                continue
            name, _, value = word.removeprefix("--").partition("=")
            assert name in {*flag_names[program], "help", "helpfull", "flagfile"}, (page.name, program, word)
            if name == "flagfile" and value not in PLACEHOLDERS:
                assert value in preset_names() or "/" in value, (page.name, program, word)
