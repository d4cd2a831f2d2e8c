"""Tests of the check for an old jax, and of the versions that setup.cfg, the code and the constraints name."""

import configparser
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import txl_jax
from txl_jax.errors import UserError
from txl_jax.version import OLDEST_JAX, check_jax

ROOT = pathlib.Path(__file__).parent.parent
SETS = ("colab", "newest", "oldest")


@pytest.mark.parametrize("found", ["0.7.2", "0.8.0", "0.12.0.1", "0.10.0.dev20260101", "1.0"])
def test_supported(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    check_jax()


@pytest.mark.parametrize("found", ["0.7.1", "0.6.2", "0.4.38"])
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


def required():
    """Reads what setup.cfg requires, by name."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    found = map(Requirement, setup["options"]["install_requires"].split())
    return {requirement.name: requirement.specifier for requirement in found}


def pinned(name):
    """Reads a file of constraints: versions by name."""
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("name", SETS)
def test_the_bounds_allow_each_set_of_versions(name):
    bounds = required()
    refused = {
        package: version
        for package, version in pinned(name).items()
        if version not in bounds.get(package, SpecifierSet())
    }
    assert not refused


def test_the_oldest_set_is_the_lower_bounds():
    versions = {name: Version(version) for name, version in pinned("oldest").items()}
    lowest = {
        name: Version(part.version) for name, bounds in required().items() for part in bounds if part.operator == ">="
    }
    assert {name: versions[name] for name in lowest} == lowest
    assert versions["jax"] == Version(OLDEST_JAX)


def test_build_md_has_the_versions():
    rows = {}
    for line in (ROOT / "BUILD.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4:
            rows[cells[0]] = cells[1:]
    for package in ("jax", "flax", "optax", "orbax-checkpoint", "numpy"):
        assert rows[package] == [pinned(name)[package] for name in ("oldest", "colab", "newest")]
    pythons = [
        (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()[0].removeprefix("# Python ")
        for name in ("oldest", "colab", "newest")
    ]
    assert rows["Python"] == pythons


def test_an_unknown_set_is_refused_with_the_names_of_all():
    found = subprocess.run([ROOT / ".ci" / "versions", "old"], text=True, capture_output=True)
    assert found.returncode == 2
    assert all(name in found.stderr for name in SETS)
