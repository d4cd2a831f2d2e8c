"""Builds absl flags from a tree of settings, and the tree from the parsed flags.

Every setting of `ExperimentConfig` is a flag with the same dotted name, `--model.n_layer`, and so
is every setting of a command's plan, without a prefix. `--compat=NAME` applies the settings of an
implementation first. A flagfile is found by its bare name: `--flagfile=enwik8_12l` is the file in
`experiments/flags`, or outside of a clone the preset with the same settings. The last value of a
flag counts. A setting that may be None accepts the word "none".
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
from txl_jax.config.config_tree import FieldType, NamedSetting, did_you_mean, format_value
from txl_jax.config.experiment import (
    apply_preset,
    evaluation_preset,
    evaluation_preset_names,
    preset,
    preset_names,
)
from txl_jax.data.published import default_data
from txl_jax.errors import UserError
from txl_jax.runtime import storage
from txl_jax.runtime.storage import as_path, expand_home, is_remote

FLAGS = flags.FLAGS
# Where a clone has its flagfiles. An installed package has presets instead.
FLAGFILE_DIR = Path(__file__).parents[2] / "experiments/flags"
NONE = "none"
# Maximum number of flagfiles that one command reads. Without a limit, files that each include the
# next one twice would take forever.
_MOST_FLAGFILES = 100
# The value of --compilation_cache that disables the cache, so that no code is loaded.
_OFF = "off"
_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}

Settings = TypeVar("Settings")


def define(defaults: ExperimentConfig, flag_values: flags.FlagValues = FLAGS) -> None:
    """Defines one flag per setting, with `defaults` as default values, and --compat."""
    flags.DEFINE_enum(
        "compat", None, sorted(COMPAT_PRESETS), "Implementation to match.", flag_values=flag_values
    )
    for leaf in setting_leaves(ExperimentConfig):
        _define_leaf(leaf, config_tree.get(defaults, leaf.name), flag_values)


def define_plan(plan: type) -> None:
    """Defines one flag per setting of a plan, a dataclass of `setting` fields.

    The plan's own settings come first, then its bases'.
    """
    order: list[str] = []
    for cls in plan.__mro__:
        order.extend(vars(cls).get("__annotations__", {}))
    for leaf in sorted(setting_leaves(plan), key=lambda leaf: order.index(leaf.name)):
        _define_leaf(leaf, leaf.default, FLAGS)


def setting_leaves(cls: type) -> list[NamedSetting]:
    """Returns the settings below a config class that are flags.

    The others are set only in code and by presets.
    """
    return [leaf for leaf in config_tree.leaves(cls) if leaf.setting.flag]


def groups() -> list[str]:
    """Returns the groups of a config's settings, in order, such as "model" and "model.dropout"."""
    names = []
    for leaf in setting_leaves(ExperimentConfig):
        name = leaf.name.rpartition(".")[0]
        if name and name not in names:
            names.append(name)
    return names


def flag_name(leaf: NamedSetting) -> str:
    """Returns the name of a setting's flag.

    A field named after a Python keyword has an underscore, which the flag omits.
    """
    return leaf.name.removesuffix("_")


def passed_settings(
    flag_values: flags.FlagValues = FLAGS, cls: type = ExperimentConfig
) -> dict[str, Any]:
    """Returns the settings that the command line or a flagfile set, with their values."""
    values = {}
    for leaf in setting_leaves(cls):
        flag = flag_values[flag_name(leaf)]
        # absl counts how often the flag was set. 0 means that it has its default.
        if flag.present:
            values[leaf.name] = flag.value
    return values


def build(base: ExperimentConfig, flag_values: flags.FlagValues = FLAGS) -> ExperimentConfig:
    """Returns `base` with the preset of `--compat` and the settings that flags set.

    It also has the settings derived from them, and absolute paths.
    """
    compat = flag_values["compat"].value
    if compat:
        base = apply_preset(base, compat)
    # A flag has its last value: one after --flagfile wins over the file's.
    values = passed_settings(flag_values)
    # If the flags set other files or another kind of tokens, the settings in `base` are dropped.
    config = config_tree.replace(_without_replaced_text(base, values), values)
    return _with_absolute_paths(config.resolved())


def build_plan(plan: type[Settings]) -> Settings:
    """Returns a command's plan with the settings that flags set.

    Raises:
      UserError: If a required setting is missing.
    """
    values = passed_settings(cls=plan)
    for leaf in setting_leaves(plan):
        if leaf.setting.required and not values.get(leaf.name):
            name = flag_name(leaf)
            raise UserError(f"--{name} is required: {leaf.setting.help} Pass --{name}=...")
    return _with_absolute_paths(plan(**values))


def _without_replaced_text(base: ExperimentConfig, values: Mapping[str, Any]) -> ExperimentConfig:
    """Returns `base` without its files or its tokenizer if the settings replace them.

    The files are dropped if other files are set, and the tokenizer if another kind is set.
    """
    data = base.data
    files = ["data.file", "data.train", "data.valid", "data.test"]
    reset = []
    if values.get("data.corpus", data.corpus) != data.corpus or values.keys() & set(files):
        reset += files
    if values.get("data.tokenizer.kind", data.tokenizer.kind) != data.tokenizer.kind:
        leaves = config_tree.leaves(ExperimentConfig)
        # The settings that token ids depend on belong to the tokenizer that is replaced.
        reset += [leaf.name for leaf in leaves if leaf.setting.shapes_tokens]
        reset.append("data.order")
    elif values.get("data.tokenizer.vocab_file"):
        # A minimum count excludes a vocabulary file.
        reset.append("data.tokenizer.min_count")
    defaults = {name: config_tree.get(ExperimentConfig(), name) for name in reset}
    return config_tree.replace(base, defaults)


def _with_absolute_paths(settings: Settings) -> Settings:
    """Returns a config or a plan that means the same in any directory."""
    paths = {}
    for leaf in config_tree.leaves(type(settings)):
        if leaf.setting.path:
            paths[leaf.name] = _absolute(config_tree.get(settings, leaf.name))
    return config_tree.replace(settings, paths)


def _absolute(path: Any) -> Any:
    """Returns an absolute path, or a tuple of them. None and "" are returned unchanged."""
    if isinstance(path, tuple):
        return tuple(map(_absolute, path))
    if not path:
        return path
    if is_remote(path):
        return as_path(path)
    return os.path.abspath(expand_home(path))


class _Word(NamedTuple):
    """A word of the command line, or a line of a flagfile."""

    text: str
    # "FILE, line N: ". Empty on the command line.
    where: str = ""

    def name(self, flag_values: flags.FlagValues) -> str | None:
        """Returns the name of the flag that the word sets, or None."""
        match = re.match(r"--?([\w.]+)", self.text)
        if match is None:
            return None
        name = match[1]
        # --nosetting is the same as --setting=false.
        positive = name.removeprefix("no")
        if name not in flag_values and positive in flag_values:
            return positive
        return name


class Parsed(NamedTuple):
    """A parsed command line, as in `cli.Job`."""

    # Words that are not flags.
    words: list[str]
    # Where each flag was set: "" for the command line, else "FILE, line N: ".
    places: dict[str, str]
    # The name of the last flagfile, without directory and suffix, if any.
    flagfile: str | None


def parse(
    argv: Sequence[str], flag_values: flags.FlagValues = FLAGS, *, takes_words: bool = False
) -> Parsed:
    """Parses a command line into `flag_values`.

    Prints a note for each flag that a later flagfile overrides.

    Args:
      argv: The command's name, then its words.
      flag_values: The flags that are defined. They get the values.
      takes_words: Whether words that are not flags are returned, instead of being an error.

    Raises:
      UserError: If a flag is unknown (the error lists the closest names), a value has the wrong
        type, a word is not a flag, or a flagfile cannot be used.
    """
    program = argv[0]
    typed = argv[1:]
    words = list(_expanded(map(_Word, typed)))
    places = _places(words, flag_values)
    try:
        rest = flag_values([program, *(word.text for word in words)])
    except flags.Error as error:
        raise _explained(error, places, flag_values) from None
    if len(rest) > 1 and not takes_words:
        raise UserError(f"{rest[1]!r} is not a flag. Write flags as --name=value.")

    # Only typed flagfiles count, not flagfiles that another one includes. `--flagfile NAME` is two
    # words, which are joined by a newline.
    flagfiles = re.findall(r"(?m)^--?flagfile[=\n](.*)", "\n".join(typed))
    flagfile = Path(flagfiles[-1]).stem if flagfiles else None
    return Parsed(rest[1:], places, flagfile)


def _places(words: Sequence[_Word], flag_values: flags.FlagValues) -> dict[str, str]:
    """Returns where each flag was set last.

    Prints a note for each typed flag that a flagfile overrides.
    """
    last: dict[str, _Word] = {}
    for word in words:
        name = word.name(flag_values)
        if name is None:
            continue
        before = last.get(name)
        if word.where and before is not None and not before.where:
            print(
                f"note: {before.text} is overridden by {word.where}{word.text}. "
                "Put it after --flagfile.",
                file=sys.stderr,
                flush=True,
            )
        last[name] = word
    return {name: word.where for name, word in last.items()}


def _explained(
    error: flags.Error, places: Mapping[str, str], flag_values: flags.FlagValues
) -> UserError:
    """Returns absl's error with the place where the flag was set, or with the closest names."""
    # Only absl's error for an unknown flag has this attribute.
    unknown = getattr(error, "flagname", "")
    if unknown:
        near = did_you_mean(unknown, list(flag_values)) or ". --help lists all flags."
        return UserError(f"{places.get(unknown, '')}unknown flag --{unknown}{near}")

    # absl's other messages begin with the flag.
    message = str(error)
    named = re.match(r"flag --([\w.]+)", message)
    place = places.get(named[1], "") if named else ""
    return UserError(f"{place}{message}")


def _expanded(
    words: Iterable[_Word],
    inside: tuple[Path, ...] = (),
    numbers: Iterator[int] | None = None,
) -> Iterator[_Word]:
    """Yields the words, with flagfiles replaced by their lines.

    By itself, absl would not find a bare name inside a file.

    Args:
      words: Words of the command line, or lines of a flagfile.
      inside: The flagfiles that contain the words, from the outermost.
      numbers: Counter of all flagfiles that were read, from 1. None starts a new one.

    Raises:
      UserError: If a file does not exist (listing the known names), cannot be read, or includes
        itself, or if there are too many.
    """
    words = iter(words)
    if numbers is None:
        numbers = itertools.count(1)
    for word in words:
        match = re.fullmatch(r"--?flagfile(?:=(.*))?", word.text)
        if match is None:
            yield word
            continue

        # In `--flagfile NAME` the name is the next word.
        name = match[1]
        if name is None:
            following = next(words, None)
            name = "" if following is None else following.text
        path = _find_flagfile(name)
        if path is None:
            yield from _preset_words(name, word.where)
            continue

        if path in inside:
            raise UserError(f"{word.where}the flagfile {path} includes itself. Remove the line.")
        if next(numbers) > _MOST_FLAGFILES:
            raise UserError(
                f"{word.where}a command must read at most {_MOST_FLAGFILES} flagfiles, and {path} "
                "is one more. Remove repeated lines."
            )
        yield from _expanded(_flagfile_words(path, word.where), (*inside, path), numbers)


def _find_flagfile(name: str) -> Path | None:
    """Returns the flagfile with a path or a bare name, or None if it does not exist."""
    for path in (Path(expand_home(name)), FLAGFILE_DIR / f"{name}.flags", FLAGFILE_DIR / name):
        if path.is_file() or storage.is_pipe(path):
            return path
    return None


def _flagfile_words(path: Path, where: str) -> Iterator[_Word]:
    """Yields the lines of a flagfile, without empty lines and comments.

    Args:
      path: The flagfile.
      where: Where it is named: "FILE, line N: ", or empty on the command line.

    Raises:
      UserError: If the file cannot be read. The message begins with `where`.
    """
    try:
        text = storage.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}the flagfile {path} cannot be read as text ({error})") from None
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if line and not line.startswith(("#", "//")):
            yield _Word(line, f"{path}, line {number}: ")


def _preset_words(name: str, where: str) -> Iterator[_Word]:
    """Yields the flags in which a preset differs from the defaults, like the lines of its flagfile.

    A preset of an evaluation has only settings of evaluation, and yields them all.

    As in a flagfile, other settings are not flags, so that the values of a command's corpus, a
    record or a warm start are kept.

    Raises:
      UserError: If no preset has the name. The message lists all names.
    """
    if name in evaluation_preset_names():
        for setting_name, value in evaluation_preset(name).items():
            yield _Word(f"--{setting_name}={format_value(value)}", f"preset {name}: ")
        return

    known = preset_names() + evaluation_preset_names()
    if name not in known:
        raise UserError(
            f"{where}the flagfile must be a path or one of {', '.join(known)}, got {name!r}"
            f"{did_you_mean(name, known)}"
        )
    config = preset(name)
    compat = _compat_of(config)
    defaults = apply_preset(ExperimentConfig(data=default_data(config.data.corpus)), compat)

    values: dict[str, Any] = {}
    for leaf, value, _ in config_tree.differences(config, defaults):
        if leaf.setting.flag:
            values[leaf.name] = value
    # The defaults above are for the preset's corpus and --compat, which the command may not have.
    if config.data.corpus is not CorpusName.TEXT:
        values["data.corpus"] = config.data.corpus
    if compat != "ours":
        values["compat"] = compat
    for flag, value in values.items():
        yield _Word(f"--{flag}={format_value(value)}", f"preset {name}: ")


def _compat_of(config: ExperimentConfig) -> str:
    """Returns the first --compat with which the config differs only in settings that are flags.

    Some settings of --compat have no flag of their own.
    """
    for compat in COMPAT_PRESETS:
        changes = config_tree.differences(config, apply_preset(config, compat))
        if all(leaf.setting.flag for leaf, _, _ in changes):
            return compat
    raise AssertionError("a preset has the settings of one --compat")


def refuse_code(plan: Any, places: Mapping[str, str]) -> None:
    """Checks that no flagfile sets a directory from which code is loaded.

    Flagfiles are shared between users, so a path to code in a flagfile would run a stranger's code.

    Args:
      plan: The command's plan.
      places: Where each flag was set, as in `Job.places`.

    Raises:
      UserError: If a flagfile sets such a directory.
    """
    for leaf in config_tree.leaves(type(plan)):
        place = places.get(flag_name(leaf), "")
        value = config_tree.get(plan, leaf.name)
        if leaf.setting.loads_code and place and value and value not in (NONE, _OFF):
            raise UserError(
                f"{place}--{leaf.name} must be typed, because code is loaded from it, got {value} "
                "in a flagfile. Remove the line, and pass the flag on the command line."
            )


@contextlib.contextmanager
def naming_places(places: Mapping[str, str], base: str) -> Iterator[None]:
    """Adds to an error the origin of settings that it names and the user has not typed.

    Args:
      places: Where each flag was set, as in `Job.places`.
      base: The origin of settings that no flag sets.
    """
    try:
        yield
    except UserError as error:
        settings = {leaf.name for leaf in config_tree.leaves(ExperimentConfig)}
        origins = []
        # Settings are named with their groups, as in optimizer.warmup_steps.
        for name in dict.fromkeys(re.findall(r"[a-z_]+(?:\.\w+)+", str(error))):
            place = places.get(name, base)
            if name in settings and place:
                origins.append(f"{name} comes from {place.rstrip(': ')}")
        if not origins:
            raise
        raise UserError(f"{error} ({'; '.join(origins)})") from error


class SettingParser(flags.ArgumentParser, flags.ArgumentSerializer):
    """Parses a flag's text into a value of its setting's type."""

    def __init__(self, type: FieldType):
        self._type = type
        self.enum_values: list[str] = []
        if issubclass(type.kind, enum.Enum):
            self.enum_values = [member.value for member in type.kind]

    def parse(self, argument: Any) -> Any:
        """Returns the value of a flag's text. A default is returned unchanged.

        Raises:
          ValueError: If it is invalid. The message contains the expected type.
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
        """Returns one value, or one entry of a list."""
        kind = self._type.kind
        try:
            if kind is bool:
                return _BOOLEANS[text.lower()]
            return kind(text)
        except (KeyError, ValueError):
            raise ValueError(
                f"must be {self._expected()}, got {text!r}{did_you_mean(text, self.enum_values)}"
            ) from None

    def _expected(self) -> str | None:
        if self.enum_values:
            return f"one of {', '.join(self.enum_values)}"
        return {bool: "true or false", int: "a whole number", float: "a number"}.get(
            self._type.kind
        )


def _define_leaf(leaf: NamedSetting, default: Any, flag_values: flags.FlagValues) -> None:
    name = flag_name(leaf)
    text = leaf.setting.help
    if leaf.setting.repeated:
        flags.DEFINE_multi_string(name, list(default), text, flag_values=flag_values)
    elif leaf.type.kind is bool and not leaf.type.is_list:
        flags.DEFINE_bool(name, default, text, flag_values=flag_values)
    else:
        parser = SettingParser(leaf.type)
        flags.DEFINE(parser, name, default, text, flag_values=flag_values, serializer=parser)
