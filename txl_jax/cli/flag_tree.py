"""Builds absl flags from a tree of settings, and the tree from the parsed flags.

Every setting of `ExperimentConfig` is a flag with the same dotted name, `--model.n_layer`, and so
is every setting of a command's plan, without a prefix. `--compat=NAME` applies the settings of an
implementation first. A flagfile is found by its bare name: `--flagfile=enwik8_12l` is the file in
`experiments/flags`, or outside of a clone the preset with the same settings. The last value of a
flag counts. A setting that may be None takes the word "none".
"""

import contextlib
import enum
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from absl import flags

from txl_jax.config import COMPAT_PRESETS, CorpusName, ExperimentConfig, config_tree
from txl_jax.config.config_tree import FieldType, NamedSetting, did_you_mean, format_value, require
from txl_jax.config.experiment import apply_preset, preset, preset_names
from txl_jax.data.published import default_data
from txl_jax.errors import UserError
from txl_jax.runtime import storage
from txl_jax.runtime.storage import as_path, expand_home, is_remote

FLAGS = flags.FLAGS
FLAGFILE_DIR = Path(__file__).parents[2] / "experiments/flags"  # In a clone.
NONE = "none"
_MOST_FLAGFILES = 100  # Of one command. Files that each include the next one twice would never end.
_OFF = "off"  # Of the compilation cache.
_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}

Settings = TypeVar("Settings")


def define(defaults: ExperimentConfig, flag_values: flags.FlagValues = FLAGS) -> None:
    """Defines one flag per setting, with `defaults` as default values, and the preset."""
    flags.DEFINE_enum(
        "compat", None, sorted(COMPAT_PRESETS), "Implementation to match.", flag_values=flag_values
    )
    for leaf in setting_leaves(ExperimentConfig):
        _define_leaf(leaf, config_tree.get(defaults, leaf.name), flag_values)


def define_plan(plan: type) -> None:
    """Defines one flag per setting of a plan, a dataclass of `setting` fields.

    The plan's own settings come first, then its bases'.
    """
    order = [name for cls in plan.__mro__ for name in vars(cls).get("__annotations__", {})]
    for leaf in sorted(setting_leaves(plan), key=lambda leaf: order.index(leaf.name)):
        _define_leaf(leaf, leaf.default, FLAGS)


def setting_leaves(cls: type) -> list[NamedSetting]:
    """Returns the settings below a config class that are flags."""
    return [leaf for leaf in config_tree.leaves(cls) if leaf.setting.flag]


def groups() -> list[str]:
    """Returns the groups of a config's settings, in order, such as "model" and "model.dropout"."""
    names = [leaf.name.rpartition(".")[0] for leaf in setting_leaves(ExperimentConfig)]
    return list(dict.fromkeys(filter(None, names)))


def flag_name(leaf: NamedSetting) -> str:
    """Returns the name of a setting's flag.

    A field named after a Python keyword has an underscore, which the flag omits.
    """
    return leaf.name.removesuffix("_")


def given(flag_values: flags.FlagValues = FLAGS, cls: type = ExperimentConfig) -> dict[str, Any]:
    """Returns the settings that the command line or a flagfile set, with their values."""
    found = {leaf.name: flag_values[flag_name(leaf)] for leaf in setting_leaves(cls)}
    return {name: flag.value for name, flag in found.items() if flag.present}


def build(base: ExperimentConfig, flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    """Returns `base` with the preset and the passed settings.

    It also has the settings derived from them, and absolute paths.
    """
    if compat := flag_values["compat"].value:
        base = apply_preset(base, compat)
    # Of each flag the last value: one after --flagfile wins over the file's.
    chosen = given(flag_values)
    return _with_absolute_paths(
        config_tree.replace(_for_other_text(base, chosen), chosen).resolved()
    )


def build_plan(plan: type[Settings]) -> Settings:
    """Returns a command's plan with the passed settings.

    Raises `UserError` if a required one is missing.
    """
    found = given(cls=plan)
    for leaf in setting_leaves(plan):
        missing = leaf.setting.required and not found.get(leaf.name)
        name = flag_name(leaf)
        require(not missing, f"--{name} is required: {leaf.setting.help} Pass --{name}=...")
    return _with_absolute_paths(plan(**found))


def _for_other_text(base: ExperimentConfig, chosen: dict[str, Any]) -> ExperimentConfig:
    """Returns `base` without its files or its tokenizer if the settings replace them.

    The files are dropped if other files are set, and the tokenizer if another kind is set.
    """
    reset, data, files = (
        [],
        base.data,
        [f"data.{name}" for name in ("file", "train", "valid", "test")],
    )
    if chosen.get("data.corpus", data.corpus) != data.corpus or chosen.keys() & set(files):
        reset += files
    if chosen.get("data.tokenizer.kind", data.tokenizer.kind) != data.tokenizer.kind:
        leaves = config_tree.leaves(ExperimentConfig)
        reset += [leaf.name for leaf in leaves if leaf.setting.shapes_tokens] + ["data.order"]
    elif chosen.get("data.tokenizer.vocab_file"):
        reset.append("data.tokenizer.min_count")
    return config_tree.replace(
        base, {name: config_tree.get(ExperimentConfig(), name) for name in reset}
    )


def _with_absolute_paths(settings: Settings) -> Settings:
    """Returns a config or a plan that means the same in any directory."""

    def absolute(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(absolute, value))
        return (
            as_path(value)
            if is_remote(value or "")
            else value and os.path.abspath(expand_home(value))
        )

    paths = [leaf.name for leaf in config_tree.leaves(type(settings)) if leaf.setting.path]
    return config_tree.replace(
        settings, {name: absolute(config_tree.get(settings, name)) for name in paths}
    )


# `words`, `places` and `flagfile` of a `cli.Job`.
Parsed = tuple[list[str], dict[str, str], str | None]


def parse(
    argv: Sequence[str], flag_values: flags.FlagValues = FLAGS, *, takes_words: bool = False
) -> Parsed:
    """Parses a command line: (words, places, flagfile) of a `cli.Job`.

    Prints a note for each flag that a later flagfile overrides. Raises `UserError` if a flag is
    unknown (with the nearest names), a value has the wrong type, or a word is not a flag.
    """
    program, *typed = argv
    words = list(_expanded(map(_Word, typed)))
    last: dict[str, _Word] = {}
    for word in words:
        if name := word.name(flag_values):
            if word.where and name in last and not last[name].where:
                line = (
                    f"note: {last[name].text} is overridden by {word.where}{word.text}. "
                    "Put it after --flagfile."
                )
                print(line, file=sys.stderr, flush=True)
            last[name] = word
    places = {name: word.where for name, word in last.items()}
    try:
        rest = flag_values([program, *(word.text for word in words)])
    except flags.Error as error:
        name, message = getattr(error, "flagname", ""), str(error)
        if name:
            near = did_you_mean(name, list(flag_values)) or ". --help lists all flags."
            message = f"unknown flag --{name}{near}"
        elif named := re.match(r"flag --([\w.]+)", message):
            name = named[1]
        raise UserError(f"{places.get(name, '')}{message}") from None
    if len(rest) > 1 and not takes_words:
        raise UserError(f"{rest[1]!r} is not a flag. Write flags as --name=value.")
    files = re.findall(r"(?m)^--?flagfile[=\n](.*)", "\n".join(typed))
    return rest[1:], places, Path(files[-1]).stem if files else None


class _Word(NamedTuple):
    """A word of the command line, or a line of a flagfile."""

    text: str
    where: str = ""  # "FILE, line N: ". Empty on the command line.

    def name(self, flag_values: flags.FlagValues) -> str | None:
        """Returns the name of the flag that the word sets, or None."""
        if not (match := re.match(r"--?([\w.]+)", self.text)):
            return None
        name = match[1]
        return (
            name[2:]
            if name not in flag_values and name.startswith("no") and name[2:] in flag_values
            else name
        )


def _expanded(
    words: Iterable[_Word], inside: tuple[Path, ...] = (), numbers: Iterator[int] | None = None
) -> Iterator[_Word]:
    """Yields the words, with flagfiles replaced by their lines.

    By itself, absl would not find a bare name inside a file.

    `inside` are the files that contain the words, and `numbers` counts all files that were read.
    Raises `UserError` if a file does not exist (listing the known names), cannot be read, or
    includes itself, or if there are too many.
    """
    words = iter(words)
    numbers = itertools.count(1) if numbers is None else numbers
    for word in words:
        match = re.fullmatch(r"--?flagfile(?:=(.*))?", word.text)
        if match is None:
            yield word
            continue
        following = None if match[1] is not None else next(words, None)
        name = following.text if following else match[1] or ""
        paths = (Path(expand_home(name)), FLAGFILE_DIR / f"{name}.flags", FLAGFILE_DIR / name)
        if (path := next(filter(_is_flagfile, paths), None)) is None:
            yield from _preset_words(name, word.where)
            continue
        require(
            path not in inside, f"{word.where}the flagfile {path} includes itself. Remove the line."
        )
        many = (
            f"{word.where}a command must read at most {_MOST_FLAGFILES} flagfiles, and "
            f"{path} is one more"
        )
        require(next(numbers) <= _MOST_FLAGFILES, f"{many}. Remove repeated lines.")
        try:
            lines = enumerate(storage.read_text(path).splitlines(), start=1)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{word.where}the flagfile {path} cannot be read as text ({error})"
            ) from None
        found = (_Word(line.strip(), f"{path}, line {number}: ") for number, line in lines)
        kept = (line for line in found if line.text and not line.text.startswith(("#", "//")))
        yield from _expanded(kept, (*inside, path), numbers)


def _is_flagfile(path: Path) -> bool:
    return path.is_file() or storage.is_pipe(path)


def _preset_words(name: str, where: str) -> Iterator[_Word]:
    """Yields a preset's changes as flags.

    Raises `UserError`, with all names, if the name is unknown.
    """
    known = preset_names()
    missing = f"{where}the flagfile must be a path or one of {', '.join(known)}, got {name!r}"
    require(name in known, f"{missing}{did_you_mean(name, known)}")
    config = preset(name)
    compat = next(  # Its settings have no flags of their own.
        each
        for each in COMPAT_PRESETS
        if all(
            leaf.setting.flag
            for leaf, *_ in config_tree.differences(config, apply_preset(config, each))
        )
    )
    # A flagfile does not list others either, so that a command's corpus, a record and a warm start
    # keep theirs.
    usual = apply_preset(ExperimentConfig(data=default_data(config.data.corpus)), compat)
    changed = {
        leaf.name: value
        for leaf, value, _ in config_tree.differences(config, usual)
        if leaf.setting.flag
    }
    if config.data.corpus is not CorpusName.TEXT:
        changed["data.corpus"] = config.data.corpus
    if compat != "ours":
        changed["compat"] = compat
    for flag, value in changed.items():
        yield _Word(f"--{flag}={format_value(value)}", f"preset {name}: ")


def refuse_code(plan: Any, places: Mapping[str, str]) -> None:
    """Raises `UserError` if a flagfile sets a directory from which code is loaded.

    The reason is that flagfiles are passed on.
    """
    for leaf in config_tree.leaves(type(plan)):
        place = places.get(flag_name(leaf), "")
        value = config_tree.get(plan, leaf.name)
        if leaf.setting.loads_code and place and value and value != NONE and value != _OFF:
            raise UserError(
                f"{place}--{leaf.name} must be typed, because code is loaded from it, got {value} "
                "in a flagfile. Remove the line, and pass the flag on the command line."
            )


@contextlib.contextmanager
def naming_places(places: Mapping[str, str], base: str) -> Iterator[None]:
    """Adds to an error where the settings that it names come from, if the user has not typed them.

    `base` is the origin of settings that no flagfile sets either.
    """
    try:
        yield
    except UserError as error:
        known = {leaf.name for leaf in config_tree.leaves(ExperimentConfig)}
        named = dict.fromkeys(
            name.rstrip(".") for name in re.findall(r"[a-z_]+(?:\.\w+)+", str(error))
        )
        origins = []
        for name in named:
            place = places.get(name, base)
            if name in known and place:
                origins.append(f"{name} comes from {place.rstrip(': ')}")
        if not origins:
            raise
        raise UserError(f"{error} ({'; '.join(origins)})") from error


class SettingParser(flags.ArgumentParser, flags.ArgumentSerializer):
    """Parses a flag's text into a value of its setting's type."""

    def __init__(self, type: FieldType):
        self._type = type
        self.enum_values = (
            [each.value for each in type.kind] if issubclass(type.kind, enum.Enum) else []
        )

    def parse(self, argument: Any) -> Any:
        """Returns the value, or a default as it is.

        Raises `ValueError`, with the expected type, if it is invalid.
        """
        if not isinstance(argument, str):
            return argument
        if self._type.is_optional and argument.lower() == NONE:
            return None
        if self._type.is_list:
            return tuple(map(self._entry, flags.ListParser().parse(argument)))
        return self._entry(argument)

    def serialize(self, value: Any) -> str:
        """Inverts `parse`."""
        return format_value(value)

    def _entry(self, text: str) -> Any:
        kind = self._type.kind
        try:
            return _BOOLEANS[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            expected = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind)
            if self.enum_values:
                expected = f"one of {', '.join(self.enum_values)}"
            raise ValueError(
                f"must be {expected}, got {text!r}{did_you_mean(text, self.enum_values)}"
            ) from None


def _define_leaf(leaf: NamedSetting, default: Any, flag_values: flags.FlagValues) -> None:
    name, text = flag_name(leaf), leaf.setting.help
    if leaf.setting.repeated:
        flags.DEFINE_multi_string(name, list(default), text, flag_values=flag_values)
    elif leaf.type.kind is bool and not leaf.type.is_list:
        flags.DEFINE_bool(name, default, text, flag_values=flag_values)
    else:
        parser = SettingParser(leaf.type)
        flags.DEFINE(parser, name, default, text, flag_values=flag_values, serializer=parser)
