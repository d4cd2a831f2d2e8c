"""Transfers a model's parameters to another vocabulary.

Rows of tokens that both vocabularies contain are carried over. Other rows are initialized.

Parameters that have a row per token are the embedding's `table_c`, and the softmax's `table_c` and
`bias`. With div_val 1 there is one table for all clusters, so that a token may be in another
cluster than before. With div_val > 1 each cluster has a table of another size, and its own
projection: the row of a token that moved does not match its new cluster, and the token counts as
new.
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

_TABLE = re.compile(r"(embedding|softmax)/table_(?P<cluster>\d+)")
_BIAS = "softmax/bias"


class RowMap(NamedTuple):
    """The old row of each token of a new vocabulary."""

    # int32 [V new], each token's id in the old vocabulary, or -1 if its row is initialized.
    rows: np.ndarray
    # V of the old vocabulary.
    old_size: int
    # Number of tokens that are in both, and count as new because their clusters' sizes differ.
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
    old_ids = {name: token for token, name in enumerate(old.names())}
    matched = np.array([old_ids.get(name, -1) for name in new.names()], np.int32)
    _match_by_use(matched, old=old.unknown_id, new=new.unknown_id)
    _match_by_use(matched, old=old.mark, new=new.mark)
    return matched


def _match_by_use(matched: np.ndarray, *, old: int | None, new: int | None) -> None:
    """Sets the old id of a new token of the same use, unless the spellings have matched either."""
    if old is None or new is None:
        return
    if matched[new] < 0 and old not in matched:
        matched[new] = old


def row_map(matched: np.ndarray, old: ModelConfig, new: ModelConfig, *, old_size: int) -> RowMap:
    """Returns the rows that are carried over between two models, by `match_tokens`.

    Both models have the same number of clusters.
    """
    if new.div_val == 1:
        return RowMap(matched, old_size)
    is_same_cluster = _clusters(matched, old) == _clusters(np.arange(len(matched)), new)
    has_moved = (matched >= 0) & ~is_same_cluster
    rows = np.where(has_moved, -1, matched).astype(np.int32)
    return RowMap(rows, old_size, moved=int(np.sum(has_moved)))


def transfer(rows: RowMap, old: ModelConfig, new: ModelConfig) -> Callable[[Any, Any], Any]:
    """Returns the function that makes the new model's parameters, to be jitted.

    It maps (initial parameters, old parameters) to the parameters of the new model.
    """
    # Bounds of the clusters, as token ids.
    old_bounds = np.array([0, *old.cutoffs, rows.old_size])
    new_bounds = np.array([0, *new.cutoffs, len(rows.rows)])

    def transfer_leaf(path: Any, initial: jax.Array, trained: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        tokens = _tokens_of(name, new, old_bounds, new_bounds)
        if tokens is None:
            return trained.astype(initial.dtype)

        old_ids = rows.rows[tokens.first : tokens.end]
        # Tokens without an old row read an arbitrary row, which `where` replaces.
        old_rows = np.clip(old_ids - tokens.old_first, 0, trained.shape[0] - 1)
        carried_over = jnp.take(trained, jnp.asarray(old_rows), axis=0).astype(initial.dtype)
        has_row = jnp.asarray(old_ids >= 0).reshape(-1, *(1,) * (initial.ndim - 1))
        return jnp.where(has_row, carried_over, initial)

    return functools.partial(jax.tree.map_with_path, transfer_leaf)


class _TokenRange(NamedTuple):
    """The tokens of a parameter's rows."""

    first: int  # First token of the new parameter.
    end: int  # One past its last token.
    old_first: int  # First token of the old parameter.


def _tokens_of(
    name: str, config: ModelConfig, old_bounds: np.ndarray, new_bounds: np.ndarray
) -> _TokenRange | None:
    """Returns the tokens of a parameter's rows, or None if it does not have a row per token."""
    table = _TABLE.fullmatch(name)
    if name == _BIAS or (table and config.div_val == 1):
        return _TokenRange(first=0, end=int(new_bounds[-1]), old_first=0)
    if table is None:
        return None
    cluster = int(table["cluster"])
    return _TokenRange(
        first=int(new_bounds[cluster]),
        end=int(new_bounds[cluster + 1]),
        old_first=int(old_bounds[cluster]),
    )


def _clusters(tokens: Any, config: ModelConfig) -> np.ndarray:
    """Returns the cluster of each token id."""
    return np.searchsorted(np.asarray(config.cutoffs, np.int64), tokens, side="right")
