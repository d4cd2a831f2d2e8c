"""Structure of a compiled program's text (`compiled.as_text()`, HLO).

XLA lists a program as computations; loops, fusions and calls name the ones they run.
"""

import re
from collections.abc import Iterator

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_CONSTANT = re.compile(r"%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)")
_COMPARE = re.compile(r" compare\(.*?%?([\w.\-]+)\), direction=LT")


def computations(text: str) -> dict[str, list[str]]:
    """Splits the text into the lines of each computation, by name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = found.setdefault(header[2], [])
        else:
            lines.append(line)
    return found


def entry(text: str) -> str:
    """Returns the name of the computation that a call of the program starts with."""
    return next(header[2] for line in text.splitlines() if (header := _HEADER.match(line)) and header[1])


def executed(
    computations: dict[str, list[str]], name: str, *, fusions: bool = True, loops: int = 0, times: int = 1
) -> Iterator[tuple[str, int, int]]:
    """Yields each computation that is executed, with the number of loops around it and of its executions.

    Args:
      computations: of a program, by name.
      name: of the computation to begin with.
      fusions: whether to enter fusions, whose inner results are not written to memory.
      loops: loops around the first computation.
      times: executions of it.
    """
    yield name, loops, times
    for line in computations[name]:
        if not fusions and " fusion(" in line:
            continue
        called = {role: other for role, other in _CALLED.findall(line) if role != "to_apply" or " call(" in line}
        if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
            called |= {other: other for other in re.findall(r"[\w.\-]+", branches[1])}
        trip_count = _trip_count(line, computations[called["condition"]]) if "condition" in called else None
        for role, other in called.items():
            if other in computations and role != "condition":
                inside = role == "body"
                inner = times * (trip_count or 1) if inside else times
                yield from executed(computations, other, fusions=fusions, loops=loops + inside, times=inner)


def _trip_count(loop: str, condition: list[str]) -> int | None:
    """Returns the iterations of a loop: XLA's annotation, or the limit in its condition; None: they depend on data."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop):
        return int(known[1])
    constants = {found[1]: int(found[2]) for line in condition if (found := _CONSTANT.search(line))}
    limits = [constants.get(found[1]) for line in condition if (found := _COMPARE.search(line))]
    return limits[0] if len(limits) == 1 else None
