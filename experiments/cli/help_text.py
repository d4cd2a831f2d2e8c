"""The text of `--help`: the flags in groups, one line each where it fits, those a program does not read left out."""

import shutil
import textwrap
from collections.abc import Collection, Sequence

from absl import flags

from experiments.cli import flag_tree
from txl_jax.config import ExperimentConfig

_WIDEST = 36  # Longer `--name=default` have their help on the next line.
_PROGRAM, _HOSTS = "program", "several hosts"
_HOST_FLAGS = ("coordinator", "num_processes", "process_id")
_FLAGFILE = ("--flagfile=NAME", "A published configuration (listed below) or a file with one flag per line.")
# Settings outside of a group, and the group they are shown with.
_GROUPS = {"seed": "train"}


def help_text(own: Sequence[str], groups: Collection[str] | None, flag_values: flags.FlagValues) -> str:
    """Formats the flags of a program with their defaults, as wide as the terminal, 80 to 120 columns.

    Args:
      own: the program's flags that are no settings of `ExperimentConfig`, in order.
      groups: groups of settings that are shown, such as "model", which has "model.dropout" with it; None: all.
    """
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)
    settings = {leaf.name for leaf in flag_tree.setting_leaves(ExperimentConfig)}
    shown: dict[str, list[str]] = {_PROGRAM: [], _HOSTS: []}
    for name in own:
        if name not in settings and name != "compat":
            shown[_HOSTS if name in _HOST_FLAGS else _PROGRAM].append(name)
    for name in ["seed", "compat", *(leaf.name for leaf in flag_tree.setting_leaves(ExperimentConfig))]:
        group = _GROUPS.get(name) or ("compat" if name == "compat" else name.rpartition(".")[0])
        wanted = groups is None or any(group == chosen or group.startswith(f"{chosen}.") for chosen in groups)
        if wanted and name in flag_values and name not in shown.setdefault(group, []):
            shown[group].append(name)
    lines = ["Flags with their defaults. Later flags win. --helpfull shows the settings that are left out here too."]
    for group, names in shown.items():
        pairs = [_FLAGFILE] if group == _PROGRAM else []
        pairs += [(_usage(flag_values[name]), _explanation(flag_values[name])) for name in names]
        if pairs:
            lines += ["", f"{group}:", *_table(pairs, width)]
    names = ", ".join(flag_tree.flagfile_names())
    return "\n".join([*lines, "", *textwrap.wrap(f"Published configurations: {names}", width, subsequent_indent="  ")])


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


def _table(pairs: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Lays out usages and explanations in two columns."""
    column = 4 + max((len(usage) for usage, _ in pairs if len(usage) <= _WIDEST), default=_WIDEST)
    lines = []
    for usage, explanation in pairs:
        first = f"  {usage}"
        if len(first) > column - 2:
            lines.append(first)
            first = ""
        wrapped = textwrap.wrap(explanation, width - column, break_on_hyphens=False) or [""]
        lines.append(f"{first:<{column}}{wrapped[0]}".rstrip())
        lines += [" " * column + line for line in wrapped[1:]]
    return lines
