"""Tests that `.ci/planted_faults.toml` still fits the code: no test can notice a fault that is not
planted.
"""

import tomllib

import pytest

from support import ROOT

FAULTS = tomllib.loads((ROOT / ".ci/planted_faults.toml").read_text())["fault"]


@pytest.fixture(scope="module")
def sources():
    """The text of each Python file in which faults are planted."""
    texts = []
    for directory in ("txl_jax", "experiments", "launch"):
        for path in (ROOT / directory).rglob("*.py"):
            texts.append(path.read_text())
    return texts


def test_each_fault_is_planted_in_one_place(sources):
    not_in_one_place = {}
    for fault in FAULTS:
        count = sum(text.count(fault["search"]) for text in sources)
        if count != 1:
            not_in_one_place[fault["name"]] = count
    assert not_in_one_place == {}


def test_faults_have_names_of_their_own_and_tests_that_exist():
    names = [fault["name"] for fault in FAULTS]
    assert sorted(names) == sorted(set(names))
    for fault in FAULTS:
        for test in fault.get("tests", []):
            path, _, _ = test.partition("::")
            assert (ROOT / path).exists(), f"{fault['name']}: {test}"
