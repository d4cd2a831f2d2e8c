"""Tests that the commands of README and docs can be typed: programs, flags and flagfiles exist."""

import functools
import re
import runpy
import shlex
import sys

import pytest
from absl.flags import FLAGS

from experiments.cli import flag_tree
from support import ROOT

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


@functools.cache
def flag_names(program):
    """The flags that a program defines until it prints its help; they are taken back."""
    before = set(FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, "--help"])
        with pytest.raises(SystemExit):
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    found = set(FLAGS)
    for name in found - before:
        delattr(FLAGS, name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page):
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
            assert name in flag_names(program) | {"help", "helpfull", "flagfile"}, (page.name, program, word)
            if name == "flagfile" and value not in PLACEHOLDERS:
                assert value in flag_tree.flagfile_names() or "/" in value, (page.name, program, word)
