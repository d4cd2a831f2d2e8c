"""Docstrings in Google's style as Markdown."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SECTIONS = ("Args", "Returns", "Yields", "Raises")
CODE_SPAN = re.compile(r"(`[^`]*`)")
# The start of a line that Markdown would take for an item of a list or for a quotation. In a
# paragraph it is a sign, such as the minus of a formula whose second line is "- q".
BULLET = re.compile(r"^(?=[-+*>] )", re.MULTILINE)
# Stars and underscores that Markdown could take for emphasis, because they touch a word.
EMPHASIS = re.compile(r"\*(?=\S)|(?<=\S)\*|_(?!\w)|(?<!\w)_")


class Part(NamedTuple):
    """A section of a docstring, or the text before, between or after sections."""

    section: str  # One of `SECTIONS`, or empty for text.
    content: str  # As it is in the source. A section's is not indented.


class Entry(NamedTuple):
    """One line of a section, such as "path: The run's workdir."."""

    name: str
    description: str


def parse(docstring: str) -> list[Part]:
    r"""Splits a docstring, which `ast.get_docstring` has cleaned, into its parts, in order.

    >>> parse("Doubles.\n\nArgs:\n  x: A number,\n    not 0.\n")
    [Part(section='', content='Doubles.'), Part(section='Args', content='x: A number,\n  not 0.')]
    """
    section = ""
    lines: list[str] = []
    parts = []
    for line in docstring.splitlines():
        name = line.removesuffix(":")
        if line.endswith(":") and name in SECTIONS:
            parts.append(_part(section, lines))
            section = name
            lines = []
            continue
        # A section ends with the first line that is not indented.
        if section and line and not line.startswith(" "):
            parts.append(_part(section, lines))
            section = ""
            lines = []
        lines.append(line)
    parts.append(_part(section, lines))
    return [part for part in parts if part.content]


def _part(section: str, lines: list[str]) -> Part:
    """Returns a part with these lines, without blank lines at its ends."""
    content = "\n".join(lines)
    if section:
        content = textwrap.dedent(content)
    return Part(section, content.strip("\n").rstrip())


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


def summary(parts: Sequence[Part]) -> str:
    """Returns the first paragraph of a docstring in one line, as Markdown."""
    if not parts or parts[0].section:
        return ""
    paragraph = parts[0].content.partition("\n\n")[0]
    return escape(" ".join(paragraph.split()))


def markdown(parts: Sequence[Part], types: Mapping[str, str]) -> str:
    """Returns the parts of a docstring as Markdown, in their order.

    Args:
      parts: The parts.
      types: Types of arguments by name, and of the result as "return", as far as they are known.

    Raises:
      ValueError: If arguments of different types have one entry.
    """
    blocks = []
    for name, content in parts:
        if not name:
            for block in _paragraphs(content):
                blocks.append(_block(block))
        elif name in ("Args", "Raises"):
            items = []
            for entry in entries(content):
                items.append(_item(entry, types))
            blocks.append(f"{name}:")
            blocks.append("\n".join(items))
        else:
            description = escape(" ".join(content.split()))
            blocks.append(f"{name}{_in_parentheses(types.get('return'))}: {description}")
    return "\n\n".join(blocks)


def _paragraphs(text: str) -> list[str]:
    """Splits a text at its blank lines, but not between indented lines.

    A drawing with blank lines is therefore one paragraph.
    """
    paragraphs: list[str] = []
    for paragraph in text.split("\n\n"):
        after_drawing = bool(paragraphs) and paragraphs[-1].startswith("    ")
        if after_drawing and paragraph.startswith("    "):
            paragraphs[-1] += f"\n\n{paragraph}"
        else:
            paragraphs.append(paragraph)
    return paragraphs


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
    """Returns an entry as an item of a list.

    An entry may be about several arguments, such as "key, value". They must have the same type,
    which the item shows once.
    """
    names = entry.name.split(", ")
    code = ", ".join(f"`{name}`" for name in names)
    type_names = {types.get(name.lstrip("*")) for name in names}
    if len(type_names) > 1:
        raise ValueError(
            f"arguments that share an entry must have one type, got {entry.name!r} of the types "
            f"{sorted(map(str, type_names))}. Write an entry for each"
        )
    [type_name] = type_names
    return f"- {code}{_in_parentheses(type_name)}: {escape(entry.description)}"


def _in_parentheses(code: str | None) -> str:
    """Returns code as it follows a name, or an empty string for None."""
    return "" if code is None else f" (`{code}`)"
