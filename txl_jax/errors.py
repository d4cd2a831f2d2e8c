"""The errors of everything that a user can mend.

The message is one sentence: what was given, what was expected and what to do. Programs print it without a traceback;
any other exception is a bug, or the system's, and keeps its traceback.
"""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """A mistake in settings, files or input."""


class MissingPackageError(UserError):
    """An optional package is needed and not installed."""


class LogError(UserError):
    """A file of a run (records, results, settings) cannot be written or read."""


class CheckpointError(UserError):
    """A checkpoint cannot be written or restored."""


class NonFiniteError(UserError):
    """A loss, a gradient norm or a parameter is nan or infinite."""


class RemoteProcessError(UserError):
    """Another process failed; the message begins with its number."""


class RequestError(Exception):
    """A request to the server that fails: a sentence, an HTTP status, and OpenAI's `code` and `param` for programs."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request", param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@contextlib.contextmanager
def rephrased(sentence: str, *errors: type[Exception], to: type[UserError] = UserError) -> Iterator[None]:
    """Turns errors of the block into the sentence, with the reason for its "%s"; a missing package keeps its own."""
    try:
        yield
    except MissingPackageError:
        raise
    except BaseException as error:  # Too deep nesting counts, and panics of Rust, whose class cannot be imported.
        if not isinstance(error, (*errors, RecursionError)) and type(error).__name__ != "PanicException":
            raise
        reason = getattr(error, "strerror", None) or error
        raise to(sentence.replace("%s", str(reason))) from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, which may be long, or the name of its type."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
