"""Tests that the commands of README and docs can be typed: programs, flags and flagfiles exist."""

import functools
import re
import shlex
import subprocess
import sys

import pytest

from experiments.cli import flag_tree
from support import ROOT, programs

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
    """The flags that a program has."""
    done = subprocess.run(programs.command(program, "--helpfull"), cwd=ROOT, text=True, capture_output=True, check=True)
    return set(re.findall(r"^ +--([\w.]+)", done.stdout, flags=re.MULTILINE))


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


def test_the_picture_of_the_relative_shift_can_be_drawn(tmp_path):
    """By the library's own shift: the program asserts that each score lands at its distance."""
    path = tmp_path / "skew.png"
    subprocess.run([sys.executable, ROOT / "docs" / "figures" / "skew.py", path], cwd=ROOT, check=True)
    drawn, shown = (image.read_bytes() for image in (path, ROOT / "docs" / "skew.png"))
    assert drawn[:8] == shown[:8] == b"\x89PNG\r\n\x1a\n"
    assert drawn[16:24] == shown[16:24]  # Width and height.
