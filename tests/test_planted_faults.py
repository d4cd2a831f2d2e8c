"""Tests that `.ci/planted_faults.toml` still fits the code: a fault that is not planted is noticed
by no test.
"""

import tomllib

import pytest

from support import ROOT

FAULTS = tomllib.loads((ROOT / ".ci/planted_faults.toml").read_text())["fault"]


@pytest.fixture(scope="module")
def sources():
    """The text of each Python file in which faults are planted."""
    return [
        path.read_text()
        for folder in ("txl_jax", "experiments", "launch")
        for path in (ROOT / folder).rglob("*.py")
    ]


def test_each_fault_is_planted_in_one_place(sources):
    places = {
        fault["name"]: sum(text.count(fault["search"]) for text in sources) for fault in FAULTS
    }
    assert {name: count for name, count in places.items() if count != 1} == {}


def test_faults_have_names_of_their_own_and_tests_that_exist():
    names = [fault["name"] for fault in FAULTS]
    assert sorted(names) == sorted(set(names))
    paths = [path for fault in FAULTS for path in fault.get("tests", [])]
    assert [path for path in paths if not (ROOT / path.partition("::")[0]).exists()] == []
