"""The error of everything that a user can mend."""


class UserError(ValueError):
    """A mistake in settings, files or input: one sentence with what was given, what was expected and what to do.

    Programs print it without a traceback.
    """
