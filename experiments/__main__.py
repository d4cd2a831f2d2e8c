"""Lists the commands with the first lines of their docstrings: `python -m experiments`."""

import ast
import io
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADINGS = {
    "experiments": "Commands",
    "experiments/paper": "Tables and figures of the paper",
    "experiments/bench": "Benchmarks",
    "launch": "Launchers",
}


def programs(folder: str) -> dict[str, str]:
    """Returns the commands in a directory by name, with the first lines of their docstrings."""
    summaries = {}
    for path in sorted((ROOT / folder).glob("*.py")):
        text = path.read_text()
        if path.stem != "__main__" and '__name__ == "__main__"' in text:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            name = f"{folder}/{path.stem}".replace("/", ".")
            summaries[name] = docstring.partition("\n")[0]
    return summaries


def main() -> None:
    """Prints the commands."""
    lines = ["python -m NAME --help lists the flags of a command."]
    for folder, heading in HEADINGS.items():
        lines += ["", f"{heading}:"]
        for name, summary in programs(folder).items():
            lines.append(f"  {name}\n      {summary}")
    # The list is the whole output: `| head` may end this process, and its text may be in any
    # encoding.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
