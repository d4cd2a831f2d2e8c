"""The place of the runs with faults, and an undisturbed run."""

import os
import time

import pytest

from support import ON_PATH, miniature
from support.compiled_programs import cache_in
from support.faults import Place, finished
from txl_jax.config import CorpusName


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A directory for runs on a miniature text, whose programs are compiled only once."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "data").mkdir()
    archive = folder / "data" / miniature.OFFICIAL[CorpusName.PTB]
    archive.write_bytes(miniature.official(CorpusName.PTB))
    return Place(folder, ON_PATH | {"PYTHONFAULTHANDLER": "1"} | cache_in(folder / "compiled"))


@pytest.fixture(scope="session")
def undisturbed(place):
    """The workdir of a run without faults, scored once more at its end."""
    finished(place.train("undisturbed"))
    finished(place.score("undisturbed"))
    return place.workdir("undisturbed")


@pytest.fixture
def fault_seed():
    """Seed of random moments. TXL_FAULT_SEED repeats them as far as processes can be repeated."""
    return int(os.environ.get("TXL_FAULT_SEED") or time.time_ns() % 10**6)
