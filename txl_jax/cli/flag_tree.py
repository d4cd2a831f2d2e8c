"""absl flags from a tree of settings, and the tree from the parsed flags.

Every setting of `ExperimentConfig` is a flag of the same dotted name, `--model.n_layer`, and so is every setting of a
program's plan, without a prefix. `--compat=NAME` applies the settings of an implementation first. A flagfile is found
by its bare name: `--flagfile=enwik8_12l` is the file in `experiments/flags`, or outside of a clone the preset of the
same settings. The last of several values counts. A setting that may be None takes the word "none".
"""

import enum
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from absl import flags

from txl_jax.config import COMPAT_PRESETS, CorpusName, ExperimentConfig, config_tree
from txl_jax.config.config_tree import Leaf
from txl_jax.config.experiment import REMOVED, REMOVED_ADVICE, apply_preset, preset, preset_names
from txl_jax.data.published import default_data
from txl_jax.errors import UserError

FLAGS = flags.FLAGS
FLAGFILE_DIR = Path(__file__).parents[2] / "experiments/flags"  # In a clone.
NONE = "none"
_BOOLEANS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}

Plan = TypeVar("Plan")


def define(defaults: ExperimentConfig, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines one flag per setting, with `defaults` as default values, and the preset."""
    flags.DEFINE_enum(
        "compat", None, sorted(COMPAT_PRESETS), "Implementation to be compatible with.", flag_values=flag_values
    )
    for leaf in setting_leaves(ExperimentConfig):
        _define_leaf(leaf, config_tree.get(defaults, leaf.name), flag_values)


def define_plan(plan: type, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines one flag per setting of a plan, a dataclass of `setting` fields: its own, then those of its bases."""
    order = [name for cls in plan.__mro__ for name in vars(cls).get("__annotations__", {})]
    for leaf in sorted(setting_leaves(plan), key=lambda leaf: order.index(leaf.name)):
        _define_leaf(leaf, leaf.default, flag_values)


def setting_leaves(cls: type) -> list[Leaf]:
    """Returns the settings below a config class that are flags."""
    return [leaf for leaf in config_tree.leaves(cls) if leaf.setting.flag]


def groups(cls: type = ExperimentConfig) -> list[str]:
    """Returns the groups of a config's settings, in order, such as "model" and "model.dropout"."""
    return list(dict.fromkeys(leaf.name.rpartition(".")[0] for leaf in setting_leaves(cls) if "." in leaf.name))


def flag_name(leaf: Leaf) -> str:
    """Returns the name of a setting's flag: a field that would be a word of Python has an underscore after it."""
    return leaf.name.removesuffix("_")


def is_optional(flag: flags.Flag) -> bool:
    """Returns whether a flag takes the word "none"."""
    return isinstance(flag.parser, _OptionalParser)


def given(flag_values: flags.FlagValues, cls: type = ExperimentConfig) -> dict[str, Any]:
    """Returns the settings that the command line or a flagfile named, with their values."""
    return {
        leaf.name: _from_flag(leaf, flag_values[flag_name(leaf)].value)
        for leaf in setting_leaves(cls)
        if flag_values[flag_name(leaf)].present
    }


def build(base: ExperimentConfig, flag_values: flags.FlagValues = flags.FLAGS) -> ExperimentConfig:
    """Returns `base` with the preset and the settings that were given, and what follows from them.

    Raises:
      UserError: a value that its setting cannot hold.
    """
    if compat := flag_values["compat"].value:
        base = apply_preset(base, compat)
    chosen = given(flag_values)
    return config_tree.replace(_for_other_tokens(base, chosen), chosen).resolved()


def build_plan(plan: type[Plan], flag_values: flags.FlagValues = flags.FLAGS) -> Plan:
    """Returns a program's plan with the settings that were given; raises `UserError` as `build`, or for one missing."""
    found = given(flag_values, plan)
    for leaf in setting_leaves(plan):
        if leaf.setting.required and not found.get(leaf.name):
            raise UserError(f"no {flag_name(leaf)} was given; give --{flag_name(leaf)}=... ({leaf.setting.help})")
    return plan(**found)


def _for_other_tokens(base: ExperimentConfig, chosen: dict[str, Any]) -> ExperimentConfig:
    """Returns `base` without the program's tokenizer if another kind of token, or a vocabulary file, is chosen."""
    reset: list[str] = []
    kind = base.data.tokenizer.kind
    if chosen.get("data.tokenizer.kind", kind) != kind:
        leaves = config_tree.leaves(ExperimentConfig)
        reset = [leaf.name for leaf in leaves if leaf.setting.shapes_tokens] + ["data.order"]
    elif chosen.get("data.tokenizer.vocab_file"):
        reset = ["data.tokenizer.min_count"]
    return config_tree.replace(base, {name: config_tree.get(ExperimentConfig(), name) for name in reset})


class Parsed(NamedTuple):
    """A command line.

    Attributes:
      words: The words that are not flags.
      places: Where each flag was set: "" for the command line, else "FILE, line N: ".
      flagfile: The name of the last flagfile, without directory and suffix, or None without a flagfile.
    """

    words: list[str]
    places: dict[str, str]
    flagfile: str | None


def parse(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS, *, takes_words: bool = False) -> Parsed:
    """Parses a command line.

    Raises:
      UserError: If a flag is unknown (with the nearest names), a value has the wrong kind, a word is not a flag, or a
        flagfile does not exist (with all names).
    """
    program, *typed = argv
    words = list(_expanded(map(_Word, typed)))
    _warn_of_overridden(words, flag_values)
    try:
        rest = flag_values([program, *(word.text for word in words)])
    except flags.UnrecognizedFlagError as error:
        near = config_tree.did_you_mean(error.flagname, list(flag_values)) or "; --help lists all"
        advice = f"; {REMOVED_ADVICE}" if error.flagname in REMOVED else near
        where = _where(words, error.flagname, flag_values)
        raise UserError(f"{where}unknown flag --{error.flagname}{advice}") from None
    except flags.Error as error:
        named = re.match(r"flag --([\w.]+)", str(error))
        where = _where(words, named[1], flag_values) if named else ""
        raise UserError(f"{where}{_in_plain_words(str(error))}") from None
    if len(rest) > 1 and not takes_words:
        raise UserError(f"{rest[1]!r} is not a flag; flags are written --name=value")
    places = {name: word.where for word in words if (name := word.name(flag_values))}
    files = re.findall(r"(?m)^--?flagfile[=\n](.*)", "\n".join(typed))
    return Parsed(rest[1:], places, Path(files[-1]).stem if files else None)


class _Word(NamedTuple):
    """A word of the command line, or a line of a flagfile."""

    text: str
    where: str = ""  # "FILE, line N: "; empty on the command line.

    def name(self, flag_values: flags.FlagValues) -> str | None:
        """Returns the flag that the word sets, or None if it sets none."""
        if not (match := re.match(r"--?([\w.]+)", self.text)):
            return None
        name = match[1]
        return name[2:] if name not in flag_values and name.startswith("no") and name[2:] in flag_values else name


def _expanded(words: Iterable[_Word], inside: tuple[Path, ...] = ()) -> Iterator[_Word]:
    """Yields the words, flagfiles replaced by their lines. absl would find no bare name inside a file.

    Raises:
      UserError: If a file does not exist (with the packaged names), cannot be read, or includes itself.
    """
    words = iter(words)
    for word in words:
        match = re.fullmatch(r"--?flagfile(?:=(.*))?", word.text)
        if match is None:
            yield word
            continue
        following = None if match[1] is not None else next(words, None)
        name = following.text if following else match[1] or ""
        if (path := _flagfile_path(name)) is None:
            yield from _preset_words(name, word.where)
            continue
        if path in inside:
            raise UserError(f"{word.where}the flagfile {path} includes itself; remove the line")
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{word.where}the flagfile {path} cannot be read as text ({error})") from None
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
        kept = (_Word(line, f"{path}, line {n}: ") for n, line in lines if line and not line.startswith(("#", "//")))
        yield from _expanded(kept, (*inside, path))


def _warn_of_overridden(words: Sequence[_Word], flag_values: flags.FlagValues) -> None:
    """Prints a line for each flag of the command line that a flagfile behind it overrides."""
    typed: dict[str | None, _Word] = {}
    for word in words:
        name = word.name(flag_values)
        if not word.where:
            typed[name] = word
        elif name is not None and (before := typed.pop(name, None)):
            line = f"note: {before.text} has no effect: {word.where}{word.text}; put the flag after --flagfile"
            print(line, file=sys.stderr, flush=True)


def _where(words: Sequence[_Word], name: str, flag_values: flags.FlagValues) -> str:
    """Returns the place of a flag's last value, empty if it is the command line."""
    return next((word.where for word in reversed(words) if word.name(flag_values) == name), "")


def _in_plain_words(message: str) -> str:
    """Returns absl's message about a value, without Python's words for a text that is not a number."""
    message = re.sub(r"invalid literal for int\(\).*", "give a whole number", message)
    return re.sub(r"could not convert string to float.*", "give a number", message)


def _flagfile_path(name: str) -> Path | None:
    places = (Path(name).expanduser(), FLAGFILE_DIR / f"{name}.flags", FLAGFILE_DIR / name)
    return next((path for path in places if path.is_file()), None)


def _preset_words(name: str, where: str) -> Iterator[_Word]:
    """Yields what a preset changes as flags; raises `UserError`, with all names, if the name is unknown."""
    if name not in (known := preset_names()):
        raise UserError(
            f"{where}there is no flagfile {name!r}, neither as a path nor among {', '.join(known)}"
            f"{config_tree.did_you_mean(name, known)}"
        )
    config = preset(name)
    compat = next(
        each
        for each in COMPAT_PRESETS
        if all(leaf.setting.flag for leaf, _, _ in config_tree.differences(config, apply_preset(config, each)))
    )
    if compat != "ours":  # Its settings have no flags of their own.
        yield _Word(f"--compat={compat}", f"preset {name}: ")
    # A flagfile lists no others either, so that a program's corpus, a record and a warm start keep theirs.
    usual = apply_preset(ExperimentConfig(data=default_data(config.data.corpus)), compat)
    for leaf in setting_leaves(ExperimentConfig):
        value = config_tree.get(config, leaf.name)
        if value != config_tree.get(usual, leaf.name) or (leaf.name == "data.corpus" and value is not CorpusName.TEXT):
            yield _Word(f"--{leaf.name}={config_tree.format_value(value)}", f"preset {name}: ")


class _OptionalParser(flags.ArgumentParser):
    """Parses what another parser does, and "none" as None."""

    def __init__(self, inner: flags.ArgumentParser):
        self._inner = inner
        self.syntactic_help = inner.syntactic_help
        self.enum_values = getattr(inner, "enum_values", None)

    def parse(self, argument: Any) -> Any:
        return None if argument is None or str(argument).lower() == NONE else self._inner.parse(argument)

    def flag_type(self) -> str:
        return self._inner.flag_type()


class _EnumParser(flags.EnumParser):
    """Parses one of some words; the error for another names the nearest."""

    def parse(self, argument: Any) -> Any:
        try:
            return super().parse(argument)
        except ValueError as error:
            raise ValueError(f"{error}{config_tree.did_you_mean(str(argument), self.enum_values)}") from None


class _Serializer(flags.ArgumentSerializer):
    def serialize(self, value: Any) -> str:
        return config_tree.format_value(value)


def _define_leaf(leaf: Leaf, default: Any, flag_values: flags.FlagValues) -> None:
    name, text = flag_name(leaf), leaf.setting.help
    if leaf.setting.repeated:
        flags.DEFINE_multi_string(name, list(default), text, flag_values=flag_values)
    elif leaf.type.is_list:
        flags.DEFINE_list(name, [str(item) for item in default], text, flag_values=flag_values)
    elif leaf.type.kind is bool:
        flags.DEFINE_bool(name, default, text, flag_values=flag_values)
    else:
        parser = _parser(leaf)
        flags.DEFINE(
            _OptionalParser(parser) if leaf.type.is_optional else parser,
            name,
            default.value if isinstance(default, enum.Enum) else default,
            text,
            flag_values=flag_values,
            serializer=_Serializer(),
        )


def _parser(leaf: Leaf) -> flags.ArgumentParser:
    if issubclass(leaf.type.kind, enum.Enum):
        return _EnumParser([member.value for member in leaf.type.kind])
    parsers = {int: flags.IntegerParser, float: flags.FloatParser, str: flags.ArgumentParser}
    return parsers[leaf.type.kind]()


def _from_flag(leaf: Leaf, value: Any) -> Any:
    if leaf.type.is_list:
        return tuple(_from_text(leaf, text) for text in value)
    if issubclass(leaf.type.kind, enum.Enum) and value is not None:
        return leaf.type.kind(value)
    return value


def _from_text(leaf: Leaf, text: str) -> Any:
    """Converts one entry of a list flag."""
    try:
        return _BOOLEANS[text.lower()] if leaf.type.kind is bool else leaf.type.kind(text)
    except (KeyError, ValueError):
        kinds = {bool: "true or false", int: "whole numbers", float: "numbers"}
        raise UserError(f"--{leaf.name} has an entry {text!r}; its entries are {kinds[leaf.type.kind]}") from None
