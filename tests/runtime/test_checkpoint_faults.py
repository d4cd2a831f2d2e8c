"""Tests checkpoints at a kill, on a full disk and in a folder that cannot be made: an older step, or an error."""

import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.checkpoints import abstract, make_state, step_names
from txl_jax.errors import CheckpointError
from txl_jax.runtime import checkpoint, distributed

# Orbax does not close its event loop when a restore fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SAVE_FOR_EVER = """
    import sys
    import jax.numpy as jnp
    from txl_jax.runtime.checkpoint import Checkpointer
    with Checkpointer(sys.argv[1], keep=2, log=print) as checkpoints:
        for step in range(1, 10_000):
            checkpoints.save(step, {"x": jnp.full(3_000_000, step, jnp.float32)}, {"step": step})
            print(step, flush=True)
"""


@pytest.mark.full
def test_kill_in_the_middle_of_a_save(tmp_path, open_checkpoints):
    directory = tmp_path / "latest"
    command = [sys.executable, "-c", textwrap.dedent(SAVE_FOR_EVER), str(directory)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(checkpoint.__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        while process.stdout.readline().strip() != "3":
            assert process.poll() is None
        while not list(directory.glob("*.orbax-checkpoint-tmp*")):
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    with open_checkpoints(keep=2) as checkpoints:
        step, restored, notes = checkpoints.restore({"x": jnp.zeros(3_000_000)})
        assert step >= 2 and notes == {"step": step}
        assert np.all(np.asarray(restored["x"]) == step)
        checkpoints.save(step + 1, restored, {})
    assert all(name.isdigit() for name in step_names(directory)) and len(step_names(directory)) == 2


@pytest.mark.usefixtures("quiet")
def test_full_disk(two_steps, open_checkpoints, capfd, caplog):
    state = {"x": jax.random.normal(jax.random.key(0), (300_000,))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_checkpoints() as checkpoints:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"\bstep 300\b.*latest \(File too large\)"):  # noqa: PT012
                checkpoints.save(300, state, {})
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert checkpoints.restore(abstract(make_state()))[0] == 200
        checkpoints.save(300, make_state(300), {})
        checkpoints.wait()
    assert step_names(two_steps) == ["100", "200", "300"]
    messages = [record.getMessage() for record in caplog.records]
    assert (messages, capfd.readouterr()) == ([], ("", "")), "the sentence is all that people see"
    other = logging.LogRecord("absl", logging.ERROR, "/somewhere/else.py", 1, "a line of others", (), None)
    assert logging.getLogger("absl").filter(other), "others' log lines are theirs"


@pytest.fixture
def beside_another(monkeypatch):
    """Process 0 of two; the other has no trouble."""
    monkeypatch.setattr(distributed, "is_multiprocess", lambda: True)
    monkeypatch.setattr(distributed, "_gather_texts", lambda own: [own, ""])
    monkeypatch.setattr(distributed, "_broadcast_text", lambda own: own)


@pytest.mark.usefixtures("beside_another")
def test_a_failed_save_is_known_to_all(tmp_path, open_checkpoints, monkeypatch):
    """Otherwise the others would wait in the next save, and report the disk or the network."""

    def fail(path):
        raise OSError(28, "No space left on device")

    with open_checkpoints() as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "sha256", fail)
            checkpoints.save(1, make_state(), {})
            with pytest.raises(CheckpointError, match=r"\bstep 1\b.*\bNo space left\b") as late:
                checkpoints.save(2, make_state(), {})
        (tmp_path / "latest").rename(tmp_path / "elsewhere")
        (tmp_path / "latest").write_text("a file")
        with pytest.raises(CheckpointError, match=r"\bstep 3\b") as early:
            checkpoints.save(3, make_state(), {})
    assert distributed.is_known_to_all(late.value) and distributed.is_known_to_all(early.value)


def test_directory_that_cannot_be_made(tmp_path, open_checkpoints):
    (tmp_path / "latest").write_text("a file")
    with open_checkpoints() as checkpoints:
        with pytest.raises(CheckpointError, match=r"\bstep 1\b.*latest.*\bFile exists\b"):
            checkpoints.save(1, make_state(), {})
        with pytest.raises(CheckpointError, match=r"latest\b.*\bNot a directory\b"):
            checkpoints.restore(make_state())
    assert (tmp_path / "latest").read_text() == "a file"


def test_a_failed_save_does_not_hide_the_error_that_ended_the_run(tmp_path, open_checkpoints, lines, monkeypatch):
    def fail(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "sha256", fail)
    with pytest.raises(KeyboardInterrupt), open_checkpoints() as checkpoints:  # noqa: PT012
        checkpoints.save(1, make_state(), {})
        raise KeyboardInterrupt
    assert "No space left on device" in lines[-1]
    with pytest.raises(CheckpointError, match="No space left"), open_checkpoints() as checkpoints:
        checkpoints.save(2, make_state(), {})
