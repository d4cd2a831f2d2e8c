"""Text before it becomes tokens: three splits, each a sequence of files that are read in blocks of bytes.

Nothing is held in memory: a block is at most a few megabytes, and a split may be read many times.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator

import tqdm

BLOCK_BYTES = 1 << 20  # Large enough that the cost per block is negligible, small beside any model.
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class File:
    """A named range of consecutive bytes."""

    name: str  # For errors: a path, or the name of a part of a corpus.
    size: int  # Bytes.
    blocks: Callable[[], Iterator[bytes]]  # Each call starts at the first byte; together `size` bytes.
    offset: int = 0  # Position of the first byte in the file of that name.


def with_bar(description: str, files: Iterable[File]) -> Iterator[File]:
    """Yields the files. On a terminal, a bar shows how far their bytes are read if that takes more than a second."""
    files = list(files)
    size = sum(file.size for file in files)
    with tqdm.tqdm(total=size, desc=description, unit="B", unit_scale=True, delay=1, disable=None) as bar:
        for file in files:
            yield dataclasses.replace(file, blocks=functools.partial(_advance, file, bar))


def _advance(file: File, bar: tqdm.tqdm) -> Iterator[bytes]:
    for block in file.blocks():
        yield block
        bar.update(len(block))


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in three splits, before it becomes tokens."""

    name: str  # Short, for a row of a table.
    description: str  # One line for people; the tokens are not part of it.
    digest: str  # sha256 of the content, in hexadecimal.
    splits: dict[str, tuple[File, ...]]  # Keys: SPLITS.
    closed_alphabet: bool = False  # Byte tokens are the values that occur in it: a whole published corpus.
