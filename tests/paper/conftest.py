"""A run with drawn parameters on a text of bytes, for studies of trained runs."""

import numpy as np
import pytest

from support import drawn_run, tiny_run
from txl_jax.config import CorpusName, DataConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus


@pytest.fixture(scope="session")
def make_run():
    """Makes a run in a folder, which may be in a bucket; returns its config, corpus and workdir.

    The validation text has 55 bytes and the test text 56; `text_folder` is where they are, if not in the run's folder.
    """

    def make(folder, changes=(), text_folder=None):
        text_folder = text_folder or folder
        text = np.random.default_rng(0).choice(list(b"the cat"), 1110).astype(np.uint8).tobytes()
        (text_folder / "text").write_bytes(text)
        data = DataConfig(corpus=CorpusName.TEXT, file=str(text_folder / "text"))
        config = config_tree.replace(tiny_run.CONFIG, {"data": data, **dict(changes)})
        corpus = read_corpus(data, "nowhere", str(text_folder))
        workdir, _ = drawn_run.make(folder / "run", config, corpus)
        return config, corpus, workdir

    return make
