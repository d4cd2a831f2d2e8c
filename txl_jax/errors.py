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
