"""Tests of benchmarks/cutoffs.py, which times the softmax by vocabulary size and cutoffs."""

import pytest

from benchmarks import cutoffs


@pytest.mark.full
def test_each_softmax_of_a_vocabulary_has_a_row():
    vocab_size = 64
    d_model = 256
    full = vocab_size * d_model + vocab_size
    # The head has a vector and a bias for each tail.
    with_tail = full + d_model + 1
    # Vectors of the tail have a quarter of the size. The head is projected from 256 to 256, and the
    # tail from 64 to 256, with one matrix for the embedding and one for the softmax.
    projections = 2 * (d_model * d_model + d_model // 4 * d_model)
    smaller = with_tail - (vocab_size - 8) * (d_model - d_model // 4) + projections

    layers, *softmaxes = cutoffs.time_vocabulary(vocab_size, ((), (8,)), calls=1)

    assert layers["part"] == "layers"
    names = [(row["part"], row["cutoffs"], row["div_val"]) for row in softmaxes]
    assert names == [("softmax", "", 1), ("softmax", "8", 1), ("softmax", "8", 4)]
    assert [row["parameters"] for row in softmaxes] == [full, with_tail, smaller]
    for row in (layers, *softmaxes):
        assert row.keys() == set(cutoffs.COLUMNS)
        assert float(row["fastest"]) == float(row["slowest"]) > 0
