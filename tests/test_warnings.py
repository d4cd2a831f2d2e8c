"""Tests that warnings are errors in the suite, all but listed ones inside other packages."""

import itertools
import warnings

import pytest

OURS = ("txl_jax.ops.matmul", "experiments.cli.runner", "launch.local", "support.tiny", "tests.test_warnings")
DEPRECATIONS = (DeprecationWarning, PendingDeprecationWarning)
OTHERS = (UserWarning, RuntimeWarning, FutureWarning, ResourceWarning)


@pytest.mark.parametrize("module", OURS)
@pytest.mark.parametrize("category", [*DEPRECATIONS, *OTHERS])
def test_a_warning_of_our_own_code_is_an_error(module, category):
    """Those of other packages too, if they are about how we call them: they have the module of the caller."""
    with pytest.raises(category):
        warnings.warn_explicit("a warning", category, "a.py", 1, module=module)


def test_a_test_is_our_own_code():
    with pytest.raises(DeprecationWarning):
        warnings.warn("a warning", DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize("category", OTHERS)
def test_a_warning_of_another_package_is_an_error_unless_it_is_listed(category):
    with pytest.raises(category):
        warnings.warn_explicit("a warning", category, "a.py", 1, module="another.package")


@pytest.mark.parametrize(
    ("module", "category"),
    [
        *itertools.product(["another.package", "txl_jax_tools", "experiments2"], DEPRECATIONS),
        *itertools.product(["torch.storage", "transformers.utils.generic"], (FutureWarning, UserWarning)),
    ],
)
def test_listed_warnings_inside_another_package_are_its_own_affair(module, category):
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit("a warning", category, "a.py", 1, module=module)
    assert [warning.category for warning in caught] == [category]
