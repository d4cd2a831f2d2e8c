"""Tests a run in a bucket: scored, loaded, converted, and split off."""

import pytest

import txl_jax
from support import drawn_run
from txl_jax.errors import UserError
from txl_jax.interop.portable import is_portable
from txl_jax.runs.convert import convert

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """(config, corpus): bytes, of which the validation text has 55."""
    return drawn_run.on_text(tmp_path_factory.mktemp("text"), drawn_run.letters())


@pytest.fixture(scope="module")
def drawn(text, module_bucket, tmp_path_factory):
    """The same run with drawn parameters, in a bucket and on this machine: two workdirs."""
    return [drawn_run.make(place / "run", *text)[0] for place in (module_bucket, tmp_path_factory.mktemp("drawn"))]


def test_a_run_and_its_conversion_are_loaded_from_a_bucket(drawn, bucket, tmp_path):
    remote, local = drawn
    expected = txl_jax.load(local.path).score(["the cat", "a hat"])
    assert txl_jax.load(str(remote.path)).score(["the cat", "a hat"]) == expected
    convert(str(remote.path), str(bucket / "portable"), log=str)
    assert txl_jax.load(str(bucket / "portable")).score(["the cat", "a hat"]) == expected
    convert(str(bucket / "portable"), tmp_path / "back", log=str)
    for name in ("model.safetensors", "vocabulary.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (bucket / "portable" / name).read_bytes()
    with pytest.raises(UserError, match="new or empty"):
        convert(local.path, str(bucket / "portable"), log=str)


def test_a_conversion_that_was_killed_is_no_portable_folder(drawn, bucket, storage):
    storage.refuse("POST", after=2)
    with pytest.raises(UserError, match="cannot write to gs://"):
        convert(drawn[1].path, str(bucket), log=str)
    storage.calm()
    assert sorted(path.name for path in bucket.iterdir()) == ["model.safetensors", "vocabulary.txt"]
    assert not is_portable(bucket)
