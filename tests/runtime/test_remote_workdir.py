"""Tests a workdir on object storage: what is recorded is loaded, and what cannot be used is one sentence."""

import contextlib
import dataclasses

import pytest

from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, Tokenizer, TokenizerConfig
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.runs.run import TextInfo, Workdir
from txl_jax.runs.train import claim
from txl_jax.runtime.lock import NAME

pytestmark = pytest.mark.full
CONFIG = ExperimentConfig(
    data=DataConfig(corpus=CorpusName.TEXT, file="a.txt", tokenizer=TokenizerConfig(kind=Tokenizer.WORD))
)
TEXT = TextInfo("text", "own text", "d" * 64, WordVocabulary(("<eos>", "the", "<unk>", "cat")))


def test_what_was_recorded_is_loaded(bucket):
    workdir = Workdir(bucket).create()
    assert not workdir.holds_run() and workdir.check_same_run(CONFIG, TEXT) == []
    with workdir.lock(), pytest.raises(UserError, match="another run"):
        Workdir(bucket).lock()
    workdir.record(CONFIG, TEXT)
    assert workdir.holds_run() and workdir.load() == (CONFIG, TEXT)
    assert sorted(path.name for path in bucket.iterdir()) == ["config.json", "vocabulary.txt"]
    (bucket / ".probe-1").write_bytes(b"of a killed run")
    with workdir.lock():
        assert (bucket / NAME).exists() and not (bucket / ".probe-1").exists()


def test_a_folder_without_a_run(bucket):
    with pytest.raises(UserError, match="holds no run"):
        Workdir(bucket).load()


def test_a_bucket_that_is_absent(bucket):
    with pytest.raises(UserError, match=r"gs://absent-bucket/run.*no such bucket"):
        Workdir("gs://absent-bucket/run").create()


@pytest.mark.parametrize("status", [401, 403])
def test_a_bucket_that_is_denied(bucket, storage, status):
    storage.refuse("POST /upload", status=status)
    with pytest.raises(UserError, match=r"cannot write to .*gcloud"):
        Workdir(bucket).create()
    storage.refuse("GET ", status=status)
    for act in (Workdir(bucket).holds_run, Workdir(bucket).load):
        with pytest.raises(UserError, match=r"cannot read .*gcloud"):
            act()


@pytest.mark.usefixtures("impatient")
def test_a_server_that_stays_away_is_no_folder_without_a_run(bucket, storage):
    """Otherwise a second run, of other settings, would begin in the folder of the first."""
    workdir, other = Workdir(bucket).create(), dataclasses.replace(CONFIG, seed=7)
    workdir.record(CONFIG, TEXT)
    storage.refuse("GET ", status=503)
    writes = len(storage.writes)
    with contextlib.ExitStack() as stack:
        for act in (
            workdir.holds_run,
            workdir.load,
            lambda: workdir.check_same_run(other, TEXT),
            lambda: claim(workdir, other, TEXT, stack),
        ):
            with pytest.raises(UserError, match=r"cannot read .*made by a test"):
                act()
    assert storage.writes[writes:] == []
    storage.refuse(".", status=503)
    with pytest.raises(UserError, match=r"cannot write to .*made by a test"):
        workdir.create()
    storage.calm()
    assert workdir.load() == (CONFIG, TEXT)
