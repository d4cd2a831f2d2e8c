"""Tests what runs the pages' code blocks: the commands of a block, and the terminal."""

import os

import pytest

from support import pages
from support.pages import Block
from support.terminal import Terminal, TerminalError

SECONDS = 60.0


@pytest.fixture
def terminal(tmp_path):
    opened = Terminal(tmp_path, dict(os.environ), tmp_path / "log.txt")
    yield opened
    opened.close()


def test_a_block_is_cut_into_commands():
    source = (
        "# A comment.\n"
        "python -m one   # its comment\n"
        "\n"
        "python -m two \\\n  --flag\n"
        "for x in 1 2; do   # a loop's\n  echo $x\ndone\n"
        'A="--one\n  --two"\n'
    )
    commands = pages.commands(Block("page", 10, "sh", source))
    assert [(command.line, command.name) for command in commands] == [
        (11, "python -m one # its comment"),
        (13, "python -m two \\ --flag"),
        (15, "for x in 1 2; do # a loop's echo $x done"),
        (18, 'A="--one --two"'),
    ]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m one", "python -m one --x"),
        ("python -m one  # it's a comment", "python -m one --x"),
        ("curl -d '# {\"a\"}' a#b  # 'c'", "curl -d '# {\"a\"}' a#b --x"),
        ("one \\\n  two > out", "one \\\n  two > out --x"),
    ],
)
def test_flags_are_put_in_front_of_a_comment(command, expected):
    assert pages.with_flags(command, "--x") == expected


def test_indented_commands_are_blocks_and_signatures_are_not(tmp_path, monkeypatch):
    text = (
        "Text:\n\n    python -m one\n    python -m two\n\n```text\n\n    pip\n```\n\n    score(a)\n"
    )
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert [(step.line, step.source) for step in pages.steps("page.md")] == [
        (3, "python -m one"),
        (4, "python -m two"),
    ]


def test_variables_and_names_last(terminal, tmp_path):
    terminal.run("WORD=one\ncd .", SECONDS)
    terminal.run("echo $WORD > out", SECONDS)
    terminal.run_python("page:1", "word = open('out').read()", SECONDS)
    terminal.run_python("page:2", "assert word == 'one\\n'", SECONDS)
    assert (tmp_path / "out").read_text() == "one\n"


@pytest.mark.parametrize(
    "command", ["false", "false && true", "false | cat", "exit 0", "for x in 1 2; do false; done"]
)
def test_a_command_that_fails_is_noticed(terminal, command):
    with pytest.raises(TerminalError):
        terminal.run(command, SECONDS)


def test_python_that_raises_is_noticed(terminal, tmp_path):
    with pytest.raises(TerminalError):
        terminal.run_python("page:7", "\nassert False", SECONDS)
    assert 'File "page:7", line 2' in (tmp_path / "log.txt").read_text()


def test_a_command_that_takes_too_long_is_noticed(terminal):
    with pytest.raises(TerminalError, match="not done"):
        terminal.run("sleep 60", 0.3)


def test_what_stays_must_not_end(terminal):
    terminal.start("sleep 60", None, SECONDS)
    terminal.check_started()
    with pytest.raises(TerminalError):
        terminal.start("true", None, SECONDS)
