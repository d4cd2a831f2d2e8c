"""Comparison of saved and wanted arrays, and arrays of size zero, which Orbax refuses to save."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def describe_arrays(tree: Any) -> dict[str, str]:
    """Types and shapes by the arrays' names, such as {"params/q": "float32[2, 3]"}."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        described[jax.tree_util.keystr(path, simple=True, separator="/")] = f"{dtype}{list(np.shape(leaf))}"
    return described


def describe_difference(saved: dict[str, str], wanted: dict[str, str]) -> str:
    """One clause on how two trees differ, naming up to three arrays; empty if they do not."""
    differ = [
        f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} here"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    more = f", and {len(differ) - 3} more" if len(differ) > 3 else ""
    return ", ".join(differ[:3]) + more


def drop_empty(tree: Any) -> Any:
    """The tree with None for each array of size zero, such as the memory of a model without recurrence."""
    return jax.tree.map(lambda leaf: leaf if np.size(leaf) else None, tree)


def restore_empty(tree: Any, abstract_tree: Any) -> Any:
    """Puts back the arrays of size zero that `drop_empty` left out."""
    leaves = iter(jax.tree.leaves(tree))
    return jax.tree.map(lambda leaf: next(leaves) if np.size(leaf) else _empty(leaf), abstract_tree)


def _empty(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
