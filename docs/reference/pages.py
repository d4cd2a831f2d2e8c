"""The pages of the reference, and their generated parts."""

import re

from docs.reference import modules, settings
from docs.reference.source import ROOT

PAGES = [ROOT / "docs" / "settings.md", *sorted((ROOT / "docs" / "api").glob("*.md"))]
PART = re.compile(r"<!-- begin (?P<name>\S+) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)


def filled(page: str) -> str:
    """Returns the text of a page with its generated parts made again.

    Raises:
      ValueError: If a part begins but does not end, or has a name that means nothing.
    """
    new_page, num_parts = PART.subn(_make_again, page)
    num_begun = page.count("<!-- begin ")
    if num_begun != num_parts:
        raise ValueError(
            f"each of the {num_begun} parts of a page must end, got {num_parts} that do. "
            "Write <!-- begin NAME --> and <!-- end NAME --> on lines of their own."
        )
    return new_page


def _make_again(part: re.Match[str]) -> str:
    """Returns a part of a page with its comments."""
    name = part["name"]
    return f"<!-- begin {name} -->\n\n{_content(name)}\n\n<!-- end {name} -->"


def _content(name: str) -> str:
    """Returns the Markdown of a part."""
    if name == "settings":
        return settings.tables()
    kind, _, page = name.partition(":")
    if kind == "names":
        on_page = PART.finditer((ROOT / "docs" / "api" / page).read_text())
        return modules.list_of_names([part["name"] for part in on_page], page)
    return modules.reference(name)
