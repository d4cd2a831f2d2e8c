"""Text before it becomes tokens: three splits, each a sequence of files that are read in blocks.

Texts are not kept in memory: a block is at most a few megabytes, and a split can be read many
times.
"""

import dataclasses
import functools
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator

import tqdm

from txl_jax.errors import UserError
from txl_jax.runtime import storage

# Large enough that the cost per block is negligible, small compared with any model.
BLOCK_BYTES = 1 << 20
SPLITS = ("train", "valid", "test")
# The byte-order mark that Windows writes at the beginning of a file.
BYTE_ORDER_MARK = "\ufeff"
# First bytes of files that are seldom meant to be read directly.
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"PK\3\4": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"(\xb5/\xfd": "zstd",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"MThd": "MIDI (docs/music.md shows how to convert it to ids)",
}
# Number of bytes. Longer ranges without white space are cut between characters.
_LONGEST_WORD = 1 << 16
# Number of bytes of a line that an error shows.
_SHOWN_BYTES = 60


@dataclasses.dataclass(frozen=True)
class File:
    """A named range of consecutive bytes."""

    # A path, or the name of a part of a corpus, for errors.
    name: str
    # Number of bytes.
    size: int
    # Yields all bytes, in blocks. Each call starts at the first byte.
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
    # The files of each of SPLITS.
    splits: dict[str, tuple[File, ...]]
    # Whether byte tokens are only the values that occur in it, as in a whole published corpus.
    closed_alphabet: bool = False


def digest_of(digests: Iterable[str]) -> str:
    """Returns sha256 of concatenated digests, in hexadecimal."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def bar(description: str, size: int) -> tqdm.tqdm:
    """Returns a bar of the bytes read. It shows on a terminal, if they take more than a second."""
    return tqdm.tqdm(total=size, desc=description, unit="B", unit_scale=True, delay=1, disable=None)


def with_bar(description: str, files: Iterable[File]) -> Iterator[File]:
    """Yields the files, with a progress bar of the bytes read."""
    files = list(files)
    with bar(description, sum(file.size for file in files)) as progress:
        for file in files:
            blocks = functools.partial(_counted_blocks, file, progress)
            yield dataclasses.replace(file, blocks=blocks)


def _counted_blocks(file: File, progress: tqdm.tqdm) -> Iterator[bytes]:
    for block in file.blocks():
        yield block
        progress.update(len(block))


# Files that the user names


def file_part(path: str, first: int = 0, last: int | None = None) -> File:
    """Returns the bytes of a file from position `first` to before `last`, or to its end."""
    if last is None:
        last = os.path.getsize(path)
    return File(path, last - first, functools.partial(_blocks, path, first, last), offset=first)


def _blocks(path: str, first: int, last: int) -> Iterator[bytes]:
    with open(path, "rb") as source:
        source.seek(first)
        while first < last:
            block = source.read(min(BLOCK_BYTES, last - first))
            # Ids and digests would silently lack its end.
            if not block:
                raise UserError(
                    f"{path} became shorter while it was read. Do not change it while a run starts."
                )
            yield block
            first += len(block)


def checked(path: str, *, flag: str) -> str:
    """Returns the path of a file that the user named.

    Raises:
      UserError: If it is not a file with content. The error names the flag.
    """
    if os.path.isfile(path) and os.path.getsize(path):
        return path
    if not os.path.exists(path):
        problem = "does not exist"
    elif os.path.isdir(path):
        problem = "is a directory"
    elif storage.is_pipe(path):
        problem = "is a pipe, which can be read only once. Write it to a file first"
    elif os.path.isfile(path):
        problem = "is empty"
    else:
        problem = "is a device or a socket"
    raise UserError(f"{flag} must name a non-empty file, got {path}, which {problem}")


def expanded(names: Iterable[str], *, flag: str) -> list[str]:
    """Returns the paths of files by their names or patterns.

    Raises:
      UserError: If a name or a match is not a file with content, or a pattern has no match.
    """
    paths: list[str] = []
    for name in names:
        # A file may have a name that is also a pattern.
        if os.path.exists(name):
            paths.append(name)
        else:
            # Without a match, the error is about the pattern.
            paths += sorted(glob.glob(name)) or [name]
    return [checked(path, flag=flag) for path in paths]


def json_texts(
    lines: Iterable[bytes], field: str, *, name: str, zeros_allowed: bool = True
) -> Iterator[tuple[int, str]]:
    """Yields the line number, from 1 on, and the text of each JSON line that is not empty.

    Args:
      field: The field of a line's object that contains the text.
      name: Name of the file, for errors.
      zeros_allowed: Whether a text may have zero characters, which only bytes may contain.

    Raises:
      UserError: If a line does not have a text in the field, or has a zero character that is not
        allowed. The error contains the line number.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        kind = packed_as(line) if number == 1 else ""
        # Otherwise the error would be about JSON, which would not help.
        if kind:
            raise UserError(
                f"{name} must be JSON lines in UTF-8, got {kind}. Unpack or convert it first, or "
                "pass a pipe, such as --data.file=<(zcat FILE)."
            )

        try:
            text = json.loads(line)[field]
            # A number does not have this method. Half a surrogate pair, which JSON can contain,
            # cannot be encoded in UTF-8: it would fail much later, when the text is written.
            text.encode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # RecursionError: a line of a hundred thousand brackets.
            raise UserError(
                f"line {number} of {name} must be a JSON object with a text in the field "
                f"{field!r}, got {line.strip()[:_SHOWN_BYTES]!r}. Correct the line, or change "
                "--data.json_field (none for plain text files)."
            ) from None

        if not zeros_allowed and "\0" in text:
            position = text.index("\0")
            raise UserError(
                f"line {number} of {name} has a zero character (\\u0000) at position "
                f"{position} of its text. Remove it, or read bytes with --data.tokenizer.kind=byte."
            )
        yield number, text


# UTF-8


def text_blocks(files: Iterable[File], *, close_lines: bool) -> Iterator[str]:
    """Yields the files' UTF-8 text in blocks.

    The blocks cut neither a character nor a word of usual length.

    Args:
      close_lines: Whether a last line without a newline gets one, so that it ends with its file.

    Raises:
      UserError: If a byte is zero or not UTF-8. The error names the file and the offset.
    """
    for file in files:
        # The bytes after the last cut, and the position of the first of them in the file.
        rest = b""
        offset = file.offset
        for block in file.blocks():
            block = rest + block
            cut = _last_border(block)
            yield _decode(block[:cut], file.name, offset)
            rest = block[cut:]
            offset += cut

        last_text = _decode(rest, file.name, offset)
        # A remainder is left exactly if the text does not end in a newline (see `_last_border`).
        if close_lines and last_text:
            last_text += "\n"
        yield last_text


def _last_border(block: bytes) -> int:
    """Returns the position at which to cut a block, or 0 if it has no border.

    The position is after the last newline, or after other white space that is not at the very end,
    or, in a very long word, before a character.
    """
    border = block.rfind(b"\n") + 1
    # A space at the very end stays with the next block. A line without a newline therefore leaves a
    # remainder, from which `text_blocks` knows that the line is not closed.
    for white in (b" ", b"\t", b"\r"):
        border = max(border, block.rfind(white, 0, -1) + 1)
    if border or len(block) < _LONGEST_WORD:
        return border

    border = len(block) - 1
    while border > 0 and is_inside_character(block[border]):
        border -= 1
    return border


def is_inside_character(byte: int) -> bool:
    """Returns whether a byte of UTF-8 (10xxxxxx) continues a character of more than one byte."""
    return byte & 0xC0 == 0x80


def packed_as(head: bytes) -> str:
    """Returns the format of a file that begins like a compressed, UTF-16 or MIDI file, or ""."""
    for start, kind in _PACKED.items():
        if head.startswith(start):
            return kind
    return ""


def _decode(block: bytes, name: str, offset: int) -> str:
    """Returns the text of a block that is at a position `offset` of the file `name`."""
    try:
        # Valid UTF-8, but a sign of a binary file, whose content would become words.
        zero = block.find(b"\0")
        if zero >= 0:
            raise UnicodeDecodeError("utf-8", block, zero, zero + 1, "no text has a zero byte")
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        kind = packed_as(block) if offset == 0 else ""
        if kind:
            content = kind
            advice = "Unpack or convert it"
        else:
            content = f"byte {block[error.start]:#04x} at offset {offset + error.start}"
            advice = "Convert it (iconv -f LATIN1 -t UTF-8, for example)"
        raise UserError(
            f"{name} must be text in UTF-8, got {content}. {advice}, or read its bytes with "
            "--data.tokenizer.kind=byte."
        ) from None
    # At the beginning of a file it is a mark, elsewhere a character.
    return text.removeprefix(BYTE_ORDER_MARK) if offset == 0 else text
