"""Draws docs/terminal.svg: a run of the quickstart that is killed, and the same command again.

    python docs/figures/terminal.py runs/terminal

Needs rich (flax installs it), and twice the quickstart's time. What the second start prints again is left out.
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
KILLED_AFTER = "step 1100/"  # The beginning of a line. Step 1,000 has a checkpoint.
PROGRESS = re.compile(r"step \d+/|(test|with|without)\b.*%")
STYLES = {
    r"^\$.*": "bold white",
    r"^[a-z]+ +(?=\S)|^step [\d/]+:?": "cyan",
    r"bpc [\d.]+|best so far|^resumed": "green",
    r"^Killed": "red",
}


def output(command: list[str], *, killed_after: str | None = None) -> list[str]:
    """Runs a command and returns its lines, after a line that begins with `killed_after` those of `kill -9`."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if killed_after and line.startswith(killed_after):
                process.kill()
                return [*lines, "Killed"]
    return lines


def main(workdir: str) -> None:
    """Runs the command twice and writes the picture."""
    command = [sys.executable, "-m", "experiments.quickstart", f"--workdir={workdir}"]
    prompt = "$ python -m experiments.quickstart"
    first = output(command, killed_after=KILLED_AFTER)
    second = output(command)
    lines = [prompt, *first, "", prompt, *(line for line in second if line not in first)]
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
    main(*sys.argv[1:])
