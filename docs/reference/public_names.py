"""Where the public names are defined, from the imports in txl_jax/__init__.py."""

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

import txl_jax
from docs.reference.source import names_defined, read


class Place(NamedTuple):
    """The definition of a name."""

    module_name: str
    name: str


@functools.cache
def public_names() -> dict[Place, str]:
    """Returns the names that `import txl_jax` gives, in the order of `txl_jax.__all__`, by place.

    Some names are shorter in their module: `reset_memory` is `reset` in `txl_jax.memory`.
    """
    names = {}
    for name in txl_jax.__all__:
        place = place_of("txl_jax", name)
        # `__version__` is computed.
        if place is not None and not name.startswith("_"):
            names[place] = name
    return names


def place_of(module_name: str, name: str) -> Place | None:
    """Returns where a name is defined that a module defines or imports from txl_jax, or None."""
    place = None
    for statement in _statements(read(module_name).tree):
        if isinstance(statement, ast.ImportFrom):
            place = _imported_place(statement, name)
        elif name in names_defined(statement):
            place = Place(module_name, name)
            # Another name for the same thing, as in `reset_memory = reset`.
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                place = place_of(module_name, statement.value.id)
        if place is not None:
            return place
    return None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields the statements of a module, and those under `if TYPE_CHECKING`."""
    for statement in tree.body:
        if isinstance(statement, ast.If):
            yield from statement.body
        else:
            yield statement


def _imported_place(statement: ast.ImportFrom, name: str) -> Place | None:
    """Returns where a name is defined if the statement imports it from txl_jax, or None."""
    source = statement.module or ""
    if not source.startswith("txl_jax."):
        return None
    for alias in statement.names:
        if name == (alias.asname or alias.name):
            return place_of(source, alias.name)
        if alias.name == "*":
            return place_of(source, name)
    return None
