"""MkDocs hook: the tables of docs/settings.md, built from the declarations in txl_jax/config.

The page has a line for them. If it is missing, the hook warns, which ends a strict build.
"""

import enum
import html
import logging
import sys
from pathlib import Path
from typing import Any

# This clone's settings, not those of an installed copy.
sys.path.insert(0, str(Path(__file__).parents[1]))

from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import NamedSetting, format_value, leaves

PLACE = "<!-- settings -->"
HEAD = "| setting | default | what it does | values |\n|---|---|---|---|\n"


def values(leaf: NamedSetting) -> str:
    """Returns the values that a setting takes, and the settings that it needs or excludes."""
    declared, kind, group = leaf.setting, leaf.type.kind, leaf.name.rpartition(".")[0]
    found = (
        ", ".join(kind)
        if issubclass(kind, enum.Enum)
        else "list of " * leaf.type.is_list + kind.__name__
    )
    # NaN is outside of any range.
    found += f" {bounds}" if (bounds := declared.missed_range(float("nan"))) else ""
    needs = [
        f"only if `{group}.{name}` is {', '.join(readers)}"
        for name, readers in declared.only_with.items()
    ]
    excludes = [f"not with `{group}.{name}`" for name in declared.not_with]
    return "; ".join([found + " or none" * leaf.type.is_optional, *needs, *excludes])


def row(leaf: NamedSetting) -> str:
    """Returns a setting's row of the table.

    `*` marks a setting that may change when a run is resumed.
    """
    name = f"`--{leaf.name}`" if leaf.setting.flag else f"`{leaf.name}`, code only"
    free = " *" if leaf.setting.free_on_resume or leaf.setting.may_grow else ""
    default = (
        str(leaf.default).lower() if isinstance(leaf.default, bool) else format_value(leaf.default)
    )
    return (
        f"| {name}{free} | {default or 'empty'} | {html.escape(leaf.setting.help)} | "
        f"{values(leaf)} |\n"
    )


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the page.

    In docs/settings.md a heading and a table for each group of settings take the line's place.
    """
    if page.file.src_uri != "settings.md":
        return markdown
    if PLACE not in markdown:
        logging.getLogger("mkdocs.hooks.settings").warning("settings.md has no line %s", PLACE)
    tables: dict[str, str] = {}
    for leaf in leaves(ExperimentConfig):
        group = leaf.name.rpartition(".")[0] or "run"
        tables[group] = tables.get(group, f"## {group}\n\n{HEAD}") + row(leaf)
    return markdown.replace(PLACE, "\n".join(tables.values()))
