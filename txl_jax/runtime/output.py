"""Standard output and standard error of a command, which may disappear while it runs.

If a pager is quit, a terminal is closed, or Ctrl-C ends `tee` before the command, Python raises an
error at every `print`. Characters that an output's encoding lacks also raise. `prepare` replaces
both streams with streams that never raise. Output that cannot be written is dropped, and `loss`
returns the reason. A run continues, because log.txt contains its lines. A command whose output is
its result exits with the code of `exit_code`.
"""

import contextlib
import errno
import io
import os
import re
import select
import signal
import sys
from typing import Any

from txl_jax.errors import one_line

READER_GONE = 128 + signal.SIGPIPE  # 141, as for programs that this signal ends.
# The pipe has no reader, the terminal was closed, or the file descriptor was.
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET)
# Characters that act on a terminal. The text of a model has lines, which may end with a carriage
# return, and tabs.
_CONTROL = re.compile("(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Standard error has progress bars too, which go back to the begin of a line or up by one.
_CONTROL_OF_ERRORS = re.compile("(?!\x1b\\[A)[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# Colors and weights, which Python itself prints to terminals.
_COLORS = re.compile("(\x1b\\[[0-9;]*m)")


class _Descriptor(io.RawIOBase):
    """An open file that is written without ever raising. `error` is the first error of it."""

    def __init__(self, number: int):
        super().__init__()
        self.error: OSError | None = None
        self._number = number

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Writes bytes, or drops them. Returns how many of them are done with."""
        while True:
            try:
                return os.write(self._number, data)
            except BlockingIOError:
                # Another program has set the terminal, which all share, to return instead of
                # waiting.
                with contextlib.suppress(OSError):
                    select.select([], [self._number], [])
            except OSError as error:
                self._lose(error)
                return len(data)

    def _lose(self, error: OSError) -> None:
        """Notes an error, and drops all that follows if nobody reads the file any more."""
        self.error = self.error or error
        if error.errno in _GONE:
            # Libraries and other processes that write to the same file need not fail again.
            with contextlib.suppress(OSError):
                _replace(self._number)


class _SafeText(io.TextIOWrapper):
    """Text stream for a `_Descriptor` that escapes characters it must not write as they are.

    These are characters that the encoding lacks, or that would act on a terminal.
    """

    def __init__(self, number: int, encoding: str, *, control: re.Pattern[str], by_line: bool):
        self.descriptor = _Descriptor(number)
        self._control = control
        self._has_colors = os.isatty(number)
        buffer = io.BufferedWriter(self.descriptor)
        super().__init__(
            buffer, encoding=encoding, errors="backslashreplace", line_buffering=by_line
        )

    def write(self, text: str) -> int:
        super().write(self._escaped(text))
        return len(text)

    def _escaped(self, text: str) -> str:
        if self._control.search(text) is None:
            return text
        if not self._has_colors:
            return self._control.sub(_escape, text)
        # Every other part is a color.
        parts = _COLORS.split(text)
        for place in range(0, len(parts), 2):
            parts[place] = self._control.sub(_escape, parts[place])
        return "".join(parts)


def _escape(match: re.Match[str]) -> str:
    r"""Returns a matched character as Python writes it, such as \x1b."""
    return match[0].encode("unicode_escape").decode()


def say(line: str) -> None:
    """Prints one human-readable line, which may contain names and notes from strangers' files."""
    print_if_possible(one_line(line))


def print_if_possible(text: str) -> None:
    """Prints human-readable lines.

    Never raises, even if another program, which has not called `prepare`, uses this.
    """
    # A closed file raises ValueError.
    with contextlib.suppress(OSError, ValueError):
        try:
            print(text, flush=True)
        except UnicodeEncodeError as error:
            escaped = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            print(escaped, flush=True)


def prepare() -> None:
    """Makes standard output and standard error safe to print to.

    A command calls it first, and only once counts.

    Streams that somebody else has put there, such as a notebook, stay as they are. A missing one is
    replaced too.
    """
    # Standard input, output and error.
    for number in (0, 1, 2):
        _open_if_closed(number)
    if sys.stdout is sys.__stdout__ and not is_prepared(sys.stdout):
        sys.stdout = tolerant(1, sys.stdout, by_line=os.isatty(1))
    if sys.stderr is sys.__stderr__ and not is_prepared(sys.stderr):
        sys.stderr = tolerant(2, sys.stderr, control=_CONTROL_OF_ERRORS)


def tolerant(
    number: int, before: Any, *, control: re.Pattern[str] = _CONTROL, by_line: bool = True
) -> _SafeText:
    """Returns a stream that writes to an open file without ever raising.

    It replaces the stream `before`, if any.
    """
    if before is not None:
        with contextlib.suppress(OSError, ValueError):
            before.flush()
    encoding = getattr(before, "encoding", None) or "utf-8"
    return _SafeText(number, encoding, control=control, by_line=by_line)


def is_prepared(stream: Any) -> bool:
    """Returns whether a stream is one of `tolerant`."""
    return isinstance(stream, _SafeText)


def loss(stream: Any = None) -> OSError | None:
    """Returns the first error of a stream, or None if everything was written so far.

    The default stream is standard output.
    """
    if stream is None:
        stream = sys.stdout
    return stream.descriptor.error if isinstance(stream, _SafeText) else None


def exit_code() -> int:
    """Returns the exit code of a command that has printed its result.

    Returns:
      0, or 141 if standard output is no longer read.

    Raises:
      OSError: If standard output was not written for another reason, such as a full disk.
    """
    sys.stdout.flush()
    error = loss()
    if error is None:
        return 0
    if error.errno in _GONE:
        return READER_GONE
    raise OSError(error.errno, f"standard output is incomplete: {error.strerror}")


def _open_if_closed(number: int) -> None:
    """Opens a file descriptor that was closed before the start.

    Otherwise a file of the run would get its number.
    """
    try:
        os.fstat(number)
    except OSError:
        _replace(number)


def _replace(number: int) -> None:
    """Lets a file descriptor drop what is written to it."""
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
