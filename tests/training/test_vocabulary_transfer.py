"""Tests which rows of a trained model's tables a model for another vocabulary takes over, token by
token.
"""

import dataclasses

import jax
import numpy as np
import pytest

from txl_jax.config import ModelConfig
from txl_jax.training import vocabulary_transfer

# The old id of each token of the new vocabulary. -1 is a new word. Token 2 was in the old model's
# second cluster and is in the new one's first, 7 was in its third and is in the second, and 9 was
# in its second and is in the third.
MATCHED = np.array([2, 0, 5, 1, 4, 3, -1, 9, 11, 6, 10], np.int32)
OLD_SIZE = 12
OLD_CUTOFFS = (3, 7)
NEW_SIZE = len(MATCHED)
NEW_CUTOFFS = (4, 8)


def parameters(cutoffs, size, *, div_val, start):
    """Returns tables of embedding and softmax, its bias and another matrix.

    No two of their numbers are equal: the softmax has the negative of the embedding. The numbers
    count from `start`, so that two models have different ones.
    """
    bounds = [0, size]
    if div_val > 1:
        bounds = [0, *cutoffs, size]
    numbers = np.arange(start, start + 10_000, dtype=np.float32)
    embedding = {}
    softmax = {}
    for cluster in range(len(bounds) - 1):
        width = 8 // div_val**cluster
        rows = bounds[cluster + 1] - bounds[cluster]
        table = numbers[: rows * width].reshape(rows, width)
        numbers = numbers[rows * width :]
        embedding[f"table_{cluster}"] = table
        softmax[f"table_{cluster}"] = -table
    softmax["bias"] = numbers[:size]
    kernel = numbers[size : size + 4].reshape(2, 2)
    return {"embedding": embedding, "softmax": softmax, "block": {"kernel": kernel}}


def place_of(token, cutoffs):
    """Returns the cluster of a token, and its row in that cluster's table."""
    first = 0
    for cluster, cutoff in enumerate(cutoffs):
        if token < cutoff:
            return cluster, token - first
        first = cutoff
    return len(cutoffs), token - first


# All tokens are kept but the new word and, with div_val > 1, the three that are in another cluster.
@pytest.mark.parametrize(("div_val", "n_kept"), [(1, 10), (2, 7)])
def test_each_token_has_its_own_row_of_the_old_tables_or_a_new_one(div_val, n_kept):
    """With div_val > 1 a token keeps its row only in the same cluster, since other clusters have
    other widths. With div_val 1 there is one table for all clusters.
    """
    old_config = ModelConfig(cutoffs=OLD_CUTOFFS, div_val=div_val)
    new_config = dataclasses.replace(old_config, cutoffs=NEW_CUTOFFS)
    old = parameters(OLD_CUTOFFS, OLD_SIZE, div_val=div_val, start=0)
    initial = parameters(NEW_CUTOFFS, NEW_SIZE, div_val=div_val, start=20_000)

    rows = vocabulary_transfer.row_map(MATCHED, old_config, new_config, old_size=OLD_SIZE)
    transfer = jax.jit(vocabulary_transfer.transfer(rows, old_config, new_config))
    transferred = jax.device_get(transfer(initial, old))

    kept = 0
    for token, old_token in enumerate(MATCHED):
        cluster = old_cluster = 0
        row = token
        old_row = old_token
        if div_val > 1:
            cluster, row = place_of(token, NEW_CUTOFFS)
            old_cluster, old_row = place_of(old_token, OLD_CUTOFFS)

        source = initial
        source_row = row
        source_token = token
        if old_token >= 0 and cluster == old_cluster:
            kept += 1
            source = old
            source_row = old_row
            source_token = old_token

        table = f"table_{cluster}"
        for part in ("embedding", "softmax"):
            actual = transferred[part][table][row]
            expected = source[part][table][source_row]
            np.testing.assert_array_equal(actual, expected, f"{part} of token {token}")
        bias = transferred["softmax"]["bias"][token]
        assert bias == source["softmax"]["bias"][source_token], f"bias of token {token}"
    assert rows.counts["kept"] == kept == n_kept
    np.testing.assert_array_equal(transferred["block"]["kernel"], old["block"]["kernel"])
