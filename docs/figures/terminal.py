"""Draws docs/terminal.svg: a run of the quickstart that is killed, and the same command again.

    python docs/figures/terminal.py

Only the lines around the kill are drawn. The losses after the restart must be those before it, or
nothing is drawn. Needs rich, which flax installs. Its run is in runs/quickstart, which must not
exist yet.
"""

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COLUMNS = 100
COMMAND = "python -m experiments.quickstart --train.checkpoint_every=100 --train.log_every=50"
# Patterns of lines. The last checkpoint before the kill is of step 100, and two more lines are
# logged after it.
FIRST_SHOWN = "step +100/"
KILLED_AFTER = "step +200/"
RESUMING = "resuming "
STEP_AND_LOSS = re.compile(r"step +(\d+)/\d+  loss ([\d.]+)")
STYLES = {
    r"^\$.*": "bold white",
    # Keys of the log are padded to ten characters.
    r"^[a-z]{1,8} {2,}(?=\S)|^step +[\d/]+": "cyan",
    r"loss [\d.]+": "green",
    r"^Killed": "red",
}


def output_until_killed() -> list[str]:
    """Runs the command, kills it after the line of `KILLED_AFTER`, and returns its lines.

    Raises:
      RuntimeError: If the command ends before that.
    """
    lines = []
    command = [sys.executable, *COMMAND.split()[1:]]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if re.match(KILLED_AFTER, line):
                process.kill()
                return lines
    raise RuntimeError("\n".join(["the command ended by itself:", *lines]))


def from_line(lines: list[str], pattern: str) -> list[str]:
    """Returns the first line of a pattern, and the lines about training steps after it."""
    [first, *_] = [number for number, line in enumerate(lines) if re.match(pattern, line)]
    return [lines[first], *filter(STEP_AND_LOSS.match, lines[first + 1 :])]


def losses(lines: list[str]) -> dict[str, str]:
    """Returns the loss of each step, as printed."""
    matches = [STEP_AND_LOSS.match(line) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def main() -> None:
    """Runs the command twice and writes the picture."""
    before = from_line(output_until_killed(), FIRST_SHOWN)
    after = from_line(output_until_killed(), RESUMING)
    repeated = losses(after)
    expected = {step: loss for step, loss in losses(before).items() if step in repeated}
    if len(repeated) < 2 or repeated != expected:
        raise RuntimeError(f"the losses before and after differ: {expected}, {repeated}")

    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for line in [f"$ {COMMAND}", "...", *before, "Killed", f"$ {COMMAND}", "...", *after]:
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
