"""Reads the pages of the documentation: their code blocks, and the commands of a shell block."""

import dataclasses
import functools
import re
import subprocess
from typing import Any

import jax

from support import ROOT

# README and the guides. BUILD.md and CONTRIBUTING.md are for those who change this project.
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]

# The languages of blocks that show what a command prints, or a formula.
OUTPUT = {"", "text"}

_FENCED = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>.*?)")?\n(?P<source>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)
# Lines that are indented by four spaces below an empty line. A list item's further lines have two.
_INDENTED = re.compile(r"(?<=\n\n)(?P<source>(?: {4}.*\n)+)")
_FIRST_WORDS_OF_COMMANDS = ("python", "python3", "pip", "curl", "bash", "git")
# Everything before a `#` that stands at the beginning of a word and not in quotes.
_CODE = re.compile(r"""(?:[^'"#]|'[^']*'|"[^"]*"|(?<=\S)#)*""")


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str  # Relative to the root.
    line: int  # Of the page, where the source begins.
    language: str  # What stands behind the fence.
    source: str
    title: str = ""  # Such as "transformers 4.35.2": a block for another environment.


@dataclasses.dataclass(frozen=True)
class Step:
    """What a reader types or saves at once: a shell command, or the whole block of another
    language.
    """

    page: str
    line: int
    language: str
    source: str

    @property
    def name(self) -> str:
        """The source on one line."""
        return " ".join(self.source.split())


def blocks(page: str) -> list[Block]:
    """Returns the code blocks of a page in order.

    A block that is only indented counts as one of the shell if it begins with a command. Others,
    such as signatures, are omitted.
    """
    text = (ROOT / page).read_text()
    all_blocks = []
    for match in _FENCED.finditer(text):
        line = text.count("\n", 0, match.start("source")) + 1
        title = match["title"] or ""
        all_blocks.append(Block(page, line, match["language"], match["source"], title))
    # Keeps the lines' numbers, and hides code that is indented within a fence.
    outside = _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _INDENTED.finditer(outside):
        source = re.sub(r"^ {4}", "", match["source"], flags=re.MULTILINE)
        if source.split()[0] in _FIRST_WORDS_OF_COMMANDS:
            line = outside.count("\n", 0, match.start("source")) + 1
            all_blocks.append(Block(page, line, "sh", source))
    return sorted(all_blocks, key=lambda block: block.line)


@functools.cache  # Each command is read by bash.
def steps(page: str) -> list[Step]:
    """Returns what a reader of a page types or saves, in order, without what is only output.

    Blocks with a title are for other packages' environments, and have tests of their own.
    """
    all_steps = []
    for block in blocks(page):
        if block.language in OUTPUT or block.title:
            continue
        if block.language == "sh":
            all_steps.extend(commands(block))
        else:
            all_steps.append(Step(page, block.line, block.language, block.source))
    return all_steps


def commands(block: Block) -> list[Step]:
    """Returns the commands of a shell block. One may have multiple lines, as a loop has."""
    all_commands = []
    waiting = ""
    first_line = block.line
    for offset, line in enumerate(block.source.splitlines(keepends=True)):
        if not waiting:
            first_line = block.line + offset
            if not line.strip() or line.startswith("#"):
                continue
        waiting += line
        if _is_complete(waiting):
            all_commands.append(Step(block.page, first_line, "sh", waiting.rstrip("\n")))
            waiting = ""
    assert not waiting, f"{block.page}:{first_line}: the command has no end:\n{waiting}"
    return all_commands


def _is_complete(source: str) -> bool:
    """Returns whether bash would run these lines, instead of waiting for more."""
    if source.endswith("\\\n"):
        return False
    check = subprocess.run(["bash", "-n"], input=source, capture_output=True, text=True)
    return check.returncode == 0


def with_flags(command: str, flags: str) -> str:
    """Returns a command with further flags behind it, and without a comment at its end."""
    code = _CODE.match(command)
    assert code is not None
    return f"{code[0].rstrip()} {flags}"


def python_blocks(page: str = "README.md", *, title: str = "") -> list[str]:
    """The text of each block of Python on a page with this title, from the first to the last."""
    sources = []
    for block in blocks(page):
        if block.language == "python" and block.title == title:
            sources.append(block.source)
    return sources


def execute(sources: list[str], **names: Any) -> dict[str, Any]:
    """Runs the blocks of a page one after the other, and returns the names that they define.

    A reader's code runs with jax's own settings, unlike this suite.
    """
    names["__name__"] = "page"
    with jax.numpy_rank_promotion("allow"):
        for source in sources:
            exec(source, names)
    return names
