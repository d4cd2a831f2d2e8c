"""Tests that an unsupported jax is refused."""

import importlib.metadata
import os
import subprocess
import sys
from unittest import mock

import pytest

import txl_jax
from support import ROOT
from txl_jax.errors import UserError
from txl_jax.version import OLDEST_JAX, check_jax


@pytest.mark.parametrize("found", ["0.7.1", "not installed"])
def test_an_old_or_missing_jax_is_refused(monkeypatch, found):
    missing = importlib.metadata.PackageNotFoundError("jax") if found == "not installed" else None
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(return_value=found, side_effect=missing))
    with pytest.raises(UserError, match=rf"{found}.*{OLDEST_JAX}"):
        check_jax()
    with pytest.raises(UserError, match=found):
        txl_jax.load  # noqa: B018
    assert txl_jax.ModelConfig  # Settings need no jax.


def test_windows_is_named(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UserError, match="WSL"):
        txl_jax.load  # noqa: B018


def test_a_program_ends_with_one_sentence(tmp_path):
    """With an old jax that lacks what is imported: the check comes first."""
    metadata = "Metadata-Version: 2.1\nName: jax\nVersion: 0.6.2\n"
    files = {"jax/__init__.py": "raise ImportError('too old')\n", "jax-0.6.2.dist-info/METADATA": metadata}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "experiments.quickstart"]
    found = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.count("\n") == 1 and "0.6.2" in found.stderr and OLDEST_JAX in found.stderr


def test_the_declared_requirement_is_the_same():
    assert f"    jax>={OLDEST_JAX}," in (ROOT / "setup.cfg").read_text()
