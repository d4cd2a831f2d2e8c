"""Settings that the plans of several studies share."""

import enum


class Split(enum.StrEnum):
    """The part of a corpus that is read."""

    VALID = "valid"
    TEST = "test"
