"""Tests that files and functions stay short enough to be read at once."""

import ast

import pytest

from support import ROOT

MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60
PATHS = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("txl_jax", "experiments", "launch")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def too_long(text):
    """Yields what is too long: the file itself, or functions by their names; signature and docstring count."""
    if (lines := len(text.splitlines())) > MAX_FILE_LINES:
        yield f"the file: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES:
                yield f"{node.name}: {lines} lines"


@pytest.mark.parametrize("name", PATHS)
def test_files_and_functions_are_short(name):
    assert list(too_long(PATHS[name].read_text())) == []


def test_what_is_too_long_is_found():
    """The check above can fail, and the limits themselves are allowed."""

    def method(lines):
        return "class A:\n    def f(self):\n" + "        pass\n" * (lines - 1)

    assert list(too_long(method(MAX_FUNCTION_LINES) + "#\n" * (MAX_FILE_LINES - MAX_FUNCTION_LINES - 1))) == []
    assert list(too_long(method(MAX_FUNCTION_LINES + 1))) == ["f: 61 lines"]
    assert list(too_long("#\n" * (MAX_FILE_LINES + 1))) == ["the file: 351 lines"]
