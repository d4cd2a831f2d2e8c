"""The text of `--help`: the flags in groups, one line each where it fits, those a program does not read left out."""

import shutil
import signal
import sys
import textwrap
from collections.abc import Collection, Sequence

from absl import flags

from txl_jax.cli import flag_tree, other_hosts
from txl_jax.config import ExperimentConfig
from txl_jax.config.experiment import preset_names

_WIDEST = 36  # Longer `--name=default` have their help on the next line.
_PROGRAM, _HOSTS = "program", "several hosts"
_FLAGFILE = ("--flagfile=NAME", "A published configuration (listed below) or a file with one flag per line.")
# Flags outside of a group, and the group whose first they are; the last of a group is the first.
_FIRST_OF = {"init_vocabulary": "train", "init_from": "train", "seed": "train", "compat": "model"}


def print_help(
    groups: Collection[str] | None, flag_values: flags.FlagValues, *, note: str, required: Collection[str]
) -> None:
    """Prints the docstring of the program and its flags; the arguments are as for `help_text`."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly.
    by_module = flag_values.flags_by_module_dict().items()
    ours = {flag.name for module, found in by_module if _is_ours(module) for flag in found}
    own = [name for name in flag_values if name in ours]
    print(sys.modules["__main__"].__doc__ or "")
    print(help_text(own, groups, flag_values, note=note, required=required))


def _is_ours(module: str) -> bool:
    """Returns whether a module, as absl names it, belongs to this project."""
    return module.partition(".")[0] in ("txl_jax", "experiments", "__main__") or module == sys.argv[0]


def help_text(
    own: Sequence[str],
    groups: Collection[str] | None,
    flag_values: flags.FlagValues,
    *,
    note: str = "",
    required: Collection[str] = (),
) -> str:
    """Formats the flags of a program with their defaults, as wide as the terminal, 80 to 120 columns.

    Args:
      own: Names of the flags that the project defines, in order.
      groups: Groups of settings to show, such as "model" and "model.dropout", or None for all.
      flag_values: The flags.
      note: A line above the groups.
      required: Names of the flags whose default the program would not use.
    """
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    found = _by_group(own, flag_values)
    wanted = flag_tree.groups() if groups is None else groups
    shown = {group: names for group, names in found.items() if names and group in (_PROGRAM, _HOSTS, *wanted)}
    lines = ["Flags with their defaults; the last value given to a flag counts."]
    if len(shown) < len([names for names in found.values() if names]):
        lines.append("Settings that are not used here are left out; --helpfull shows them.")
    if note:
        lines.append(note)
    for group, names in shown.items():
        rows = [_row(flag_values[name], is_required=name in required) for name in names]
        takes_flagfile = group == _PROGRAM and "seed" in flag_values
        lines += ["", f"{group}:", *_table([_FLAGFILE, *rows] if takes_flagfile else rows, width)]
    if "seed" in flag_values:
        published = f"Published configurations: {', '.join(preset_names())}"
        lines += ["", *textwrap.wrap(published, width, subsequent_indent="  ")]
    return "\n".join(lines)


def _by_group(own: Sequence[str], flag_values: flags.FlagValues) -> dict[str, list[str]]:
    """Returns the names of all flags by group, in the order of the config."""
    settings = [leaf.name for leaf in flag_tree.setting_leaves(ExperimentConfig) if leaf.name in flag_values]
    found: dict[str, list[str]] = {_PROGRAM: [], _HOSTS: []}
    for name in own:
        if name not in settings and name not in _FIRST_OF:
            found[_HOSTS if name in other_hosts.FLAG_NAMES else _PROGRAM].append(name)
    for name in settings:
        if name not in _FIRST_OF:
            found.setdefault(name.rpartition(".")[0], []).append(name)
    for name, group in _FIRST_OF.items():
        if name in flag_values:
            found.setdefault(group, []).insert(0, name)
    return found


def _row(flag: flags.Flag, *, is_required: bool) -> tuple[str, str]:
    """Returns a flag's usage and its explanation."""
    if is_required:
        return f"--{flag.name}=NAME", f"Required. {_explanation(flag)}"
    return _usage(flag), _explanation(flag)


def _usage(flag: flags.Flag) -> str:
    """Formats a flag with its default: "--train.steps=400000"."""
    default = flag_tree.NONE if flag.default is None and flag_tree.is_optional(flag) else flag.default_as_str or ""
    return f"--{flag.name}={default.strip(chr(39))}"


def _explanation(flag: flags.Flag) -> str:
    """Returns a flag's help and choices."""
    choices = getattr(flag.parser, "enum_values", None)
    text = flag.help or ""
    if not choices:
        return text
    if text.startswith("<"):  # absl puts "<a|b>: " before the help of its own enums.
        text = text.partition(">: ")[2]
    return f"{text.removesuffix('.')} ({', '.join(choices)})."


def _table(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Lays out usages and explanations in two columns."""
    column = 4 + max((len(usage) for usage, _ in rows if len(usage) <= _WIDEST), default=_WIDEST)
    lines = []
    for usage, explanation in rows:
        first = f"  {usage}"
        if len(first) > column - 2:
            lines.append(first)
            first = ""
        wrapped = textwrap.wrap(explanation, width - column, break_on_hyphens=False) or [""]
        lines.append(f"{first:<{column}}{wrapped[0]}".rstrip())
        lines += [" " * column + line for line in wrapped[1:]]
    return lines
