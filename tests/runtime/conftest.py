"""Checkpoints of two steps, and the reports of those who read them."""

import logging
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from support.checkpoints import make_state
from txl_jax.runtime import checkpoint
from txl_jax.runtime.checkpoint import Checkpointer


@pytest.fixture
def quiet(monkeypatch):
    """Orbax as programs have it; afterwards the hooks are as they were."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "filters", [*logger.filters])
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with warnings.catch_warnings():
        checkpoint.quiet_orbax()
        yield


@pytest.fixture
def lines():
    return []


@pytest.fixture
def open_checkpoints(tmp_path, lines):
    """Opens the directory of a test; the lines reported land in `lines`."""
    return lambda keep=3: Checkpointer(tmp_path / "latest", keep=keep, log=lines.append)


@pytest.fixture(scope="session")
def two_steps_template(tmp_path_factory):
    directory = tmp_path_factory.mktemp("template") / "latest"
    with Checkpointer(directory, keep=3, log=print) as checkpoints:
        checkpoints.save(100, make_state(100), {"loss": 1.0})
        checkpoints.save(200, make_state(200), {"loss": 2.0})
    return directory


@pytest.fixture
def two_steps(two_steps_template, tmp_path):
    """A directory with verified steps 100 and 200."""
    return Path(shutil.copytree(two_steps_template, tmp_path / "latest"))
