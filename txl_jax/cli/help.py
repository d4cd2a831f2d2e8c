"""Formats `--help`: the flags in groups, without those that a command does not use."""

import shutil
import textwrap
from collections.abc import Collection, Sequence

from absl import flags

from txl_jax.cli import flag_tree, other_hosts
from txl_jax.config.experiment import preset_names

_WIDEST = 36  # After a longer `--name=default` the help starts on the next line.
_PROGRAM, _HOSTS = "command", "multiple hosts"
_FLAGFILE = ("--flagfile=NAME", "Configuration (listed below), or file with one flag per line.")
# Groups of flags whose name does not begin with the group's.
_GROUPS = {"init_vocabulary": "train", "init_from": "train", "seed": "train", "compat": "model"}
_GROUPS |= dict.fromkeys(other_hosts.FLAG_NAMES, _HOSTS)


def help_text(
    own: Sequence[str],
    groups: Collection[str] | None,
    flag_values: flags.FlagValues,
    note: str = "",
    required: Collection[str] = (),
) -> str:
    """Formats a command's flags with their defaults, as wide as the terminal, 80 to 120 columns.

    `own` are the project's flags in order, `groups` the groups to show (None means all), `note` a
    line above them, and `required` the flags that must be set.
    """
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    rows: dict[str, list[tuple[str, str]]] = {
        group: [] for group in (_PROGRAM, _HOSTS, *flag_tree.groups())
    }
    if "seed" in flag_values:
        rows[_PROGRAM].append(_FLAGFILE)
    for name in own:
        group = _GROUPS.get(name, name.rpartition(".")[0]) or _PROGRAM
        rows[group].append(_row(flag_values[name], is_required=name in required))
    found = {group: table for group, table in rows.items() if table}
    shown = [group for group in found if groups is None or group in (_PROGRAM, _HOSTS, *groups)]
    lines = ["Flags with their defaults. If a flag is repeated, its last value counts."]
    if len(shown) < len(found):
        lines.append("Settings that are not used here are omitted. --helpfull shows them.")
    lines += [note] if note else []
    for group in shown:
        lines += ["", f"{group}:", *_table(found[group], width)]
    if "seed" in flag_values:
        configurations = f"Configurations: {', '.join(preset_names())}"
        lines += ["", *textwrap.wrap(configurations, width, subsequent_indent="  ")]
    return "\n".join(lines)


def _row(flag: flags.Flag, *, is_required: bool) -> tuple[str, str]:
    """Returns a flag with its default, as in "--train.steps=400000", and its help with choices."""
    text = flag.help or ""
    if choices := getattr(flag.parser, "enum_values", None):
        if text.startswith("<"):  # absl puts "<a|b>: " before the help of its own enums.
            text = text.partition(">: ")[2]
        text = f"{text} Choices: {', '.join(choices)}."
    if is_required:
        return f"--{flag.name}=NAME", f"Required. {text}"
    unset = flag_tree.NONE if isinstance(flag.parser, flag_tree.SettingParser) else ""
    return f"--{flag.name}={(flag.default_as_str or unset).strip(chr(39))}", text


def _table(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
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
