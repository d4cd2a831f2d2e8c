"""Docstrings in Google's style as Markdown."""

import re
import textwrap
from collections.abc import Mapping
from typing import NamedTuple

SECTIONS = ("Args", "Returns", "Yields", "Raises")
CODE_SPAN = re.compile(r"(`[^`]*`)")
# The start of a line that Markdown could take for an item of a list, such as "- q".
BULLET = re.compile(r"^(?=[-+*>] )", re.MULTILINE)
# Stars and underscores that Markdown could take for emphasis, because they touch a word.
EMPHASIS = re.compile(r"\*(?=\S)|(?<=\S)\*|_(?!\w)|(?<!\w)_")


class Docstring(NamedTuple):
    """The parts of a docstring, as they are in the source."""

    text: str  # All but the sections. The first paragraph is the summary.
    sections: dict[str, str]  # Contents of "Args" and others by name, not indented.


class Entry(NamedTuple):
    """One line of a section, such as "path: The run's workdir."."""

    name: str
    description: str


def parse(docstring: str) -> Docstring:
    r"""Splits a docstring, which `ast.get_docstring` has cleaned, into text and sections.

    >>> parse("Doubles.\n\nArgs:\n  x: A number,\n    not 0.\n")
    Docstring(text='Doubles.', sections={'Args': 'x: A number,\n  not 0.'})
    """
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    current = text
    for line in docstring.splitlines():
        name = line.removesuffix(":")
        if line.endswith(":") and name in SECTIONS:
            current = sections.setdefault(name, [])
            continue
        # A section ends with the first line that is not indented.
        if line and not line.startswith(" "):
            current = text
        current.append(line)

    contents = {}
    for name, lines in sections.items():
        contents[name] = textwrap.dedent("\n".join(lines)).strip()
    return Docstring("\n".join(text).strip(), contents)


def entries(section: str) -> list[Entry]:
    r"""Returns the entries of "Args" or "Raises". Their other lines are indented.

    >>> entries("x: A number,\n  not 0.\ny: Another.")
    [Entry(name='x', description='A number, not 0.'), Entry(name='y', description='Another.')]
    """
    result = []
    for entry in re.split(r"\n(?=\S)", section):
        name, _, description = entry.partition(":")
        result.append(Entry(name, " ".join(description.split())))
    return result


def escape(text: str) -> str:
    r"""Escapes what Markdown would take for tags or emphasis, except in code spans.

    >>> print(escape("Words become <unk>, r_(i-j) is not d_model, and `<unk>` stays."))
    Words become &lt;unk>, r\_(i-j) is not d_model, and `<unk>` stays.
    """
    parts = CODE_SPAN.split(text)  # Text and code spans in turn.
    for i in range(0, len(parts), 2):
        part = parts[i].replace("&", "&amp;").replace("<", "&lt;")
        parts[i] = EMPHASIS.sub(r"\\\g<0>", part)
    return "".join(parts)


def summary(docstring: Docstring) -> str:
    """Returns the first paragraph of a docstring in one line, as Markdown."""
    paragraph = docstring.text.partition("\n\n")[0]
    return escape(" ".join(paragraph.split()))


def markdown(docstring: Docstring, types: Mapping[str, str]) -> str:
    """Returns a docstring as Markdown.

    Args:
      docstring: Its parts.
      types: Types of arguments by name, and of the result as "return", as far as they are known.
    """
    blocks = []
    for block in docstring.text.split("\n\n"):
        blocks.append(_block(block))

    for name, content in docstring.sections.items():
        if name in ("Args", "Raises"):
            items = []
            for entry in entries(content):
                items.append(_item(entry, types))
            blocks.append(f"{name}:")
            blocks.append("\n".join(items))
        else:
            description = escape(" ".join(content.split()))
            blocks.append(f"{name}{_in_parentheses(types.get('return'))}: {description}")
    return "\n\n".join(blocks)


def _block(block: str) -> str:
    """Returns a paragraph or a list, or an example or a drawing in a fence."""
    if block.startswith(">>>"):
        return f"```pycon\n{block}\n```"
    if block.startswith("    "):
        return f"```text\n{textwrap.dedent(block)}\n```"
    if block.startswith("- "):
        return escape(block)
    return BULLET.sub(r"\\", escape(block))


def _item(entry: Entry, types: Mapping[str, str]) -> str:
    """Returns an entry as an item of a list. Its name may be several, such as "key, value"."""
    names = entry.name.split(", ")
    code = ", ".join(f"`{name}`" for name in names)
    # Arguments that have one entry have one type.
    type_name = types.get(names[0].removeprefix("*").removeprefix("*"))
    return f"- {code}{_in_parentheses(type_name)}: {escape(entry.description)}"


def _in_parentheses(code: str | None) -> str:
    """Returns code as it follows a name, or an empty string for None."""
    return "" if code is None else f" (`{code}`)"
