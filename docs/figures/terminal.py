"""Draws docs/terminal.svg: a run of the quickstart that is killed, and the same command again.

    python docs/figures/terminal.py

Needs rich, which flax installs. Lines that the second start prints again are omitted.
"""

import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 112
COMMAND = (
    "python -m experiments.quickstart --train.steps=600 --train.checkpoint_every=100 "
    "--train.eval_every=200"
)
KILLED_AFTER = "step 400/"  # The beginning of a line.
PROGRESS = re.compile(r"step \d+/|(test|with|without|learning)\b.*%")
STYLES = {
    r"^\$.*": "bold white",
    # Keys of the log are padded to ten characters. Other lines begin with words of a sentence.
    r"^[a-z]{1,8} {2,}(?=\S)|^[a-z]{9} (?=\S)|^step [\d/]+:?": "cyan",
    r"bits per byte [\d.]+|best so far": "green",
    r"^Killed": "red",
}


def output(*, killed_after: str | None = None) -> list[str]:
    """Runs the command and returns its lines.

    After one that begins with `killed_after` it is killed.
    """
    lines = []
    command = [sys.executable, *COMMAND.split()[1:]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip().replace(f"{Path.cwd()}/", ""))
            if killed_after and line.startswith(killed_after):
                process.kill()
                return [*lines, "Killed"]
    return lines


def main() -> None:
    """Runs the command twice and writes the picture."""
    first, second = output(killed_after=KILLED_AFTER), output()
    lines = [
        f"$ {COMMAND}",
        *first,
        "",
        f"$ {COMMAND}",
        *(line for line in second if line not in first),
    ]
    shown: list[str] = []
    for is_progress, group in itertools.groupby(lines, lambda line: bool(PROGRESS.match(line))):
        found = list(group)
        shown += [found[0], "...", found[-1]] if is_progress and len(found) > 3 else found
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in shown:
        text = Text(line, no_wrap=True, overflow="ellipsis")
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text)
    path = Path(__file__).parents[1] / "terminal.svg"
    console.save_svg(str(path), title="txl_jax", theme=MONOKAI)
    # Without fonts from the network: GitHub does not load them.
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", path.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
