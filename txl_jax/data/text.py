"""Text before it becomes tokens: three splits, each a sequence of files that are read in blocks.

Nothing is held in memory: a block is at most a few megabytes, and a split may be read many times.
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator

import tqdm

from txl_jax.errors import UserError
from txl_jax.runtime import storage

# Large enough that the cost per block is negligible, small compared with any model.
BLOCK_BYTES = 1 << 20
SPLITS = ("train", "valid", "test")
BYTE_ORDER_MARK = "\ufeff"  # Windows writes it before a file's first word.
# First bytes of files that are seldom meant to be read as they are.
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\3\4": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"(\xb5/\xfd": "zstd",
}
_PACKED |= dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "UTF-16")
_LONGEST_WORD = 1 << 16  # Bytes. Longer ranges without white space are cut between characters.


@dataclasses.dataclass(frozen=True)
class File:
    """A named range of consecutive bytes."""

    # For errors: a path, or the name of a part of a corpus.
    name: str
    # Bytes.
    size: int
    # Each call starts at the first byte; together `size` bytes.
    blocks: Callable[[], Iterator[bytes]]
    # Position of the first byte in the file of that name.
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Text:
    """A text in three splits, before it becomes tokens."""

    # Short, for a row of a table.
    name: str
    # One human-readable line, without the tokens.
    description: str
    # sha256 of the content, in hexadecimal.
    digest: str
    # Keys: SPLITS.
    splits: dict[str, tuple[File, ...]]
    # Byte tokens are the values that occur in it: a whole published corpus.
    closed_alphabet: bool = False


def digest_of(digests: Iterable[str]) -> str:
    """Returns sha256 of concatenated digests, in hexadecimal."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def bar(description: str, size: int) -> tqdm.tqdm:
    """Returns a bar of the bytes read. It shows on a terminal, if they take more than a second."""
    return tqdm.tqdm(total=size, desc=description, unit="B", unit_scale=True, delay=1, disable=None)


def with_bar(description: str, files: Iterable[File]) -> Iterator[File]:
    """Yields the files, with a bar that shows how far their bytes are read."""
    files = list(files)
    with bar(description, sum(file.size for file in files)) as shown:

        def blocks(file: File) -> Iterator[bytes]:
            for block in file.blocks():
                yield block
                shown.update(len(block))

        for file in files:
            yield dataclasses.replace(file, blocks=functools.partial(blocks, file))


# Files that the user names


def file_part(path: str, first: int = 0, last: int | None = None) -> File:
    """Returns bytes `first` to `last - 1` of the file at `path`."""
    last = os.path.getsize(path) if last is None else last
    return File(path, last - first, functools.partial(_blocks, path, first, last), offset=first)


def _blocks(path: str, first: int, last: int) -> Iterator[bytes]:
    with open(path, "rb") as source:
        source.seek(first)
        while first < last:
            block = source.read(min(BLOCK_BYTES, last - first))
            if not block:
                raise UserError(
                    f"{path} became shorter while it was read. Do not change it while a run starts."
                )
            yield block
            first += len(block)


def checked(path: str, *, flag: str) -> str:
    """Returns the path of a file that the user named.

    Raises `UserError` if it is not a file with content.
    """
    if os.path.isfile(path) and os.path.getsize(path):
        return path
    if not os.path.exists(path):
        wrong = "does not exist"
    elif os.path.isdir(path):
        wrong = "is a directory"
    elif storage.is_pipe(path):
        wrong = "is a pipe, which can be read only once. Write it to a file first"
    elif os.path.isfile(path):
        wrong = "is empty"
    else:
        wrong = "is a device or a socket"
    raise UserError(f"{flag} must name a non-empty file, got {path}, which {wrong}")


def expanded(names: Iterable[str], *, flag: str) -> list[str]:
    """Returns the files of names and patterns. Raises `UserError` like `checked`."""
    found = (
        [name] if os.path.exists(name) else sorted(glob.glob(name)) or [name] for name in names
    )
    return [checked(path, flag=flag) for path in itertools.chain(*found)]


def json_texts(
    lines: Iterable[bytes], field: str, *, name: str, zeros_allowed: bool = True
) -> Iterator[tuple[int, str]]:
    """Yields the line number and the text of a field for each JSON line that is not empty.

    Line numbers start at 1.

    Raises `UserError` with number and `name` of the file for a line without such a text, or, unless
    `zeros_allowed`, for a text with a zero character, which only bytes may contain.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == 1 and (kind := packed_as(line)):
            unpack = "Unpack or convert it first, or pass a pipe, such as --data.file=<(zcat FILE)."
            raise UserError(f"{name} must be JSON lines in UTF-8, got {kind}. {unpack}")
        try:
            text = json.loads(line)[field]
            text.encode()  # A number has no such method, and half a surrogate pair no UTF-8.
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            wanted = (
                f"line {number} of {name} must be a JSON object with a text in the field {field!r}"
            )
            advice = "Correct the line, or change --data.json_field (none for plain text files)."
            raise UserError(f"{wanted}, got {line.strip()[:60]!r}. {advice}") from None
        if not zeros_allowed and (place := text.find("\0")) >= 0:
            found = (
                f"line {number} of {name} has a zero character (\\u0000) at position "
                f"{place} of its text"
            )
            raise UserError(f"{found}. Remove it, or read bytes with --data.tokenizer.kind=byte.")
        yield number, text


# UTF-8


def text_blocks(files: Iterable[File], *, close_lines: bool) -> Iterator[str]:
    """Yields the files' UTF-8 text in blocks.

    The blocks cut neither a character nor a word of usual length.

    With `close_lines` a last line without a newline gets one, so that the line ends with its file.
    Raises `UserError`, which names file and offset, for a byte that is zero or not UTF-8.
    """
    for file in files:
        rest, offset = b"", file.offset
        for block in file.blocks():
            block = rest + block
            cut = _last_border(block)
            yield _decode(block[:cut], file.name, offset)
            rest, offset = block[cut:], offset + cut
        last = _decode(rest, file.name, offset)
        # A text that ends in a newline leaves no remainder.
        yield last + "\n" if close_lines and last else last


def _last_border(block: bytes) -> int:
    """Returns the position at which to cut a block.

    It is after the last white space or, in a very long word, before a character.
    """
    # White space at the very end stays with the next block: a line without its newline leaves a
    # remainder.
    border = (
        max(block.rfind(b"\n"), *(block.rfind(white, 0, -1) for white in (b" ", b"\t", b"\r"))) + 1
    )
    if not border and len(block) >= _LONGEST_WORD:
        border = len(block) - 1
        while border > 0 and block[border] & 0xC0 == 0x80:  # Inside a character of several bytes.
            border -= 1
    return border


def packed_as(head: bytes) -> str:
    """Returns the format of a file that begins like a compressed or UTF-16 file, or else ""."""
    return next((kind for start, kind in _PACKED.items() if head.startswith(start)), "")


def _decode(block: bytes, name: str, offset: int) -> str:
    try:
        if (zero := block.find(b"\0")) >= 0:
            raise UnicodeDecodeError("utf-8", block, zero, zero + 1, "no text has a zero byte")
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = "" if offset else packed_as(block)
        found = (
            f"got {kind}"
            if kind
            else f"got byte {block[error.start]:#04x} at offset {offset + error.start}"
        )
        advice = (
            "Unpack or convert it" if kind else "Convert it (iconv -f LATIN1 -t UTF-8, for example)"
        )
        other = "or read its bytes with --data.tokenizer.kind=byte."
        raise UserError(f"{name} must be text in UTF-8, {found}. {advice}, {other}") from None
    return text.removeprefix(BYTE_ORDER_MARK) if offset == 0 else text
