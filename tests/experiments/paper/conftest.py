"""A run with drawn parameters on a text of bytes, for studies of trained runs."""

import pytest

from support import drawn_run


@pytest.fixture(scope="session")
def make_run():
    """Makes a run in a folder, which may be in a bucket; returns its config, corpus and workdir.

    The validation text has 55 bytes and the test text 56; `text_folder` is where they are, if not
    in the run's folder.
    """

    def make(folder, changes=(), text_folder=None):
        config, corpus = drawn_run.on_text(
            text_folder or folder, drawn_run.letters(), **dict(changes)
        )
        return config, corpus, drawn_run.make(folder / "run", config, corpus)[0]

    return make
