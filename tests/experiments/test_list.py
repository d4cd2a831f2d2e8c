"""Tests the list of programs, `python -m txl_jax`: one line for each, none forgotten."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from support import ROOT
from txl_jax.__main__ import PROGRAMS, main

NAMES = [name for programs in PROGRAMS.values() for name in programs]


def test_every_program_is_listed():
    files = [path for folder in ("experiments", "launch") for path in (ROOT / folder).rglob("*.py")]
    programs = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in files
        if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text()
    }
    assert programs == set(NAMES) and len(NAMES) == len(programs)


@pytest.mark.parametrize("name", NAMES)
def test_every_listed_program_exists_and_documents_its_command(name):
    text = (ROOT / importlib.util.find_spec(name).origin).read_text()
    assert re.search(rf"python -m {re.escape(name)}\b", text)


def test_the_table_of_corpora_describes_their_programs():
    described = {name: text for programs in PROGRAMS.values() for name, text in programs.items()}
    assert described["experiments.enwik8"] == "enwik8, bytes of Wikipedia"
    assert described["experiments.wikitext103"] == "WikiText-103 and WikiText-2, words"


def test_a_reader_that_stops_early_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "experiments"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_list_fits_a_terminal(capsys):
    main()
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in NAMES)
    assert max(map(len, out.splitlines())) <= 110
