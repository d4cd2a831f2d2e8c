"""Tests a run on tokens of a tokenizer.json: the file is kept, and all that reads the run works without a network."""

import socket
import threading

import numpy as np
import pytest

import txl_jax
from support import drawn_run, hf_tokenizers
from txl_jax.config import Tokenizer
from txl_jax.data.corpus import read_corpus
from txl_jax.runs.convert import convert


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    (folder / "tokenizer.json").write_text(hf_tokenizers.byte_level())
    changes = {"data__tokenizer__hf_file": str(folder / "tokenizer.json")}
    workdir = drawn_run.of_words(folder / "run", tokenizer=Tokenizer.SUBWORD, **changes)
    (folder / "tokenizer.json").rename(folder / "elsewhere.json")  # The run has its own copy.
    return workdir


@pytest.fixture
def offline(monkeypatch):
    """Any use of the network fails."""

    def refuse(*args, **kwargs):
        # A program that an earlier test ran in this process may still ask for Google Cloud's notices every 10 seconds.
        is_left_over = threading.current_thread().name.startswith("notice of")
        raise OSError if is_left_over else AssertionError("the network was asked")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)


def test_a_run_and_its_portable_folder_are_loaded_without_a_network(workdir, tmp_path, offline):
    target = tmp_path / "model"
    convert(workdir.path, target, log=lambda line: None)
    assert (target / "tokenizer.json").read_text() == hf_tokenizers.byte_level()
    run, model = txl_jax.load(workdir.path), txl_jax.load(target)
    assert run.vocabulary == model.vocabulary and run.vocabulary.size == hf_tokenizers.SIZE
    ids = model.encode("the café 😀")
    assert model.decode(ids) == run.decode(ids) == "the café 😀"


def test_a_text_is_read_in_the_runs_tokens_though_the_file_is_gone(workdir, tmp_path):
    config, text = workdir.config, workdir.text
    corpus = read_corpus(config.data, "nowhere", str(tmp_path), vocabulary=text.vocabulary)
    assert corpus.vocabulary == text.vocabulary and corpus.sentences is None
    splits = [corpus.train, corpus.valid, corpus.test]
    assert b"".join(map(corpus.vocabulary.decode, splits)) == drawn_run.TEXT
    assert {split.dtype for split in splits} == {np.dtype(np.uint16)}
