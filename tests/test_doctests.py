"""The examples in docstrings."""

import doctest
import importlib

import pytest

from support import ROOT

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("txl_jax", "experiments")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if ">>>" in path.read_text()
]
assert len(MODULES) > 10


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
