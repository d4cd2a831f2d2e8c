"""Cases of attention, and the comparison of an implementation with the reference: values and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from txl_jax.ops.attention.dot_product import dot_product_attention
from txl_jax.ops.attention.dropout import Dropout
from txl_jax.ops.attention.masks import Visibility
from txl_jax.ops.attention.problem import Tile
from txl_jax.ops.attention.relative import relative_attention
from txl_jax.ops.attention.tiled import tiled_attention

H = 2
NAMES = ("query", "key", "value", "position_key", "content_bias", "position_bias", "position_score")
RELATIVE, SHAW, ABSOLUTE = NAMES[:6], NAMES[:4], NAMES[:3]
WHOLE, UNEVEN, SMALL = Tile(64, 64), Tile(5, 11), Tile(4, 8)

CASES = {
    "one tile": {"tile": WHOLE},
    "whole rows": {"tile": Tile(6, 64)},
    "uneven tiles": {"tile": UNEVEN},
    "part-filled memory": {"tile": UNEVEN, "valid": [0, 9, 4, 17]},
    "part-filled, whole rows": {"tile": Tile(6, 64), "valid": [0, 9, 4, 17]},
    "window": {"tile": UNEVEN, "window": 7},
    "window, whole rows": {"tile": Tile(5, 64), "window": 7, "valid": [17, 2, 0, 5]},
    "window of one key": {"tile": UNEVEN, "window": 1},
    "clamped distances": {"tile": SMALL, "clamp": 6},
    "one query": {"tile": SMALL, "L": 1},
    "one query, no memory": {"tile": SMALL, "L": 1, "M": 0},
    "no memory": {"tile": SMALL, "M": 0},
    "odd head width": {"tile": SMALL, "E": 41, "B": 1},
    "Shaw's terms": {"tile": UNEVEN, "names": SHAW},
    "Shaw's terms and a score per distance": {"tile": SMALL, "names": (*SHAW, "position_score")},
    "all terms": {"tile": SMALL, "names": NAMES},
    "only a score per distance": {"tile": UNEVEN, "names": (*ABSOLUTE, "position_score")},
    "no positions": {"tile": UNEVEN, "names": ABSOLUTE},
    "dropout": {"tile": UNEVEN, "rate": 0.3},
    "dropout, whole rows": {"tile": Tile(6, 64), "rate": 0.3, "B": 3},
    "both sides": {"tile": UNEVEN, "causal": False},
    "both sides, lengths": {"tile": UNEVEN, "causal": False, "lengths": [13, 5, 1, 0], "valid": [17, 3, 0, 0]},
    "both sides, whole rows": {"tile": Tile(6, 64), "causal": False, "lengths": [13, 5, 1, 0], "names": NAMES},
    "both sides, window, no memory": {"tile": SMALL, "causal": False, "window": 4, "M": 0, "lengths": [13, 5, 1, 2]},
    "lengths of a causal segment": {"tile": UNEVEN, "lengths": [13, 5, 1, 0], "valid": [17, 3, 0, 0]},
}


def make(case, dtype=jnp.float32):
    """Returns (arrays by name, keyword arguments of both functions, tile)."""
    batch, segment_len, mem_len, width = (case.get(k, d) for k, d in (("B", 4), ("L", 13), ("M", 17), ("E", 8)))
    lengths = case.get("lengths")
    visibility = Visibility(
        valid=jnp.asarray(case.get("valid", [mem_len] * batch), jnp.int32),
        segment_len=segment_len,
        mem_len=mem_len,
        window=case.get("window"),
        causal=case.get("causal", True),
        lengths=None if lengths is None else jnp.asarray(lengths, jnp.int32),
    )
    n_keys, n_positions = visibility.n_keys, visibility.n_positions
    shapes = [(batch, H, segment_len, width), *[(batch, H, n_keys, width)] * 2, (H, n_positions, width)]
    shapes += [(H, width), (H, width), (H, n_positions)]
    rng = np.random.default_rng(3)
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in zip(NAMES, shapes, strict=True)}
    if "clamp" in case:
        # Distances above the clamp have the same code.
        arrays["position_key"] = (
            arrays["position_key"].at[:, : n_keys - case["clamp"]].set(arrays["position_key"][:, :1])
        )
    dropout = None
    if "rate" in case:
        dropout = Dropout(rate=case["rate"], seed=jnp.uint32(5), first_row=3, first_head=1, n_head=7)
    arrays = {name: arrays[name] for name in case.get("names", RELATIVE)}
    return arrays, {"visibility": visibility, "dropout": dropout}, case["tile"]


def reference(arrays, **given):
    terms = dict.fromkeys(("content_bias", "position_bias", "position_score")) | arrays
    if "position_key" in arrays:
        return relative_attention(**terms, **given)
    terms = {name: array for name, array in terms.items() if not name.endswith("bias")}
    return dot_product_attention(**terms, **given)


def value_and_gradients(function, arrays, **given):
    result, pull = jax.vjp(lambda arrays: function(arrays, **given), arrays)
    weights = np.random.default_rng(4).normal(size=result.shape)
    return result, pull(jnp.asarray(weights, result.dtype))[0]


def tiled(arrays, **given):
    return tiled_attention(**arrays, **given)


def assert_close(actual, expected, tolerance):
    """Compares the result and each gradient, by the largest difference relative to the largest value or to 1."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, value), other in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
        assert (other.shape, other.dtype) == (value.shape, value.dtype), path
        value, other = np.asarray(value, np.float64), np.asarray(other, np.float64)
        assert np.abs(other - value).max() <= tolerance * max(np.abs(value).max(), 1), path
