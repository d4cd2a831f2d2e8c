"""The tables of all settings, from their declarations in txl_jax/config."""

import enum
import html

from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import NamedSetting, format_value, leaves

HEAD = "| setting | default | what it does | values |\n|---|---|---|---|"


def tables() -> str:
    """Returns a heading and a table for each group of settings, such as `model.dropout`."""
    rows_by_group: dict[str, list[str]] = {}
    for leaf in leaves(ExperimentConfig):
        group = _group(leaf) or "run"
        rows_by_group.setdefault(group, []).append(_row(leaf))

    parts = []
    for group, rows in rows_by_group.items():
        table = "\n".join([HEAD, *rows])
        parts.append(f"## {group}\n\n{table}")
    return "\n\n".join(parts)


def _group(leaf: NamedSetting) -> str:
    """Returns the group that a setting belongs to, or an empty string at the root."""
    return leaf.name.rpartition(".")[0]


def _row(leaf: NamedSetting) -> str:
    """Returns a setting's row of the table."""
    name = f"`--{leaf.name}`" if leaf.setting.flag else f"`{leaf.name}`, code only"
    # The page says what the star means: the setting may change when a run is resumed.
    if leaf.setting.free_on_resume or leaf.setting.may_grow:
        name += " *"

    default = format_value(leaf.default) or "empty"
    if isinstance(leaf.default, bool):
        default = default.lower()

    help_text = html.escape(leaf.setting.help, quote=False)
    return f"| {name} | {default} | {help_text} | {_values(leaf)} |"


def _values(leaf: NamedSetting) -> str:
    """Returns the values that a setting takes, and the settings that it needs or excludes."""
    kind = leaf.type.kind
    if issubclass(kind, enum.Enum):
        values = ", ".join(kind)
    elif leaf.type.is_list:
        values = f"list of {kind.__name__}"
    else:
        values = kind.__name__

    # NaN is outside of every range, so this is the range, or empty if the setting has no bounds.
    bounds = leaf.setting.missed_range(float("nan"))
    if bounds:
        values += f" {bounds}"
    if leaf.type.is_optional:
        values += " or none"

    conditions = [values]
    for name, needed in leaf.setting.only_with.items():
        conditions.append(f"only if `{_group(leaf)}.{name}` is {', '.join(needed)}")
    for name in leaf.setting.not_with:
        conditions.append(f"not with `{_group(leaf)}.{name}`")
    return "; ".join(conditions)
