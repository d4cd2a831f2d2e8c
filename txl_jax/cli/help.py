"""Formats `--help`: the flags in groups, without those that a command does not use."""

import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import NamedTuple

from absl import flags

from txl_jax.cli import flag_tree, other_hosts
from txl_jax.config import ExperimentConfig, config_tree
from txl_jax.config.config_tree import format_value
from txl_jax.config.experiment import evaluation_preset_names, preset_names

# The help of a longer `--name=default` starts on the next line.
_WIDEST = 36
# Groups of flags that are not settings of a config.
_PROGRAM = "command"
_HOSTS = "multiple hosts"
# Groups of flags whose names do not begin with the group's name.
_GROUPS = {"init_vocabulary": "train", "init_from": "train", "seed": "train", "compat": "model"}
_GROUPS |= dict.fromkeys(other_hosts.FLAG_NAMES, _HOSTS)


class _FlagRow(NamedTuple):
    """One flag in the table of its group."""

    usage: str  # The flag with its default, as in "--train.steps=400000".
    explanation: str


_FLAGFILE = _FlagRow(
    "--flagfile=NAME", "Configuration (listed below), or file with one flag per line."
)


def help_text(
    names: Sequence[str],
    groups: Collection[str] | None,
    flag_values: flags.FlagValues,
    note: str = "",
    required: Collection[str] = (),
    in_force: ExperimentConfig | None = None,
) -> str:
    """Formats a command's flags with their defaults, as wide as the terminal, 80 to 120 columns.

    Args:
      names: The project's flags, in order.
      groups: The groups of settings to show, or None for all.
      flag_values: The defined flags.
      note: A line above the flags, if not empty.
      required: Names of the flags that must be set.
      in_force: The config whose values are shown as defaults of its settings, or None for the
        defaults of the flags.
    """
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    # `seed` is a setting of every config.
    has_config = "seed" in flag_values
    rows: dict[str, list[_FlagRow]] = {
        group: [] for group in (_PROGRAM, _HOSTS, *flag_tree.groups())
    }
    if has_config:
        rows[_PROGRAM].append(_FLAGFILE)
    defaults = {}
    if in_force is not None:
        for leaf in flag_tree.setting_leaves(ExperimentConfig):
            value = config_tree.get(in_force, leaf.name)
            defaults[leaf.name] = (
                str(value).lower() if isinstance(value, bool) else format_value(value)
            )
    for name in names:
        group = _GROUPS.get(name, name.rpartition(".")[0]) or _PROGRAM
        is_required = name in required
        rows[group].append(_row(flag_values[name], defaults.get(name), is_required=is_required))

    # A command without a config has no flags in most groups.
    with_flags = [group for group, group_rows in rows.items() if group_rows]
    shown = with_flags
    if groups is not None:
        shown = [group for group in with_flags if group in (_PROGRAM, _HOSTS, *groups)]

    lines = ["Flags with their defaults. If a flag is repeated, its last value counts."]
    if len(shown) < len(with_flags):
        lines.append("Settings that this command does not use are omitted. --helpfull shows them.")
    if note:
        lines.append(note)
    for group in shown:
        lines += ["", f"{group}:", *_table(rows[group], width)]
    if has_config:
        configurations = f"Configurations: {', '.join(preset_names())}"
        lines += ["", *textwrap.wrap(configurations, width, subsequent_indent="  ")]
        evaluations = f"With --mode=eval: {', '.join(evaluation_preset_names())}"
        lines += textwrap.wrap(evaluations, width, subsequent_indent="  ")
    return "\n".join(lines)


def _row(flag: flags.Flag, default: str | None, *, is_required: bool) -> _FlagRow:
    """Returns a flag with its default, and its help with the choices.

    A `default` of None stands for the default of the flag's definition.
    """
    explanation = flag.help or ""
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        # absl puts "<a|b>: " before the help of its own enums.
        if explanation.startswith("<"):
            explanation = explanation.partition(">: ")[2]
        explanation = f"{explanation} Choices: {', '.join(choices)}."
    if is_required:
        return _FlagRow(f"--{flag.name}=NAME", f"Required. {explanation}")

    if default is None:
        # absl puts quotes around the defaults of text flags.
        default = (flag.default_as_str or "").strip("'")
        if not flag.default_as_str and isinstance(flag.parser, flag_tree.SettingParser):
            default = flag_tree.NONE
    return _FlagRow(f"--{flag.name}={default}", explanation)


def _table(rows: Sequence[_FlagRow], width: int) -> list[str]:
    """Returns the lines of a table: usages on the left, their explanations in one column."""
    usual_widths = [len(row.usage) for row in rows if len(row.usage) <= _WIDEST]
    column = 4 + max(usual_widths, default=_WIDEST)
    lines = []
    for row in rows:
        first = f"  {row.usage}"
        if len(first) > column - 2:
            lines.append(first)
            first = ""
        wrapped = textwrap.wrap(row.explanation, width - column, break_on_hyphens=False) or [""]
        lines.append(f"{first:<{column}}{wrapped[0]}".rstrip())
        lines += [" " * column + line for line in wrapped[1:]]
    return lines
