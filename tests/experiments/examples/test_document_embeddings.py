"""Tests of streamed embeddings: a text of one's own, also in a bucket, and what memory adds."""

import numpy as np
import pytest

import txl_jax
from experiments.examples import document_embeddings
from experiments.examples.document_embeddings import MEM_LEN, PASSAGE, TOPICS
from support import trained
from txl_jax.runtime import storage


@pytest.mark.full
def test_streamed_embeddings_are_means_of_the_hidden_states_that_the_model_computes(tmp_path, monkeypatch):
    workdir = trained.make(tmp_path / "run")
    monkeypatch.setattr(document_embeddings, "PASSAGE", 5)  # A segment of that model.
    text, out = tmp_path / "book.txt", tmp_path / "out"
    text.write_bytes(trained.TEXT[:400])
    count = document_embeddings.embed_file(str(workdir.path), str(text), str(out))
    model = txl_jax.load(workdir.path)
    (hidden,) = model.hidden_states([text.read_bytes()])
    assert len(hidden) > 5 * 9 and count == -(-len(hidden) // 5)
    expected = [hidden[first : first + 5].mean(axis=0) for first in range(0, len(hidden), 5)]
    found = np.fromfile(out / "embeddings.f32", np.float32).reshape(count, -1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.full
def test_what_is_read_and_written_may_be_in_a_bucket(tmp_path, bucket, monkeypatch):
    workdir = trained.make(tmp_path / "run")
    monkeypatch.setattr(document_embeddings, "PASSAGE", 5)  # A segment of that model.
    text = tmp_path / "book.txt"
    text.write_bytes(trained.TEXT[:100])
    document_embeddings.embed_file(str(workdir.path), str(text), str(tmp_path / "out"))
    storage.upload(text, f"{bucket}/book.txt")
    document_embeddings.embed_file(str(workdir.path), f"{bucket}/book.txt", f"{bucket}/out")
    assert storage.read(f"{bucket}/out/embeddings.f32") == (tmp_path / "out" / "embeddings.f32").read_bytes()


@pytest.mark.nightly(part="long")
def test_memory_finds_the_topic_as_far_back_as_it_reaches():
    params = document_embeddings.train(updates=500, seed=2, log=print)
    within, without = (document_embeddings.accuracy(params, m, seed=2, documents=128) for m in (MEM_LEN, 0))
    reach, chance = document_embeddings.CONFIG.n_layer * MEM_LEN // PASSAGE, 1 / TOPICS
    assert within[: reach + 1].min() > 0.95
    # Of 128 documents, a share of 1 in 8 has a standard deviation of 0.03; the topics are the same in all passages.
    assert within[reach + 1 :].mean() == pytest.approx(chance, abs=0.1)
    assert without[0] > 0.95 and without[1:].mean() == pytest.approx(chance, abs=0.1)
