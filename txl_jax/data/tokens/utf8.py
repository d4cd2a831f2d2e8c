"""Decodes UTF-8 files, with errors that name the file and the offset."""

from collections.abc import Iterable, Iterator

from txl_jax.data.sources.text import File
from txl_jax.errors import UserError

_BYTE_ORDER_MARK = "\ufeff"  # Windows writes it before a file's first word.
_LONGEST_WORD = 1 << 16  # Bytes; longer ranges without white space are cut between characters.


def text_blocks(files: Iterable[File], *, close_lines: bool) -> Iterator[str]:
    """Yields the files' text in blocks that cut neither a character nor a word of usual length.

    Args:
      files: UTF-8.
      close_lines: a file whose last line has no newline gets one, so that its line ends with the file.

    Raises:
      UserError: a byte that is not UTF-8, or a zero byte: the file is no text. Names file and offset.
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
    """Returns where to cut: after the last newline, else white space, else, in a very long word, before a character."""
    # White space at the very end stays with the next block: a line without its newline leaves a remainder.
    for white, end in ((b"\n", None), (b" ", -1), (b"\t", -1), (b"\r", -1)):
        if (found := block.rfind(white, 0, end)) >= 0:
            return found + 1
    if len(block) < _LONGEST_WORD:
        return 0
    start = len(block) - 1
    while start > 0 and block[start] & 0xC0 == 0x80:  # Inside a character of several bytes.
        start -= 1
    return max(start, 0)


def _decode(block: bytes, name: str, offset: int) -> str:
    if (zero := block.find(b"\0")) >= 0:
        raise UserError(
            f"{name} holds a zero byte at offset {offset + zero}, so it is no text; give a text file, or read its "
            "bytes as they are with --data.tokenizer.kind=byte"
        )
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name} is not UTF-8: byte {block[error.start]:#04x} at offset {offset + error.start}; convert it (iconv "
            "-f LATIN1 -t UTF-8, for example), or read its bytes as they are with --data.tokenizer.kind=byte"
        ) from None
    return text.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else text
