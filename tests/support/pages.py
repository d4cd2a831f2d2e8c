"""The Python code of the pages, and how tests run it."""

import re

from support import ROOT


def python_blocks(page="README.md"):
    """The text of each block of Python on a page, from the first to the last."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def execute(blocks, **names):
    """Runs the blocks of a page one after the other, and returns the names that they define."""
    names["__name__"] = "page"
    for block in blocks:
        exec(block, names)
    return names
