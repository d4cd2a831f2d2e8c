"""A setting, declared once, and trees of settings with dotted names.

`model.n_layer` and `data.corpus` are examples of dotted names.

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
    # Bounds of a number: at_least and at_most are inclusive, above and below exclusive. None means
    # no bound.
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    # Whether the value is a path, or a list of paths, that commands make absolute.
    path: bool = False
    # Values of other fields of the group, by name, that this field is used with. With any other
    # value this field has no effect, so it must keep its default.
    only_with: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # Other fields of the group that must be off, empty or 0 if this one is set.
    not_with: tuple[str, ...] = ()
    # Whether it may differ when a run is resumed, because it changes training by rounding at most.
    free_on_resume: bool = False
    # Whether it may grow when a run is resumed. It must not fall below the steps that are done.
    may_grow: bool = False
    # Whether the token ids of a text depend on it, so that a trained run keeps it.
    shapes_tokens: bool = False
    # Whether trained parameters depend on it, so that a warm start keeps it.
    shapes_params: bool = False
    # Whether it has a flag. Without one, only code and presets can set it.
    flag: bool = True
    # In a command's plan: whether code is loaded from it, so that it must be typed, not set in a
    # flagfile.
    loads_code: bool = False
    # In a command's plan: whether the command requires it.
    required: bool = False
    # In a command's plan: whether it is a list whose flag is repeated once per entry, so that
    # entries can contain commas.
    repeated: bool = False

    def missed_range(self, value: float) -> str:
        """Returns the range that a number is outside of, as in "at least 0 and below 1".

        Returns an empty string if the number is in the range, or the setting has no bounds. nan is
        outside every range that has a bound, because comparisons with nan are false.
        """
        is_inside = True
        bounds = []
        if self.at_least is not None:
            is_inside = is_inside and value >= self.at_least
            bounds.append(f"at least {self.at_least}")
        if self.above is not None:
            is_inside = is_inside and value > self.above
            bounds.append(f"above {self.above}")
        if self.at_most is not None:
            is_inside = is_inside and value <= self.at_most
            bounds.append(f"at most {self.at_most}")
        if self.below is not None:
            is_inside = is_inside and value < self.below
            bounds.append(f"below {self.below}")
        return "" if is_inside else " and ".join(bounds)


def setting(default: Any, help: str, **properties: Any) -> Any:
    """Declares a field of a config. `properties` are the fields of `Setting`."""
    return dataclasses.field(default=default, metadata={_KEY: Setting(help, **properties)})


# A setting that may differ when a run is resumed, and a setting that trained parameters depend on.
free_setting = functools.partial(setting, free_on_resume=True)
shape_setting = functools.partial(setting, shapes_params=True)


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """Returns the declaration of a field."""
    return field.metadata[_KEY]


class FieldType(NamedTuple):
    """A declared type."""

    kind: type  # The type without None, or the type of an entry for a list.
    is_list: bool = False  # Whether a value is a tuple of entries.
    is_optional: bool = False  # Whether a value may be None.

    def convert(self, name: str, value: Any) -> Any:
        """Converts enum members from their names, floats from ints, and lists to tuples.

        Args:
          name: The setting's name, for errors.
          value: The value, for example from JSON or code.

        Raises:
          UserError: If the value has another type, is not a member of the enum, or is an int of 64
            bits or more.
        """
        if value is None and self.is_optional:
            return None

        if self.is_list:
            require(isinstance(value, list | tuple), f"{name} must be a list, got {value!r}")
            entry_type = FieldType(self.kind)
            return tuple(entry_type.convert(name, entry) for entry in value)

        if issubclass(self.kind, enum.Enum):
            require(
                value in list(self.kind),
                f"{name} must be one of {', '.join(self.kind)}, got {value!r}",
            )
            return self.kind(value)

        # isinstance counts a bool as an int.
        is_int = type(value) is int
        require(not is_int or abs(value) < 1 << 63, f"{name} must be below 2^63, got {value}")
        if self.kind is float and is_int:
            return float(value)

        require(
            type(value) is self.kind, f"{name} must be of type {self.kind.__name__}, got {value!r}"
        )
        return value


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Returns the type of each field of a config: a `FieldType`, or the class of a group."""
    hints = typing.get_type_hints(cls)
    kinds = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kinds[field.name] = hint if dataclasses.is_dataclass(hint) else _field_type(hint)
    return kinds


def _field_type(hint: Any) -> FieldType:
    """Returns the type of an annotation such as `int`, `int | None` or `tuple[int, ...]`."""
    options: tuple[Any, ...] = (hint,)
    if isinstance(hint, types.UnionType):
        options = typing.get_args(hint)
    [kind] = (option for option in options if option is not type(None))

    is_optional = len(options) > 1
    entry_types = typing.get_args(kind)  # Empty unless it is a tuple.
    if entry_types:
        return FieldType(entry_types[0], is_list=True, is_optional=is_optional)
    return FieldType(kind, is_optional=is_optional)


class Config:
    """Base of the groups of settings.

    Values have the declared types, and enums may be passed by name.
    """

    prefix: ClassVar[str]  # Prefix of the group's settings in a tree, such as "model.".

    def __init_subclass__(cls, prefix: str = "") -> None:
        cls.prefix = prefix

    def __post_init__(self) -> None:
        # mypy: a class has no hash
        for name, kind in field_types(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(kind, FieldType):
                # The dataclass is frozen.
                object.__setattr__(self, name, kind.convert(name, value))
            else:
                require(
                    isinstance(value, kind),
                    f"{name} must be of type {kind.__name__}, got {type(value).__name__}. "
                    f"Write {name}={kind.__name__}(...).",
                )

    def validate(self) -> None:
        """Raises `UserError` if a setting is out of range, has no effect or contradicts another."""
        # Subclasses are dataclasses.
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Config):
                value.validate()
            else:
                self._validate_setting(field, value)

    def _validate_setting(self, field: dataclasses.Field[Any], value: Any) -> None:
        """Checks a value against its own declaration."""
        declared = setting_of(field)
        name = f"{self.prefix}{field.name}"
        if isinstance(value, int | float):
            missed_range = declared.missed_range(value)
            or_none = ", or none" if field.default is None else ""
            require(not missed_range, f"{name} must be {missed_range}{or_none}, got {value}")

        # A setting with its default value counts as not set, so it cannot contradict another.
        if value == field.default:
            return
        for other, readers in declared.only_with.items():
            other_value = getattr(self, other)
            require(
                other_value in readers,
                f"{self.prefix}{other} must be {' or '.join(map(str, readers))} "
                f"for {name}={format_value(value)}, got {format_value(other_value)}",
            )
        for other in declared.not_with:
            other_value = getattr(self, other)
            require(
                not other_value,
                f"{name} is {format_value(value)} and {self.prefix}{other} is "
                f"{format_value(other_value)}. Set only one of them.",
            )

    def expect(self, holds: Any, names: str, advice: str) -> None:
        """Raises `UserError` unless the condition holds.

        Args:
          holds: The condition.
          names: Names of settings in this group, separated by spaces. The error states their
            values, as in "model.network is lstm and model.encoding is relative."
          advice: A sentence without its full stop, which follows the values.
        """
        if holds:
            return
        values = []
        for name in names.split():
            value = format_value(get(self, name)) or "empty"
            values.append(f"{self.prefix}{name} is {value}")
        raise UserError(f"{' and '.join(values)}. {advice}.")


def require(condition: Any, message: str) -> None:
    """Raises `UserError` with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


# Trees of settings


@dataclasses.dataclass(frozen=True)
class NamedSetting:
    """One setting of a tree."""

    name: str  # Dotted name, such as "model.n_layer".
    type: FieldType  # Declared type.
    default: Any  # Value in a config that is created without arguments.
    setting: Setting  # Declaration.


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
    # New values of this group's own fields, and the names and values that go to each inner group.
    changes: dict[str, Any] = {}
    inner_values: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            inner_values.setdefault(head, {})[rest] = value
        else:
            changes[head] = value

    for group, values_of_group in inner_values.items():
        changes[group] = replace(getattr(config, group), values_of_group)
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the JSON values of a tree, or of a group in it, by dotted name."""
    values = {}
    for leaf in leaves(type(config)):
        value = get(config, leaf.name)
        if isinstance(value, tuple):
            value = list(value)
        values[leaf.name] = value
    return values


def from_dict(cls: type[Tree], values: Mapping[str, Any]) -> Tree:
    """Inverts `to_dict`, with defaults for other settings.

    Raises `UserError` for an unknown name or another type.
    """
    known_types = {leaf.name: leaf.type for leaf in leaves(cls)}
    for name in values:
        if name not in known_types:
            raise UserError(f"unknown setting {name!r}{did_you_mean(name, known_types)}")
    converted = {name: known_types[name].convert(name, value) for name, value in values.items()}
    return replace(cls(), converted)


def differences(old: Tree, new: Tree) -> list[tuple[NamedSetting, Any, Any]]:
    """Returns the settings in which two configs of one class differ, with both values."""
    changed = []
    for leaf in leaves(type(old)):
        before = get(old, leaf.name)
        after = get(new, leaf.name)
        if before != after:
            changed.append((leaf, before, after))
    return changed


def describe_change(leaf: NamedSetting, old: Any, new: Any) -> str:
    """Describes a changed setting, as in "--train.steps was 10 and is now 20".

    The dashes are omitted if the setting has no flag.
    """
    dashes = "--" if leaf.setting.flag else ""
    return f"{dashes}{leaf.name} was {format_value(old)} and is now {format_value(new)}"


def format_value(value: Any) -> str:
    """Formats a value the way its flag accepts it.

    Entries of a list that contain commas or quotation marks are quoted.

    >>> format_value(("War, and Peace.txt", "c.txt"))
    '"War, and Peace.txt",c.txt'
    """
    if isinstance(value, tuple | list):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(map(str, value))
        return line.getvalue()
    return "none" if value is None else str(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ". Did you mean a or b?" with the closest known names, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f". Did you mean {' or '.join(near)}?" if near else ""
