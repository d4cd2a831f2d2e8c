"""A setting, declared once, and trees of settings with dotted names.

Examples of such names are `model.n_layer` and `data.corpus`.

Flags, `--help`, config.json, the comparison on resume and the checks of single settings follow from
the declaration.
"""

import csv
import dataclasses
import difflib
import enum
import functools
import io
import operator
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from txl_jax.errors import UserError

_KEY = "setting"
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Properties of a field, in addition to its name, type and default."""

    # One sentence for `--help`.
    help: str
    # The range. None means no bound.
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    # A file, or a list of files, that programs make absolute.
    path: bool = False
    # Values of another field of the group, by its name, without which nothing reads this one.
    only_with: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # Other fields of the group that must be off, empty or 0 where this one is set.
    not_with: tuple[str, ...] = ()
    # May differ when a run is resumed: it changes the training by rounding at most.
    free_on_resume: bool = False
    # May differ too, from the step that is reached, but not fall below what is done.
    may_grow: bool = False
    # Makes the token ids of a text what they are, so that a trained run keeps it.
    shapes_tokens: bool = False
    # Makes trained parameters what they are, so that a warm start keeps it.
    shapes_params: bool = False
    # Can be set from the command line, otherwise only in code and by presets.
    flag: bool = True
    # Of a program's plan: code is loaded from it, so it must be typed, not in a flagfile.
    loads_code: bool = False
    # Of a program's plan: the program cannot do without it.
    required: bool = False
    # Of a program's plan: a list, of which each flag gives one entry, commas and all.
    repeated: bool = False

    def missed_range(self, value: float) -> str:
        """Returns the range that a number is outside of, as in "at least 0 and below 1".

        Returns an empty string if the number is in the range.
        """
        bounds = [
            ("at least", self.at_least, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.at_most, operator.le),
            ("below", self.below, operator.lt),
        ]
        given = [(word, bound, holds) for word, bound, holds in bounds if bound is not None]
        if all(holds(value, bound) for _, bound, holds in given):
            return ""
        return " and ".join(f"{word} {bound}" for word, bound, _ in given)


def setting(default: Any, help: str, **properties: Any) -> Any:
    """Declares a field of a config. `properties` are the fields of `Setting`."""
    return dataclasses.field(default=default, metadata={_KEY: Setting(help, **properties)})


free_setting = functools.partial(setting, free_on_resume=True)
shape_setting = functools.partial(setting, shapes_params=True)


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """Returns the declaration of a field."""
    return field.metadata[_KEY]


class FieldType(NamedTuple):
    """A declared type."""

    kind: type  # The type without None. For a list the type of an entry.
    is_list: bool = False  # Whether a value is a tuple of entries.
    is_optional: bool = False  # Whether a value may be None.

    def convert(self, name: str, value: Any) -> Any:
        """Converts enum members from their names and floats from ints.

        Raises `UserError` for another type or name.
        """
        if value is None and self.is_optional:
            return None
        if self.is_list:
            require(isinstance(value, list | tuple), f"{name} must be a list, got {value!r}")
            return tuple(FieldType(self.kind).convert(name, entry) for entry in value)
        if issubclass(self.kind, enum.Enum):
            require(
                value in list(self.kind),
                f"{name} must be one of {', '.join(self.kind)}, got {value!r}",
            )
            return self.kind(value)
        require(
            type(value) is not int or abs(value) < 1 << 63,
            f"{name} must be below 2^63, got {value}",
        )
        if self.kind is float and type(value) is int:
            return float(value)
        require(
            type(value) is self.kind, f"{name} must be of type {self.kind.__name__}, got {value!r}"
        )
        return value


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the type of each field of a config: a `FieldType`, or the class of a group."""
    hints = typing.get_type_hints(cls)
    found = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {
        name: hint if dataclasses.is_dataclass(hint) else _field_type(hint)
        for name, hint in found.items()
    }


def _field_type(hint: Any) -> FieldType:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    [kind] = (option for option in options if option is not type(None))
    entries = typing.get_args(kind)  # Empty unless it is a tuple.
    return FieldType(
        entries[0] if entries else kind, is_list=bool(entries), is_optional=len(options) > 1
    )


class Config:
    """Base of the groups of settings.

    Values have the declared types, and enums may be passed by name.
    """

    prefix: ClassVar[str]  # Of the names of the group's settings in a tree, such as "model.".

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = prefix

    def __post_init__(self) -> None:
        # mypy: a class has no hash
        for name, kind in field_types(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(kind, FieldType):
                object.__setattr__(self, name, kind.convert(name, value))
            else:
                got, own = type(value).__name__, kind.__name__
                require(
                    isinstance(value, kind),
                    f"{name} must be of type {own}, got {got}. Write {name}={own}(...).",
                )

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, has no effect or contradicts another."""
        # Subclasses are dataclasses.
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Config):
                value.validate()
                continue
            declared = setting_of(field)
            if isinstance(value, int | float) and (wanted := declared.missed_range(value)):
                off = ", or none" if field.default is None else ""
                raise UserError(f"{self.prefix}{field.name} must be {wanted}{off}, got {value}")
            if value == field.default:
                continue
            for other, readers in declared.only_with.items():
                got, one_of = getattr(self, other), " or ".join(map(str, readers))
                reason = f"for {self.prefix}{field.name}={format_value(value)}"
                require(
                    got in readers, f"{self.prefix}{other} must be {one_of} {reason}, got {got}"
                )
            for other in declared.not_with:
                self.expect(
                    not getattr(self, other), f"{field.name} {other}", "Set only one of them"
                )

    def expect(self, holds: Any, names: str, advice: str) -> None:
        """Raises `UserError` unless the condition holds.

        The error has the values of the settings in `names`, and the advice.
        """
        if not holds:
            found = (
                f"{self.prefix}{name} is {format_value(get(self, name)) or 'empty'}"
                for name in names.split()
            )
            raise UserError(f"{' and '.join(found)}. {advice}.")


def require(condition: Any, message: str) -> None:
    """Raises `UserError` with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


# Trees of settings


@dataclasses.dataclass(frozen=True)
class NamedSetting:
    """One setting of a tree: its dotted name, declared type, default and declaration.

    The default is the value without arguments.
    """

    name: str
    type: FieldType
    default: Any
    setting: Setting


def leaves(cls: type, prefix: str = "") -> Iterator[NamedSetting]:
    """Yields the settings below a config class, in order."""
    declared = field_types(cls)
    for field in dataclasses.fields(cls):
        kind = declared[field.name]
        if isinstance(kind, FieldType):
            yield NamedSetting(f"{prefix}{field.name}", kind, field.default, setting_of(field))
        else:
            yield from leaves(kind, f"{prefix}{field.name}.")


def get(config: Any, name: str) -> Any:
    """Returns the value of a dotted name: `get(config, "model.n_layer")`."""
    return operator.attrgetter(name)(config)


def replace(config: Tree, values: Mapping[str, Any]) -> Tree:
    """Returns a copy of the tree with the dotted names in `values` changed."""
    changes: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            groups.setdefault(head, {})[rest] = value
        else:
            changes[head] = value
    changes |= {head: replace(getattr(config, head), inner) for head, inner in groups.items()}
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the JSON values of a tree, or of a group in it, by dotted name."""
    values = {leaf.name: get(config, leaf.name) for leaf in leaves(type(config))}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def from_dict(cls: type[Tree], values: Mapping[str, Any]) -> Tree:
    """Inverts `to_dict`, with defaults for other settings.

    Raises `UserError` for an unknown name or another type.
    """
    known = {leaf.name: leaf.type for leaf in leaves(cls)}
    for name in values:
        if name not in known:
            raise UserError(f"unknown setting {name!r}{did_you_mean(name, known)}")
    return replace(
        cls(), {name: known[name].convert(name, value) for name, value in values.items()}
    )


def differences(old: Tree, new: Tree) -> list[tuple[NamedSetting, Any, Any]]:
    """Returns the settings in which two configs of one class differ, with both values."""
    pairs = ((leaf, get(old, leaf.name), get(new, leaf.name)) for leaf in leaves(type(old)))
    return [(leaf, before, after) for leaf, before, after in pairs if before != after]


def describe_change(leaf: NamedSetting, old: Any, new: Any) -> str:
    """Describes a changed setting, as in "--train.steps was 10 and is now 20".

    The dashes are omitted if the setting has no flag.
    """
    return (
        f"{'--' if leaf.setting.flag else ''}{leaf.name} was {format_value(old)} and is now "
        f"{format_value(new)}"
    )


def format_value(value: Any) -> str:
    """Formats a value as a flag takes it.

    Entries of a list that contain commas or quotation marks are quoted.

    >>> format_value(("War, and Peace.txt", "c.txt"))
    '"War, and Peace.txt",c.txt'
    """
    if isinstance(value, tuple | list):
        entries = io.StringIO()
        csv.writer(entries, lineterminator="").writerow(map(str, value))
        return entries.getvalue()
    return "none" if value is None else str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ". Did you mean a, b?" with the nearest known names, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f". Did you mean {' or '.join(near)}?" if near else ""
