"""The format of config.json and of checkpoints: a number that is raised where draws or meanings change.

`CHANGES` is the table of them. Where only draws changed, a run of an older format is read as ever, and training that
continues logs one line about it. Where parameters or settings mean something else, it is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

FORMAT = 2  # Of what is written now.
KEY = "format"
_UNNUMBERED = 1  # Files that were written before there was a number.


@dataclasses.dataclass(frozen=True)
class Change:
    """A change from one format to the next.

    Attributes:
      text: one clause about what changed.
      setting: dotted name of the setting that must be on for a run to draw other numbers; None: every run does.
      keeps_meaning: whether parameters and settings mean the same as before; if not, older files are refused.
    """

    text: str
    setting: str | None = None
    keeps_meaning: bool = True


# By the number that began with it. Format 1 is that of all files without a number.
CHANGES: Mapping[int, Change] = {
    2: Change(
        "dropout on attention probabilities draws other numbers, by a hash of (seed, row x heads + head, query, key)",
        setting="model.dropout.attention",
    ),
}


def read_format(record: Mapping[str, Any]) -> int:
    """Returns the format of a JSON object, 1 if it names none; raises `ValueError` if that is no number from 1 on."""
    number = record.get(KEY, _UNNUMBERED)
    if type(number) is not int or number < 1:
        raise ValueError(f"its format is {number!r}, and formats are numbers from 1 on")
    return number


def changes_since(number: int) -> dict[int, Change]:
    """Returns the changes after a format, by number."""
    return {each: change for each, change in CHANGES.items() if each > number}


def refusal(number: int) -> str | None:
    """Returns a clause about why files of a format cannot be read, and what to do; None: they can be."""
    if number > FORMAT:
        return f"has format {number} and this version of txl_jax reads formats up to {FORMAT}; install a newer txl_jax"
    for each, change in changes_since(number).items():
        if not change.keeps_meaning:
            return (
                f"has format {number} and since format {each} {change.text}; read it with the version of txl_jax that "
                "wrote it, or train anew in another --workdir"
            )
    return None
