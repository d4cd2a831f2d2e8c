"""The settings of a config as a tree with dotted names: `model.n_layer`, `data.corpus`."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from txl_jax.config.experiment import COMPAT_PRESETS, ExperimentConfig
from txl_jax.config.settings import FieldType, Setting, field_types, setting_of
from txl_jax.config.training import OptimizerName
from txl_jax.errors import UserError

Config = TypeVar("Config")
_PRESETS = Path(__file__).parents[1] / "presets"


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
    declared = field_types(cls)
    for field in dataclasses.fields(cls):
        kind = declared[field.name]
        if isinstance(kind, FieldType):
            yield Leaf(f"{prefix}{field.name}", *kind, field.default, setting_of(field))
        else:
            yield from leaves(kind, f"{prefix}{field.name}.")


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


def preset_names() -> list[str]:
    """Returns the names that `preset` takes."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def preset(name: str) -> ExperimentConfig:
    """Returns a published configuration: the settings of `experiments/flags/NAME.flags`, its sources beside them.

    >>> preset("enwik8_12l").model.n_layer
    12

    Raises:
      UserError: there is none of this name; the message has all names.
    """
    if name not in (known := preset_names()):
        raise UserError(f"there is no preset {name!r} among {', '.join(known)}{did_you_mean(name, known)}")
    return from_dict(json.loads((_PRESETS / f"{name}.json").read_text()))


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
    if values.get("optimizer.weight_decay") and "optimizer.name" not in values:
        values = {**values, "optimizer.name": OptimizerName.ADAMW}  # A run from before optimizers had names.
    return replace(ExperimentConfig(), {name: _convert(known[name], value) for name, value in values.items()})


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


def _convert(leaf: Leaf, value: Any) -> Any:
    """Returns the value of a setting from its JSON value; raises `UserError` for one of another type."""
    return FieldType(leaf.type, leaf.is_list, leaf.is_optional).convert(leaf.name, value)
