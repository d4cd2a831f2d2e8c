"""The matrix products of attention alone, of all pairs: what no implementation leaves out.

On a CPU they are done head by head into arrays that stay in the cache (written to memory for all heads at once, 512 x
1024 scores of 16 heads took 2.5 times as long), on other devices for all rows and heads in one product. What is
multiplied with scores or probabilities is the same for all heads, and in the order that the product reads.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from txl_jax.bench.attention_cases import Arrays, Case


def make_inputs(case: Case, *, platform: str) -> tuple[Arrays, Arrays]:
    """Returns random arrays: of groups of heads [N, G, ..], and in place of scores, for each group anew, [G, ..]."""
    heads = case.batch * case.n_head
    group = 1 if platform == "cpu" else heads
    width, length, n_keys, n_positions = case.d_head, case.segment_len, case.n_keys, case.n_positions
    of_heads = {"query": (length, width), "position_key": (n_positions, width)}
    if case.capacity is None:
        of_heads |= {"key": (n_keys, width), "value": (n_keys, width), "cotangent": (length, width)}
        of_scores = {
            "by_key": (length, n_keys),
            "by_query": (n_keys, length),
            "by_distance": (length, n_positions),
            "by_query_of_distance": (n_positions, length),
        }
    else:
        of_heads |= {"key": (length, width), "value": (length, width), "position_key": (width, n_positions)}
        of_heads |= {"stored_key": (width, case.capacity), "stored_value": (case.capacity, width)}
        of_scores = {"by_key": (length, length), "by_stored_key": (length, case.capacity)}

    def draw(number: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.key(number), shape, case.dtype)

    per_group = {
        name: draw(number, (heads // group, group, *shape)) for number, (name, shape) in enumerate(of_heads.items())
    }
    return per_group, {name: draw(number, (group, *shape)) for number, (name, shape) in enumerate(of_scores.items())}


def products(case: Case) -> Callable[[tuple[Arrays, Arrays]], list[jax.Array]]:
    """Returns the function of the products: three forward, in training also the six of the backward pass."""
    of_group = _of_training if case.capacity is None else _of_evaluation

    def all_groups(inputs: tuple[Arrays, Arrays]) -> list[jax.Array]:
        per_group, of_scores = inputs
        first = {name: array[0] for name, array in per_group.items()}
        if len(per_group["query"]) == 1:
            return of_group(of_scores, first)
        shapes = jax.eval_shape(functools.partial(of_group, of_scores), first)
        empty = [jnp.zeros(each.shape, each.dtype) for each in shapes]
        # The last group's results are what is returned; a loop's state is overwritten in place.
        return jax.lax.scan(lambda _, group: (of_group(of_scores, group), None), empty, per_group)[0]

    return all_groups


def _of_training(of_scores: Arrays, group: Arrays) -> list[jax.Array]:
    query, key, value, cotangent = (group[name] for name in ("query", "key", "value", "cotangent"))
    position_key = group["position_key"]
    return [
        _by_rows(query, key),
        _by_rows(query, position_key),
        of_scores["by_key"] @ value,
        of_scores["by_query"] @ cotangent,
        _by_rows(cotangent, value),
        of_scores["by_key"] @ key,
        of_scores["by_query"] @ query,
        of_scores["by_distance"] @ position_key,
        of_scores["by_query_of_distance"] @ query,
    ]


def _of_evaluation(of_scores: Arrays, group: Arrays) -> list[jax.Array]:
    query = group["query"]
    return [
        query @ group["stored_key"],
        _by_rows(query, group["key"]),
        query @ group["position_key"],
        of_scores["by_stored_key"] @ group["stored_value"],
        of_scores["by_key"] @ group["value"],
    ]


def _by_rows(left: jax.Array, right: jax.Array) -> jax.Array:
    """[G, L, E] x [G, K, E] -> [G, L, K]."""
    return jnp.einsum("gle,gke->glk", left, right)
