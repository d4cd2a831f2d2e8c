"""A run with drawn parameters on a text of bytes, for studies of trained runs."""

import pytest

from support import drawn_run


@pytest.fixture(scope="session")
def make_run():
    """Makes a run in a directory, which may be in a bucket. Returns its config, corpus and workdir.

    The validation split has 55 bytes and the test split 56. They are in the run's directory, or in
    `text_folder` if it is set.
    """

    def make(folder, changes=(), text_folder=None):
        config, corpus = drawn_run.on_text(
            text_folder or folder, drawn_run.letters(), **dict(changes)
        )
        return config, corpus, drawn_run.make(folder / "run", config, corpus)[0]

    return make
