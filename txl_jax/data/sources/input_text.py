"""Documents of a text that is read once, from a file or an endless pipe: lines, or what is between empty lines."""

import collections
import enum
import os
import select
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from txl_jax.errors import UserError
from txl_jax.runtime.paths import as_path, is_remote

_BLOCK = 1 << 16  # Bytes.
_SECONDS_BETWEEN_POLLS = 0.2


class InputFormat(enum.StrEnum):
    """Documents of an input."""

    LINES = "lines"  # Each line.
    DOCUMENTS = "documents"  # The lines between empty ones.


class InputText(NamedTuple):
    """A document of an input, without the newline at its end."""

    line: int  # The number of its first line, from 1 on.
    text: bytes


class InputReader:
    """Reads the documents of a file descriptor in blocks; holds one document and one block."""

    def __init__(self, descriptor: int, form: InputFormat, *, after_poll: Callable[[], Any] = lambda: None):
        """Reads nothing yet.

        Args:
          descriptor: of a file or a pipe; the caller closes it.
          form: of its documents.
          after_poll: called five times a second while the reader waits; may raise to stop.
        """
        self._descriptor = descriptor
        self._form = form
        self._after_poll = after_poll
        self._begun: list[bytes] = []  # Parts of a line whose end was not read yet.
        self._lines: collections.deque[bytes] = collections.deque()  # Complete ones.
        self._document: list[bytes] = []  # Lines of a document whose end was not read yet.
        self._count = 0  # Lines that were taken.
        self.ended = False  # Whether all documents were returned.
        self._closed = False  # Whether the input was read to its end.

    def next(self, *, wait: bool) -> InputText | None:
        """Returns the next document; None at the end (`ended`), or if there is none yet and it is not to wait.

        Raises:
          OSError: the input cannot be read.
        """
        while True:
            while self._lines:
                found = self._take(self._lines.popleft())
                if found is not None:
                    return found
            if self._closed:
                self.ended = not self._document
                return None if self.ended else self._end_document()
            if not self._is_ready(wait):
                return None
            self._read_block()

    def _is_ready(self, wait: bool) -> bool:
        """Returns whether a block can be read; waits for one if it is to."""
        while not select.select([self._descriptor], [], [], _SECONDS_BETWEEN_POLLS if wait else 0)[0]:
            if not wait:
                return False
            self._after_poll()
        return True

    def _read_block(self) -> None:
        """Reads a block and splits it into lines."""
        block = os.read(self._descriptor, _BLOCK)
        if not block:
            self._closed = True
            if any(self._begun):  # A last line without its newline.
                self._lines.append(b"".join(self._begun))
            return
        first, *others = block.split(b"\n")
        self._begun.append(first)
        for other in others:
            self._lines.append(b"".join(self._begun))
            self._begun = [other]

    def _take(self, line: bytes) -> InputText | None:
        """Returns the document that a line completes."""
        self._count += 1
        if self._form is InputFormat.LINES:
            return InputText(self._count, line)
        if line.strip():
            self._document.append(line)
            return None
        return self._end_document(lines_after=1) if self._document else None

    def _end_document(self, *, lines_after: int = 0) -> InputText:
        """Returns the document whose last line was taken, with `lines_after` lines behind it."""
        first = self._count - lines_after - len(self._document) + 1
        text, self._document = b"\n".join(self._document), []
        return InputText(first, text)


def open_input(path: str) -> int:
    """Returns the descriptor of a file, of a copy of a remote one, or of the standard input for "-".

    Raises:
      UserError: it cannot be read.
    """
    if path == "-":
        return 0
    try:
        if is_remote(path):
            with tempfile.NamedTemporaryFile() as copy:  # Its name goes; its bytes go with the descriptor.
                as_path(path).download(copy.name)  # type: ignore[attr-defined]
                return os.open(copy.name, os.O_RDONLY)
        if os.path.isdir(path):
            raise IsADirectoryError(None, "it is a folder")
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"cannot read the input {path} ({error.strerror}); check --input") from None
