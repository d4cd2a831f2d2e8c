"""Matrices of cases, of which a few represent the others in the default tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def nightly_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases as parameters of a test.

    Those that are not among the quick ones run nightly.
    """
    return full_but(quick, cases, pytest.mark.nightly(part="cases"))


def full_but(
    quick: Collection[Any], cases: Iterable[Any], mark: pytest.MarkDecorator = pytest.mark.full
) -> list[Any]:
    """The same, but those that are not among the quick ones run with `-m full`."""
    cases = list(cases)
    assert all(case in cases for case in quick), (
        f"not among the cases: {[case for case in quick if case not in cases]}"
    )
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else mark
        )
        for case in cases
    ]
