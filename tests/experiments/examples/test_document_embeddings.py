"""Tests of streamed embeddings: passages, documents, a text of one's own, and what memory adds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import txl_jax
from experiments.examples import document_embeddings
from experiments.examples.document_embeddings import MEM_LEN, PASSAGE, PASSAGES, TOPICS, WORDS, Reading
from support import trained


@pytest.mark.parametrize("lengths", [[7], [1] * 7, [0, 5, 2], [3, 0, 4]])
def test_pieces_of_any_lengths_give_the_same_passages(lengths):
    pieces = np.split(np.arange(7), np.cumsum(lengths)[:-1])
    found = [passage.tolist() for passage in document_embeddings.regroup(pieces, 3)]
    assert found == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(document_embeddings.regroup([], 3)) == []


def test_only_the_first_passage_names_the_topic_and_a_document_that_ends_is_forgotten():
    reading = document_embeddings.start(jax.random.key(0), 16, rows=3)
    reading = reading._replace(place=jnp.asarray([0, 1, PASSAGES - 1]))
    words = np.asarray(reading.draw(jax.random.key(1)))
    assert words[0, 0] == reading.topic[0]
    others = np.concatenate([words[0, 1:], words[1], words[2]])
    assert others.min() == TOPICS and others.max() == TOPICS + WORDS - 1
    memory = reading.memory.replace(valid=jnp.full(3, 16))
    after = Reading.move_on(reading, jax.random.key(2), memory)
    np.testing.assert_array_equal(after.place, [1, 2, 0])
    np.testing.assert_array_equal(after.memory.valid, [16, 16, 0])
    np.testing.assert_array_equal(after.topic[:2], reading.topic[:2])


@pytest.mark.full
def test_streamed_embeddings_are_means_of_the_hidden_states_that_the_model_computes(tmp_path, monkeypatch):
    workdir = trained.make(tmp_path / "run")
    monkeypatch.setattr(document_embeddings, "PASSAGE", 5)  # A segment of that model.
    text = tmp_path / "book.txt"
    text.write_bytes(trained.TEXT[:400])
    out = tmp_path / "out"
    count = document_embeddings.embed_file(str(workdir.path), str(text), str(out))
    model = txl_jax.load(workdir.path)
    (hidden,) = model.hidden_states([text.read_bytes()])
    assert len(hidden) > 5 * 9 and count == -(-len(hidden) // 5)
    expected = [hidden[first : first + 5].mean(axis=0) for first in range(0, len(hidden), 5)]
    found = np.fromfile(out / "embeddings.f32", np.float32).reshape(count, -1)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.nightly(part="long")
def test_memory_finds_the_topic_as_far_back_as_it_reaches():
    params = document_embeddings.train(updates=500, seed=2, log=print)
    within, without = (document_embeddings.accuracy(params, m, seed=2, documents=128) for m in (MEM_LEN, 0))
    reach, chance = document_embeddings.CONFIG.n_layer * MEM_LEN // PASSAGE, 1 / TOPICS
    assert within[: reach + 1].min() > 0.95
    # Of 128 documents, a share of 1 in 8 has a standard deviation of 0.03; the topics are the same in all passages.
    assert within[reach + 1 :].mean() == pytest.approx(chance, abs=0.1)
    assert without[0] > 0.95 and without[1:].mean() == pytest.approx(chance, abs=0.1)


@pytest.mark.nightly(part="long")
def test_time_and_memory_do_not_grow_with_the_document():
    first, second = document_embeddings.measure_stream(100_000)
    assert second["peak_mb"] - first["peak_mb"] < 20
    assert second["us_per_token"] < 3 * first["us_per_token"]  # Loose: other programs may run.
