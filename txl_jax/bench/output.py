"""Output of the benchmarks for people, line by line."""

from collections.abc import Callable

Log = Callable[[str], None]


def print_line(line: str) -> None:
    """Prints a line at once: the next may take minutes."""
    print(line, flush=True)
