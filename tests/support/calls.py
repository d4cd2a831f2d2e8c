"""Replaces functions by calls that keep their arguments."""

import inspect
from typing import Any

import pytest

from txl_jax.config import ExperimentConfig, config_tree


class EnoughError(Exception):
    """Ends a program after the last call that a test looks at."""


def keep(
    patch: pytest.MonkeyPatch,
    found: dict[str, Any],
    module: Any,
    name: str,
    result: Any = None,
) -> None:
    """Replaces a function or class of a module. `found` gets each argument, such as "load.path".

    A config is kept as its settings. A call returns `result`, or raises it if it is an exception.
    """
    signature = inspect.signature(getattr(module, name))

    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        for parameter, value in bound.arguments.items():
            if isinstance(value, ExperimentConfig):
                for setting, content in config_tree.to_dict(value).items():
                    found[f"{name}.{parameter}.{setting}"] = content
            else:
                found[f"{name}.{parameter}"] = value
        if isinstance(result, BaseException):
            raise result
        return result

    # A second replacement has the signature of the original.
    call.__signature__ = signature  # type: ignore[attr-defined]
    patch.setattr(module, name, call)
