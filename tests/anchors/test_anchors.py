"""Compares the anchors: initial parameters, first losses and sampled texts.

A difference means that training or generating with the same seed gives other numbers than before.
`record.py` has the reasons, and writes the anchors again.
"""

import json

import pytest

from anchors import record
from support.cases import full_but

# Cases with dropout that the others represent in the default tests.
SLOW = ("accumulated_float64", "adaptive_one_width")
# Twins that represent the others in the default tests. All of them would take 40 s more.
QUICK_TWINS = [f"{name}{record.TWIN}" for name in ("relative", "averaged", "lstm", "qrnn")]
WITH_DROPOUT = [name for name in record.CASES if not name.endswith(record.TWIN)]
QUICK = [name for name in WITH_DROPOUT if name not in SLOW] + QUICK_TWINS


@pytest.mark.parametrize("name", full_but(QUICK, record.CASES))
def test_numbers_are_those_that_were_recorded(name, tmp_path):
    """Users who repeat a run with its seed get its numbers."""
    expected = json.loads((record.FOLDER / f"{name}.json").read_text())

    numbers = record.CASES[name](tmp_path)

    assert list(record.differences(numbers, expected, name)) == []
