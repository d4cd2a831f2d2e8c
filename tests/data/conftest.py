"""Hypothesis without a time limit per example: a busy machine is no bug."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")
