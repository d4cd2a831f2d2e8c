"""The settings of a config as a tree with dotted names: `model.n_layer`, `data.corpus`."""

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterator
from typing import Any

from txl_jax.config import ExperimentConfig


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting of the tree: its dotted name, declared type and owning dataclass field."""

    name: str
    type: Any
    field: dataclasses.Field
    owner: type


def leaves(cls: type = ExperimentConfig, prefix: str = "") -> Iterator[Leaf]:
    """The settings below a config class, in order."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from leaves(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield Leaf(f"{prefix}{field.name}", hints[field.name], field, cls)


def get(config: Any, name: str) -> Any:
    """The value of a dotted name: `get(config, "model.n_layer")`."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def replace(config: Any, values: dict[str, Any]) -> Any:
    """A copy of the tree with the dotted names in `values` changed."""
    groups: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            groups.setdefault(head, {})[rest] = value
        else:
            flat[head] = value
    nested = {head: replace(getattr(config, head), rest) for head, rest in groups.items()}
    return dataclasses.replace(config, **flat, **nested)


def to_dict(config: Any) -> dict[str, Any]:
    """Dotted names of a tree, or of a group of one, to JSON values."""
    values = {leaf.name: get(config, leaf.name) for leaf in leaves(type(config))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(values: dict[str, Any]) -> ExperimentConfig:
    """The inverse of `to_dict`.

    Raises:
      ValueError: a name that no setting has (with the nearest ones).
    """
    known = {leaf.name: leaf for leaf in leaves()}
    for name in values:
        if name not in known:
            raise ValueError(f"no setting is called {name!r}{did_you_mean(name, known)}")
    return replace(ExperimentConfig(), {name: _decode(known[name].type, value) for name, value in values.items()})


def differences(old: ExperimentConfig, new: ExperimentConfig) -> list[tuple[Leaf, Any, Any]]:
    """The settings in which two configs differ, with both values."""
    pairs = ((leaf, get(old, leaf.name), get(new, leaf.name)) for leaf in leaves())
    return [(leaf, before, after) for leaf, before, after in pairs if before != after]


def describe_change(leaf: Leaf, old: Any, new: Any) -> str:
    """'--train.steps was 10 and is now 20'."""
    return f"--{leaf.name} was {old!s} and is now {new!s}"


def did_you_mean(name: str, known: Any) -> str:
    """'; did you mean a, b?' with the nearest known names, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _decode(kind: Any, value: Any) -> Any:
    if isinstance(kind, types.GenericAlias):
        return tuple(value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, enum.Enum) else value
