"""Tests of `as_path`: what a user gives, a folder of this machine or a URL."""

import importlib.util
import os
from pathlib import Path

import pytest

from txl_jax.errors import UserError
from txl_jax.runtime import storage


def test_a_local_path_is_absolute_with_its_home_and_links(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("runs")
    for given in ("runs", "~/runs", "link", Path("runs"), f"file://{tmp_path}/runs", "x/../runs"):
        assert storage.as_path(given) == Path(os.path.realpath(tmp_path / "runs"))
        assert type(storage.as_path(given)) is type(Path("runs"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("memory://run", "memory://"),
        ("gs:/bucket/run", "gs://bucket"),
        ("s3://bucket/run", "txl_jax[s3]"),
    ],
)
def test_what_cannot_be_opened_is_refused(given, expected, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r".") as refused:
        storage.as_path(given)
    assert given in str(refused.value) and expected in str(refused.value)


@pytest.mark.full
def test_a_url_is_joined_like_a_path():
    run = storage.as_path("gs://bucket/runs//one/")
    assert storage.is_remote(run) and storage.is_remote(run / "a") and not storage.is_remote("runs/one")
    assert os.fspath(run / "a" / "b") == str(run / "a" / "b") == "gs://bucket/runs/one/a/b"
    assert (run.name, str(run.parent)) == ("one", "gs://bucket/runs")
    assert os.fspath((run / "a").with_name("b")) == "gs://bucket/runs/one/b"
    assert type(run.parent / "x") is type(run)
    assert storage.as_path(run) == run
