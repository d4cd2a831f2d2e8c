"""Errors that the user can fix.

The message states what was expected, what was found, and how to fix it. Commands print it without a
traceback. Any other exception is a bug, or comes from the system, and keeps its traceback.
"""

import contextlib
import re
from collections.abc import Iterator

# Enough for every message of this project with a path in it. A stranger's file may put megabytes
# into an error, such as a list of 300,000 numbers. The end of a message contains the advice.
_MAX_CHARACTERS = 4_000
_MAX_CHARACTERS_AT_END = 1_000
# Characters that control a terminal, end a line, or change the direction of a line.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escape_control(text: str) -> str:
    r"""Returns a text that stays on one line and cannot control a terminal.

    >>> escape_control("a name\n\x1b[2J")
    'a name\\n\\x1b[2J'
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Returns a text in a form that is safe to print.

    Applies `escape_control`, and omits the middle of a long text.
    """
    if len(text) > _MAX_CHARACTERS:
        left_out = len(text) - _MAX_CHARACTERS
        begin = text[: _MAX_CHARACTERS - _MAX_CHARACTERS_AT_END]
        text = (
            f"{begin} ... ({left_out:,} characters left out) ... {text[-_MAX_CHARACTERS_AT_END:]}"
        )
    return escape_control(text)


class UserError(ValueError):
    """A mistake in settings, files or input. Its message is made safe to print by `one_line`."""

    def __init__(self, *args: object):
        super().__init__(*(one_line(value) if isinstance(value, str) else value for value in args))


class MissingPackageError(UserError):
    """A required optional package is not installed."""


class LogError(UserError):
    """A file of a run (records, results, settings) cannot be written or read."""


class CheckpointError(UserError):
    """A checkpoint cannot be written or restored."""


class NonFiniteError(UserError):
    """A loss, a gradient norm or a parameter is NaN or infinite."""


class RemoteProcessError(UserError):
    """Another process failed. The message begins with its number."""


class RequestError(Exception):
    """A failed server request: a message, an HTTP status, and OpenAI's `code` and `param`."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@contextlib.contextmanager
def rephrased(
    sentence: str, *errors: type[Exception], to: type[UserError] = UserError
) -> Iterator[None]:
    """Turns errors in the block into a `UserError` with this message, whose "%s" is the reason.

    The error for a missing package keeps its own message.
    """
    try:
        yield
    except MissingPackageError:
        raise
    except BaseException as error:
        # Too deep nesting counts, and panics of Rust, whose class cannot be imported.
        if (
            not isinstance(error, (*errors, RecursionError))
            and type(error).__name__ != "PanicException"
        ):
            raise
        reason = getattr(error, "strerror", None) or error
        raise to(sentence.replace("%s", str(reason))) from error


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns any error while a file is read into one message that names the file.

    Files come from anywhere, and libraries raise nearly any exception for a file that they cannot
    read. A `UserError` is more specific and is kept, and so is an interruption.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:  # MemoryError and RecursionError count, and panics of Rust.
        kind = type(error).__name__
        if not isinstance(error, Exception) and kind != "PanicException":
            raise
        reason = f"{kind}: {first_line(error)}" if str(error) else kind
        raise UserError(f"{name} cannot be read ({reason}). Copy or download it again.") from error


def describe_system_error(error: OSError) -> str:
    """Returns a system error as a sentence with a remedy, instead of "[Errno 30] ...: '...'"."""
    if error.strerror is None:  # A library's own message.
        return str(error)
    path = error.filename or "the disk"
    return (
        f"cannot use {path} ({error.strerror}). Check the path, its permissions and the free "
        "space on its disk."
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, which may be long, or the name of its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
