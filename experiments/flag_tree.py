"""absl flags from the config tree, and the tree from the parsed flags.

Every leaf of `ExperimentConfig` is a flag of the same dotted name, `--model.n_layer`; its help is the
comment beside the field. `--compat=NAME` sets the whole `compat` group to a preset first. A flagfile is
found by its bare name: `--flagfile=enwik8_12l` is the file in `experiments/flags`.
"""

import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from txl_jax import config_tree
from txl_jax.config import COMPAT_PRESETS, TOKEN_SETTINGS, ExperimentConfig

FLAGFILE_DIR = Path(__file__).parent / "flags"


def define(defaults: ExperimentConfig, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines one flag per leaf, with `defaults` as default values."""
    flags.DEFINE_enum(
        "compat",
        None,
        sorted(COMPAT_PRESETS),
        "Implementation to be compatible with; single --compat.* flags change it further.",
        flag_values=flag_values,
    )
    for leaf in config_tree.leaves():
        _define_leaf(leaf, config_tree.get(defaults, leaf.name), flag_values)


def given(flag_values: flags.FlagValues) -> dict[str, Any]:
    """The settings that the command line or a flagfile named, with their values."""
    return {
        leaf.name: _from_flag(leaf, flag_values[leaf.name].value)
        for leaf in config_tree.leaves()
        if flag_values[leaf.name].present
    }


def build(base: ExperimentConfig, flag_values: flags.FlagValues = flags.FLAGS) -> ExperimentConfig:
    """`base`, with the preset and the settings that were given.

    Raises:
      ValueError: a value that its setting cannot hold.
    """
    if flag_values["compat"].value:
        base = config_tree.replace(base, {"compat": COMPAT_PRESETS[flag_values["compat"].value]})
    chosen = given(flag_values)
    return config_tree.replace(_for_other_tokens(base, chosen), chosen)


def _for_other_tokens(base: ExperimentConfig, chosen: dict[str, Any]) -> ExperimentConfig:
    """`base` without what a program sets for its own kind of token, if another kind, or a list of words, is chosen."""
    usual, reset = ExperimentConfig().data, []
    if chosen.get("data.tokenizer", base.data.tokenizer) != base.data.tokenizer:
        reset = [*TOKEN_SETTINGS, "order"]
    elif chosen.get("data.vocab_file"):
        reset = ["min_count"]
    return config_tree.replace(base, {f"data.{name}": getattr(usual, name) for name in reset})


def parse(argv: Sequence[str], flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Parses a command line.

    Raises:
      ValueError: an unknown flag (with the nearest names), a value of the wrong kind, a word that is no
        flag, or a flagfile that does not exist (with the names of all).
    """
    try:
        rest = flag_values(find_flagfiles(argv))
    except flags.UnrecognizedFlagError as error:
        near = config_tree.did_you_mean(error.flagname, list(flag_values))
        raise ValueError(f"there is no flag --{error.flagname}{near or '; --help lists all'}") from None
    except flags.Error as error:
        raise ValueError(str(error)) from None
    if len(rest) > 1:
        raise ValueError(f"{rest[1]!r} is not a flag; flags are written --name=value")


def find_flagfiles(argv: Sequence[str]) -> list[str]:
    """`argv` with bare names of packaged flagfiles replaced by their paths; paths stay as they are.

    Raises:
      ValueError: neither a file nor a packaged name; lists the names.
    """
    found = list(argv)
    for i, word in enumerate(found):
        if match := re.fullmatch(r"--?flagfile=(.*)", word):
            found[i] = f"--flagfile={_flagfile_path(match[1])}"
        elif re.fullmatch(r"--?flagfile", word) and i + 1 < len(found):
            found[i + 1] = str(_flagfile_path(found[i + 1]))
    return found


def flagfile_names() -> list[str]:
    """The packaged flagfiles."""
    return sorted(path.stem for path in FLAGFILE_DIR.glob("*.flags"))


def _flagfile_path(name: str) -> Path:
    for path in (Path(name).expanduser(), FLAGFILE_DIR / f"{name}.flags", FLAGFILE_DIR / name):
        if path.is_file():
            return path
    known = flagfile_names()
    raise ValueError(
        f"there is no flagfile {name!r}, neither as a path nor by name{config_tree.did_you_mean(name, known)}; "
        f"the names are: {', '.join(known)}"
    )


def _define_leaf(leaf: config_tree.Leaf, default: Any, flag_values: flags.FlagValues) -> None:
    name, kind, text = leaf.name, leaf.type, field_comment(leaf)
    if kind is bool:
        flags.DEFINE_bool(name, default, text, flag_values=flag_values)
    elif kind is int:
        flags.DEFINE_integer(name, default, text, flag_values=flag_values)
    elif kind is float:
        flags.DEFINE_float(name, default, text, flag_values=flag_values)
    elif kind is str:
        flags.DEFINE_string(name, default, text, flag_values=flag_values)
    elif isinstance(kind, types.GenericAlias):
        flags.DEFINE_list(name, [str(item) for item in default], text, flag_values=flag_values)
    elif issubclass(kind, enum.Enum):
        flags.DEFINE_enum(name, default.value, [member.value for member in kind], text, flag_values=flag_values)
    else:
        raise TypeError(f"{name} has type {kind}, for which there is no flag")


def _from_flag(leaf: config_tree.Leaf, value: Any) -> Any:
    if isinstance(leaf.type, types.GenericAlias):
        item = typing.get_args(leaf.type)[0]
        return tuple(_from_text(leaf.name, item, text) for text in value)
    if issubclass(leaf.type, enum.Enum):
        return leaf.type(value)
    return value


def _from_text(name: str, kind: type, text: str) -> Any:
    """One item of a list flag."""
    booleans = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    try:
        return booleans[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"--{name} has an entry {text!r}; its entries are of type {kind.__name__}") from None


def field_comment(leaf: config_tree.Leaf) -> str:
    """The comment beside a field's definition."""
    pattern = rf"^    {leaf.field.name}: .*?  # (.*)$"
    match = re.search(pattern, _source(leaf.owner), flags=re.MULTILINE)
    return match[1] if match else ""


@functools.cache  # Finding a class in its file takes a hundredth of a second, and there are a hundred flags.
def _source(owner: type) -> str:
    return inspect.getsource(owner)
