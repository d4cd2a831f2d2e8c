"""The errors of everything that a user can mend.

The message is one sentence: what was given, what was expected and what to do. Programs print it without a traceback;
any other exception is a bug, or the system's, and keeps its traceback.
"""


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
