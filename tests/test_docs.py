"""Tests that the commands of README and docs can be typed, and the examples in docstrings."""

import doctest
import functools
import importlib
import re
import shlex

import pytest

from support import ROOT, programs
from txl_jax.config.experiment import preset_names

PAGES = [ROOT / name for name in ("README.md", "BUILD.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
PLACEHOLDERS = {"FLAGS", "...", "NAME"}  # Of the pages.
SOURCES = [path for folder in ("txl_jax", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]
EXAMPLES = [path.relative_to(ROOT) for path in SOURCES if ">>>" in path.read_text()]
assert len(EXAMPLES) > 10


def commands(page):
    """Yields the words of each command that starts a program of this project, without what follows a pipe."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m ((?:experiments|launch)\.[^\n`#]*)", text):
        if "$" not in line:
            yield shlex.split(re.split(r" 2>| \|", line)[0])


@functools.cache
def flag_names(program):
    """The flags that a program's --help lists, and those that list and read them."""
    _, out, _ = programs.run(program, "--help")
    return {*re.findall(r"^ *--(?:\[no\])?([\w.]+)", out, flags=re.MULTILINE), "help", "helpfull", "flagfile"}


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page):
    for program, *words in commands(page):
        if program.startswith("launch.") or program == "experiments.NAME":
            continue  # tests/launch/test_docs.py runs those; NAME is a placeholder.
        for word in words:
            if word == "--":
                break
            if not word.startswith("--"):
                assert word in PLACEHOLDERS or not word.startswith("-"), (page.name, program, word)
                continue
            name, _, value = word.removeprefix("--").partition("=")
            assert name in flag_names(program), (page.name, program, word)
            if name == "flagfile" and value not in PLACEHOLDERS:
                assert value in preset_names() or "/" in value, (page.name, program, word)


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_examples_in_docstrings(path):
    assert doctest.testmod(importlib.import_module(".".join(path.with_suffix("").parts))).failed == 0
