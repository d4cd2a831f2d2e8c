"""Tests of the check for an old jax, and of the versions that setup.cfg, the code and the constraints name."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

import txl_jax
from txl_jax.errors import UserError
from txl_jax.version import OLDEST_JAX, check_jax


@pytest.mark.parametrize("found", ["0.7.0", "0.7.2", "0.12.0.1", "0.10.0.dev20260101", "1.0"])
def test_supported(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check_jax()


@pytest.mark.parametrize("found", ["0.6.2", "0.4.38"])
def test_too_old(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(UserError, match=rf"{found}.*{OLDEST_JAX}"):
        check_jax()
    with pytest.raises(UserError, match=found):
        txl_jax.load  # noqa: B018
    assert txl_jax.ModelConfig  # Settings need no jax.


def test_missing(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UserError, match="not installed"):
        check_jax()


def test_a_program_ends_with_one_sentence(tmp_path):
    """With an old jax that lacks what is imported: the check comes first."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise ImportError('too old')\n")
    (tmp_path / "jax-0.6.2.dist-info").mkdir()
    (tmp_path / "jax-0.6.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 0.6.2\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "experiments.quickstart"]
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True)
    assert found.returncode == 1
    assert found.stdout == "" and "Traceback" not in found.stderr
    (sentence,) = found.stderr.splitlines()
    assert "0.6.2" in sentence and OLDEST_JAX in sentence
