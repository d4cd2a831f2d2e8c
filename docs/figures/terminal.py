"""Draws docs/terminal.svg, a still of a terminal.

    python docs/figures/terminal.py TITLE < FILE

FILE is what the terminal showed, such as the output of `script`. Needs rich, which the extra `docs` installs.
"""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 118


def main() -> None:
    """Writes the picture. Fonts are the reader's: rich's own would be loaded from another site."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(sys.stdin.read().rstrip()), soft_wrap=False)
    svg = console.export_svg(title=sys.argv[1])
    (Path(__file__).parents[1] / "terminal.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
