"""The settings of a config as a tree with dotted names: `model.n_layer`, `data.corpus`."""

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from txl_jax.config.experiment import COMPAT_PRESETS, ExperimentConfig
from txl_jax.config.settings import Setting, setting_of
from txl_jax.errors import UserError

Config = TypeVar("Config")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting of the tree.

    Attributes:
      name: its dotted name.
      type: the declared type without None; for a list the type of an entry.
      is_list: whether the value is a tuple of entries.
      is_optional: whether the value may be None.
      default: the value of a config that was made without arguments.
      setting: help, range and use.
    """

    name: str
    type: type
    is_list: bool
    is_optional: bool
    default: Any
    setting: Setting


def leaves(cls: type = ExperimentConfig, prefix: str = "") -> Iterator[Leaf]:
    """Yields the settings below a config class, in order."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            kind, is_list, is_optional = _unwrap(hint)
            yield Leaf(f"{prefix}{field.name}", kind, is_list, is_optional, field.default, setting_of(field))


def get(config: Any, name: str) -> Any:
    """Returns the value of a dotted name: `get(config, "model.n_layer")`."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def replace(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns a copy of the tree with the dotted names in `values` changed."""
    groups: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            groups.setdefault(head, {})[rest] = value
        else:
            flat[head] = value
    nested = {head: replace(getattr(config, head), rest) for head, rest in groups.items()}
    return dataclasses.replace(config, **flat, **nested)  # type: ignore[type-var]


def apply_preset(config: ExperimentConfig, name: str) -> ExperimentConfig:
    """Returns the config with a preset of `COMPAT_PRESETS`; settings of other presets get their defaults."""
    named = {setting: get(ExperimentConfig(), setting) for preset in COMPAT_PRESETS.values() for setting in preset}
    return replace(config, named | dict(COMPAT_PRESETS[name]))


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the JSON values of a tree, or of a group of one, by dotted name."""
    values = {leaf.name: get(config, leaf.name) for leaf in leaves(type(config))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(values: Mapping[str, Any]) -> ExperimentConfig:
    """Inverts `to_dict`.

    Raises:
      UserError: a name that no setting has (with the nearest ones), or a value of another type.
    """
    known = {leaf.name: leaf for leaf in leaves()}
    for name in values:
        if name not in known:
            raise UserError(f"no setting is called {name!r}{did_you_mean(name, known)}")
    return replace(ExperimentConfig(), {name: _decode(known[name], value) for name, value in values.items()})


def differences(old: Config, new: Config) -> list[tuple[Leaf, Any, Any]]:
    """Returns the settings in which two configs of one class differ, with both values."""
    pairs = ((leaf, get(old, leaf.name), get(new, leaf.name)) for leaf in leaves(type(old)))
    return [(leaf, before, after) for leaf, before, after in pairs if before != after]


def describe_change(leaf: Leaf, old: Any, new: Any) -> str:
    """Describes a change of a setting: "--train.steps was 10 and is now 20"; a setting without a flag has no dashes."""
    return f"{'--' if leaf.setting.flag else ''}{leaf.name} was {format_value(old)} and is now {format_value(new)}"


def format_value(value: Any) -> str:
    """Formats a value as a flag takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean a, b?" with the nearest known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _unwrap(hint: Any) -> tuple[type, bool, bool]:
    """Returns a declared type without None and without tuple, and whether it had them."""
    if isinstance(hint, types.UnionType):
        [inner] = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        kind, is_list, _ = _unwrap(inner)
        return kind, is_list, True
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True, False
    return hint, False, False


def _decode(leaf: Leaf, value: Any) -> Any:
    """Returns the value of a setting from its JSON value; raises `UserError` for one of another type."""
    if value is None and leaf.is_optional:
        return None
    if not leaf.is_list:
        return _decode_entry(leaf, value)
    if not isinstance(value, list | tuple):
        raise UserError(f"{leaf.name} is {value!r}; it must be a list")
    return tuple(_decode_entry(leaf, entry) for entry in value)


def _decode_entry(leaf: Leaf, value: Any) -> Any:
    if issubclass(leaf.type, enum.Enum):
        members = [member.value for member in leaf.type]
        if value not in members:
            raise UserError(f"{leaf.name} is {value!r}; it must be one of {', '.join(members)}")
        return leaf.type(value)
    if leaf.type is float and type(value) is int:  # JSON of other programs writes 1.0 as 1.
        return float(value)
    if type(value) is not leaf.type:
        raise UserError(f"{leaf.name} is {value!r}; it must be of type {leaf.type.__name__}")
    return value
