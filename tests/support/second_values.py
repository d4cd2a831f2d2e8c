"""Second values of the settings of a plan or a config, which differ from the defaults.

Numbers and texts also differ from each other, so that a value at the wrong setting is noticed.

The values follow from the declared types and ranges, so that a new setting gets one without a line
here.
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
    """Returns a value for each setting of a class that is a flag, by its name.

    Args:
      kind: The class: a plan or a config.
      start_at: Number of the first setting, from which its value is made. The others count on.
      chosen: Values that tests choose, by name.
    """
    chosen = chosen or {}
    values = {}
    for number, leaf in enumerate(flag_tree.setting_leaves(kind), start=start_at):
        value = _value(leaf, number)
        if leaf.name in chosen:
            value = chosen[leaf.name]
        values[leaf.name] = leaf.type.convert(leaf.name, value)
    return values


def as_flags(kind: type, values: Mapping[str, Any]) -> list[str]:
    """Returns the flags that give settings these values."""
    words = []
    for leaf in flag_tree.setting_leaves(kind):
        if leaf.name not in values:
            continue
        entries = [values[leaf.name]]
        if leaf.setting.repeated:
            entries = values[leaf.name]
        for entry in entries:
            words.append(f"--{flag_tree.flag_name(leaf)}={config_tree.format_value(entry)}")
    return words


def _value(leaf: NamedSetting, number: int) -> Any:
    """Returns a value that differs from the default, and through `number` from other settings."""
    if not leaf.type.is_list:
        return _entry(leaf, number, leaf.name)

    second_name = f"{leaf.name}-again"
    if leaf.setting.repeated:
        # A comma does not divide the value of a repeated flag.
        second_name = f"{leaf.name}, again"
    return _entry(leaf, number, leaf.name), _entry(leaf, number + 5000, second_name)


def _entry(leaf: NamedSetting, number: int, name: str) -> Any:
    """Returns the value of a setting, or one entry of its list."""
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
        # The whole text is one value.
        return f"{name}, {number} = x"
    return _number(leaf, number)


def _number(leaf: NamedSetting, number: int) -> int | float:
    """Returns an int or float within the range of a setting."""
    candidates: list[int | float] = [number]
    if leaf.type.kind is float:
        # The second is for settings below 1.
        candidates = [number + 0.5, 1 / number]
    for value in candidates:
        if value != leaf.default and not leaf.setting.missed_range(value):
            return value
    raise AssertionError(f"{leaf.name} needs a value within its range")
