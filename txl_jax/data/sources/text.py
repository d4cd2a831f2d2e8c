"""Text before it becomes tokens: three splits, each a sequence of files that are read in blocks of bytes.

Nothing is held in memory: a block is at most a few megabytes, and a split may be read many times.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

BLOCK_BYTES = 1 << 20  # Large enough that the cost per block is negligible, small beside any model.
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class File:
    """A named range of consecutive bytes."""

    name: str  # For errors: a path, or the name of a part of a corpus.
    size: int  # Bytes.
    blocks: Callable[[], Iterator[bytes]]  # Each call starts at the first byte; together `size` bytes.
    offset: int = 0  # Position of the first byte in the file of that name.


# (description, files) -> the same files; reading them advances a progress bar.
Progress = Callable[[str, Iterable[File]], Iterable[File]]


def no_progress(description: str, files: Iterable[File]) -> Iterable[File]:
    """Returns the files unchanged."""
    del description
    return files


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in three splits, before it becomes tokens."""

    name: str  # Short, for a row of a table.
    description: str  # One line for people; the tokens are not part of it.
    digest: str  # sha256 of the content, in hexadecimal.
    splits: dict[str, tuple[File, ...]]  # Keys: SPLITS.
    closed_alphabet: bool = False  # Byte tokens are the values that occur in it: a whole published corpus.
