"""Second values of the settings of a plan or a config, which differ from the defaults.

Numbers and texts also differ from each other, so that a value in another's place is noticed.

They follow from the declared types and ranges, so that a new setting has one without a line here.
"""

import enum
from collections.abc import Mapping
from typing import Any

from txl_jax.cli import flag_tree
from txl_jax.config import config_tree
from txl_jax.config.config_tree import NamedSetting


def second_values(
    kind: type,
    *,
    start_at: int,
    chosen: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a value for each setting of a class that is a flag, by name. `chosen` ones stay."""
    given = chosen or {}
    values = {}
    for number, leaf in enumerate(flag_tree.setting_leaves(kind), start=start_at):
        values[leaf.name] = leaf.type.convert(leaf.name, given.get(leaf.name, _value(leaf, number)))
    return values


def as_flags(kind: type, values: Mapping[str, Any]) -> list[str]:
    """Returns the flags that give settings these values."""
    words = []
    for leaf in flag_tree.setting_leaves(kind):
        if leaf.name not in values:
            continue
        entries = values[leaf.name] if leaf.setting.repeated else [values[leaf.name]]
        flag = flag_tree.flag_name(leaf)
        words += [f"--{flag}={config_tree.format_value(entry)}" for entry in entries]
    return words


def _value(leaf: NamedSetting, number: int) -> Any:
    """Returns a value that differs from the default, and by its number from other settings'."""
    if leaf.type.is_list:
        # The second entry of a repeated flag has a comma, which does not divide it.
        separator = ", " if leaf.setting.repeated else "-"
        first = _entry(leaf, number, leaf.name)
        second = _entry(leaf, number + 5000, f"{leaf.name}{separator}again")
        return first, second
    return _entry(leaf, number, leaf.name)


def _entry(leaf: NamedSetting, number: int, name: str) -> Any:
    kind = leaf.type.kind
    if kind is bool:
        if leaf.type.is_list:
            return number % 2 == 0
        return not leaf.default
    if issubclass(kind, enum.Enum):
        others = [member for member in kind if member != leaf.default]
        return others[number % len(others)]
    if kind is str:
        if leaf.setting.path or leaf.type.is_list:
            return f"{name}-{number}"
        return f"{name}, {number} = x"  # Which is one value.
    candidates = [number] if kind is int else [number + 0.5, 1 / number]
    for value in candidates:
        if not leaf.setting.missed_range(value) and value != leaf.default:
            return value
    raise AssertionError(f"{leaf.name} needs a value within its range")
