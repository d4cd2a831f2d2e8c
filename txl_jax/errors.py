"""Errors that the user can fix.

The message says what was expected, what was found, and how to fix it. Commands print it without a traceback. Any
other exception is a bug, or comes from the system, and keeps its traceback.
"""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """A mistake in settings, files or input."""


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
    """A failed request to the server: a message, an HTTP status, and OpenAI's `code` and `param`."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@contextlib.contextmanager
def rephrased(sentence: str, *errors: type[Exception], to: type[UserError] = UserError) -> Iterator[None]:
    """Turns errors of the block into the message, with the reason as its "%s". A missing package keeps its own."""
    try:
        yield
    except MissingPackageError:
        raise
    except BaseException as error:  # Too deep nesting counts, and panics of Rust, whose class cannot be imported.
        if not isinstance(error, (*errors, RecursionError)) and type(error).__name__ != "PanicException":
            raise
        reason = getattr(error, "strerror", None) or error
        raise to(sentence.replace("%s", str(reason))) from error


def describe_system_error(error: OSError) -> str:
    """Returns an error of the system as a sentence with a remedy, instead of "[Errno 30] ...: '...'"."""
    if error.strerror is None:  # A library's own sentence.
        return str(error)
    path = error.filename or "the disk"
    return f"cannot use {path} ({error.strerror}). Check the path, its permissions and the free space on its disk."


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, which may be long, or the name of its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
