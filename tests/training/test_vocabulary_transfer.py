"""Tests which rows of a trained model's tables a model for another vocabulary takes over, token by
token.
"""

import dataclasses

import numpy as np
import pytest

from txl_jax.config import ModelConfig
from txl_jax.training import vocabulary_transfer

# The old id of each token of the new vocabulary. -1 is a new word.
MATCHED = np.array([2, 0, 5, 1, 4, 3, -1, 9, 11, 6, 10], np.int32)
OLD_SIZE, NEW_SIZE = 12, len(MATCHED)
OLD_CUTOFFS, NEW_CUTOFFS = (3, 7), (4, 8)


def parameters(cutoffs, size, *, div_val, start):
    """Returns tables in which no two numbers are equal, of embedding and softmax, its bias and
    another matrix.
    """
    bounds = [0, *cutoffs, size] if div_val > 1 else [0, size]
    numbers = np.arange(start, start + 10_000, dtype=np.float32)
    tables = {}
    for cluster in range(len(bounds) - 1):
        width = 8 // div_val**cluster
        rows = bounds[cluster + 1] - bounds[cluster]
        tables[f"table_{cluster}"] = numbers[: rows * width].reshape(rows, width)
        numbers = numbers[rows * width :]
    bias = numbers[:size]
    return {
        "embedding": tables,
        "softmax": {name: -table for name, table in tables.items()} | {"bias": bias},
        "block": {"kernel": numbers[size : size + 4].reshape(2, 2)},
    }


def place_of(token, cutoffs):
    """Returns the cluster of a token, and its row in that cluster's table."""
    first = 0
    for cluster, cutoff in enumerate(cutoffs):
        if token < cutoff:
            return cluster, token - first
        first = cutoff
    return len(cutoffs), token - first


@pytest.mark.parametrize("div_val", [1, 2])
def test_each_token_has_its_own_row_of_the_old_tables_or_a_new_one(div_val):
    """With div_val > 1 a token keeps its row only in the same cluster, since other clusters have
    other widths.
    """
    old_config = ModelConfig(cutoffs=OLD_CUTOFFS, div_val=div_val)
    new_config = dataclasses.replace(old_config, cutoffs=NEW_CUTOFFS)
    old = parameters(OLD_CUTOFFS, OLD_SIZE, div_val=div_val, start=0)
    initial = parameters(NEW_CUTOFFS, NEW_SIZE, div_val=div_val, start=20_000)
    rows = vocabulary_transfer.row_map(MATCHED, old_config, new_config, old_size=OLD_SIZE)
    made = vocabulary_transfer.transfer(rows, old_config, new_config)(initial, old)

    kept = 0
    for token, old_token in enumerate(MATCHED):
        if div_val == 1:
            cluster = old_cluster = 0
            row = token
            old_row = old_token
        else:
            cluster, row = place_of(token, NEW_CUTOFFS)
            old_cluster, old_row = place_of(old_token, OLD_CUTOFFS)
        is_kept = old_token >= 0 and cluster == old_cluster
        kept += is_kept
        table = f"table_{cluster}"
        for part in ("embedding", "softmax"):
            expected = old[part][table][old_row] if is_kept else initial[part][table][row]
            np.testing.assert_array_equal(
                made[part][table][row], expected, f"{part} of token {token}"
            )
        bias = old["softmax"]["bias"][old_token] if is_kept else initial["softmax"]["bias"][token]
        assert made["softmax"]["bias"][token] == bias
    assert rows.counts["kept"] == kept == (10 if div_val == 1 else 7)
    np.testing.assert_array_equal(made["block"]["kernel"], old["block"]["kernel"])
