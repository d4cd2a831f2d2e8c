"""A text as it is read: three splits, each a row of files that come in blocks of bytes.

Nothing is held in memory: a block is at most a few megabytes, and a split may be read many times.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

BLOCK_BYTES = 1 << 20  # Large enough that the work per block does not count, small beside any model.
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class File:
    """Consecutive bytes with a name that errors may use."""

    name: str  # A path, or what a corpus calls its part.
    size: int  # Bytes.
    blocks: Callable[[], Iterator[bytes]]  # Starts at the first byte each time; together `size` bytes.
    offset: int = 0  # Where in what `name` names the first byte lies.


# (what is being done, files) -> the same files, whose reading is shown as it goes.
Reading = Callable[[str, Iterable[File]], Iterable[File]]


def no_progress(doing: str, files: Iterable[File]) -> Iterable[File]:
    """The files as they are."""
    del doing
    return files


@dataclasses.dataclass(frozen=True)
class Text:
    """What is read, before it becomes tokens."""

    name: str  # Short: what a table's row is called.
    description: str  # One line for people, without the word on tokens.
    digest: str  # sha256 of the content, in hexadecimal.
    splits: dict[str, tuple[File, ...]]  # By the names in SPLITS.
    closed_alphabet: bool = False  # A whole published corpus: its byte tokens are the values that occur in it.
