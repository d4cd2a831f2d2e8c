"""A setting, declared once, and trees of settings with dotted names: `model.n_layer`, `data.corpus`.

Flags, `--help`, config.json, the comparison on resume and the checks of single fields are all derived from the
declaration: default, help, range and use of a field.
"""

import dataclasses
import difflib
import enum
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from txl_jax.errors import UserError

_KEY = "setting"
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Properties of a field beside its name, type and default.

    Attributes:
      help: one sentence for `--help`.
      at_least, above, at_most, below: the range; None: no bound.
      path: a file, or a list of files, that programs make absolute.
      only_with: values of a field beside it, by its name, without which nothing reads this one.
      free_on_resume: may differ when a run is resumed, as it changes the training trajectory by rounding at most.
      shapes_tokens: makes the token ids of a text what they are, so that a trained run keeps it.
      shapes_params: makes trained parameters what they are, so that a warm start keeps it.
      flag: can be set from the command line; else only in code and by presets.
      required: of a program's plan: the program cannot do without it.
      repeated: of a program's plan: a list, of which each flag gives one entry, commas and all.
    """

    help: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    path: bool = False
    only_with: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    free_on_resume: bool = False
    shapes_tokens: bool = False
    shapes_params: bool = False
    flag: bool = True
    required: bool = False
    repeated: bool = False

    def range_text(self) -> str:
        """Describes the range: "at least 0 and below 1"; empty if there is none."""
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)

    def holds(self, value: float) -> bool:
        """Returns whether a number lies in the range."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def setting(default: Any, help: str, **properties: Any) -> Any:
    """Declares a field of a config; `properties` are those of `Setting`."""
    return dataclasses.field(default=default, metadata={_KEY: Setting(help, **properties)})


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """Returns the declaration of a field."""
    return field.metadata[_KEY]


class FieldType(NamedTuple):
    """A declared type.

    Attributes:
      kind: the type without None; for a list the type of an entry.
      is_list: whether a value is a tuple of entries.
      is_optional: whether a value may be None.
    """

    kind: type
    is_list: bool
    is_optional: bool

    def convert(self, name: str, value: Any) -> Any:
        """Returns a value of this type: a string becomes the enum member that it names, an int a float.

        Raises:
          UserError: a value of another type, or no member of the enum.
        """
        if value is None and self.is_optional:
            return None
        if not self.is_list:
            return self._convert_entry(name, value)
        if not isinstance(value, list | tuple):
            raise UserError(f"{name} is {value!r}; it must be a list")
        return tuple(self._convert_entry(name, entry) for entry in value)

    def _convert_entry(self, name: str, value: Any) -> Any:
        if issubclass(self.kind, enum.Enum):
            members = [member.value for member in self.kind]
            if value not in members:
                raise UserError(f"{name} is {value!r}; it must be one of {', '.join(members)}")
            return self.kind(value)
        if self.kind is float and type(value) is int:
            return float(value)
        if type(value) is not self.kind:
            raise UserError(f"{name} is {value!r}; it must be of type {self.kind.__name__}")
        return value


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the type of each field of a config: a `FieldType`, or the class of a group."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: hints[field.name] if dataclasses.is_dataclass(hints[field.name]) else _unwrap(hints[field.name])
        for field in dataclasses.fields(cls)
    }


def _unwrap(hint: Any) -> FieldType:
    if isinstance(hint, types.UnionType):
        [inner] = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return _unwrap(inner)._replace(is_optional=True)
    if typing.get_origin(hint) is tuple:
        return FieldType(typing.get_args(hint)[0], True, False)
    return FieldType(hint, False, False)


class Config:
    """Base of the groups of settings: values have the declared types, and enums may be given by their names."""

    def __post_init__(self) -> None:
        for name, kind in field_types(type(self)).items():  # type: ignore[arg-type]  # mypy: a class has no hash
            if isinstance(kind, FieldType):
                object.__setattr__(self, name, kind.convert(name, getattr(self, name)))


def check_fields(group: Any, prefix: str) -> None:
    """Checks each field of a config by itself: its range, and that something reads it.

    Args:
      group: a dataclass whose fields are declared by `setting`; fields that are groups of their own are left out.
      prefix: its dotted name, such as "train".

    Raises:
      UserError: the first field that is out of its range, or is set where nothing reads it.
    """
    for field in dataclasses.fields(group):
        if _KEY not in field.metadata:
            continue
        value, declared = getattr(group, field.name), setting_of(field)
        name = f"{prefix}.{field.name}" if prefix else field.name
        if isinstance(value, int | float) and not isinstance(value, bool) and not declared.holds(value):
            off = ", or none" if field.default is None else ""
            raise UserError(f"{name} is {value}; it must be {declared.range_text()}{off}")
        if value == field.default:
            continue
        for other, readers in declared.only_with.items():
            found = getattr(group, other)
            require(
                found in readers,
                f"{name} is {value} and {prefix}.{other} is {found}, which does not read it; "
                f"it goes with {', '.join(map(str, readers))}",
            )


def require(condition: Any, message: str) -> None:
    """Raises `UserError` with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


# Trees of settings


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting of a tree: its dotted name, declared type, default (without arguments) and declaration."""

    name: str
    type: FieldType
    default: Any
    setting: Setting


def leaves(cls: type, prefix: str = "") -> Iterator[Leaf]:
    """Yields the settings below a config class, in order."""
    declared = field_types(cls)
    for field in dataclasses.fields(cls):
        kind = declared[field.name]
        if isinstance(kind, FieldType):
            yield Leaf(f"{prefix}{field.name}", kind, field.default, setting_of(field))
        else:
            yield from leaves(kind, f"{prefix}{field.name}.")


def get(config: Any, name: str) -> Any:
    """Returns the value of a dotted name: `get(config, "model.n_layer")`."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def replace(config: Tree, values: Mapping[str, Any]) -> Tree:
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


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the JSON values of a tree, or of a group in it, by dotted name."""
    values = {leaf.name: get(config, leaf.name) for leaf in leaves(type(config))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(cls: type[Tree], values: Mapping[str, Any]) -> Tree:
    """Inverts `to_dict`; settings without a value have their defaults.

    Raises:
      UserError: If no setting has one of the names (with the nearest ones), or a value has another type.
    """
    known = {leaf.name: leaf.type for leaf in leaves(cls)}
    for name in values:
        if name not in known:
            raise UserError(f"no setting is called {name!r}{did_you_mean(name, known)}")
    return replace(cls(), {name: known[name].convert(name, value) for name, value in values.items()})


def differences(old: Tree, new: Tree) -> list[tuple[Leaf, Any, Any]]:
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
