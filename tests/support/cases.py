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
    """Returns the cases as parameters of a test.

    Those that are not among the quick ones run with `-m full`. A case that is a tuple gives one
    value to each parameter.
    """
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"not among the cases: {unknown}"

    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if case in quick else mark
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
