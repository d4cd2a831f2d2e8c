"""Transfer of a model's parameters to another vocabulary.

Rows of tokens that both vocabularies have are carried over. Other rows are initialized.

Parameters that have a row per token are the embedding's `table_c`, and the softmax's `table_c` and
`bias`. With div_val 1 there is one table for all clusters, so that a token may be in another
cluster than before. With div_val > 1 each cluster has a table of another size, and its own
projection: the row of a token that moved fits nowhere, and the token counts as new.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.config import ModelConfig
from txl_jax.data.vocabulary import Vocabulary

_TABLE = re.compile(r"(embedding|softmax)/table_(\d+)")
_BIAS = "softmax/bias"


class RowMap(NamedTuple):
    """The old row of each token of a new vocabulary."""

    # int32 [V new], the token's id in the old vocabulary, or -1 if it is new there.
    rows: np.ndarray
    # V of the old vocabulary.
    old_size: int
    # Tokens that are in both, and count as new as their clusters' widths differ.
    moved: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Returns the numbers of rows that are kept, new, dropped and moved.

        Kept rows are carried over, new rows are initialized, and dropped rows are not carried over.
        """
        kept = int(np.sum(self.rows >= 0))
        return {
            "kept": kept,
            "new": len(self.rows) - kept,
            "dropped": self.old_size - kept,
            "moved": self.moved,
        }


def match_tokens(old: Vocabulary, new: Vocabulary) -> np.ndarray:
    """Returns the id in `old` of each token of `new`, found by its spelling.

    The result is int32 [V new], with -1 for a token that `old` does not have.

    The token for unknown words and the mark of a line's end are matched by their use where their
    spellings differ.
    """
    by_name = {name: token for token, name in enumerate(old.names())}
    rows = np.array([by_name.get(name, -1) for name in new.names()], np.int32)
    for theirs, ours in ((old.unknown_id, new.unknown_id), (old.mark, new.mark)):
        if theirs is not None and ours is not None and rows[ours] < 0 and theirs not in rows:
            rows[ours] = theirs
    return rows


def row_map(matched: np.ndarray, old: ModelConfig, new: ModelConfig, *, old_size: int) -> RowMap:
    """Returns the rows that are carried over between two models, by `match_tokens`.

    Both models have the same number of clusters.
    """
    if new.div_val == 1:
        return RowMap(matched, old_size)
    same_cluster = _clusters(matched, old) == _clusters(np.arange(len(matched)), new)
    moved = (matched >= 0) & ~same_cluster
    return RowMap(np.where(moved, -1, matched).astype(np.int32), old_size, int(np.sum(moved)))


def transfer(rows: RowMap, old: ModelConfig, new: ModelConfig) -> Callable[[Any, Any], Any]:
    """Returns the function that makes the new model's parameters, to be jitted.

    It maps (initial parameters, old parameters) to the parameters of the new model.
    """
    bounds = [
        np.array([0, *config.cutoffs, size])
        for config, size in ((old, rows.old_size), (new, len(rows.rows)))
    ]

    def one(path: Any, initial: jax.Array, theirs: jax.Array) -> jax.Array:
        span = _tokens_of(jax.tree_util.keystr(path, simple=True, separator="/"), new, *bounds)
        if span is None:
            return theirs.astype(initial.dtype)
        first, last, old_first = span
        taken = rows.rows[first:last]
        # Tokens without an old row read any, which `where` replaces.
        places = np.clip(taken - old_first, 0, theirs.shape[0] - 1)
        found = jnp.take(theirs, jnp.asarray(places), axis=0)
        kept = jnp.asarray(taken >= 0).reshape(-1, *(1,) * (initial.ndim - 1))
        return jnp.where(kept, found.astype(initial.dtype), initial)

    return functools.partial(jax.tree.map_with_path, one)


def _tokens_of(
    name: str, config: ModelConfig, old: np.ndarray, new: np.ndarray
) -> tuple[int, int, int] | None:
    """Returns the tokens of a parameter's rows, or None if it does not have a row per token.

    The tokens are (first, one past the last, first in the old parameter).
    """
    found = _TABLE.fullmatch(name)
    if name == _BIAS or (found and config.div_val == 1):
        return 0, int(new[-1]), 0
    if found:
        cluster = int(found[2])
        return int(new[cluster]), int(new[cluster + 1]), int(old[cluster])
    return None


def _clusters(tokens: Any, config: ModelConfig) -> np.ndarray:
    """Returns the cluster of each token id."""
    return np.searchsorted(np.asarray(config.cutoffs, np.int64), tokens, side="right")
