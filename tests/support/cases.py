"""Matrices of cases, of which a few represent the others in the default tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases as parameters of a test; those that are not among the quick ones are slow."""
    cases = list(cases)
    assert all(case in cases for case in quick), f"not among the cases: {[case for case in quick if case not in cases]}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else pytest.mark.slow)
        for case in cases
    ]
