"""Tests the member axis: split and stack, JSON by name, and a run by itself as the case without an axis."""

import jax
import numpy as np
from jax.sharding import PartitionSpec

from support import tiny_run
from txl_jax.training.members import Members

NAMES = ("seed=1", "seed=2")


def test_stacking_inverts_splitting():
    tree = {"a": np.arange(6.0).reshape(2, 3), "b": np.arange(2)}
    members = Members(NAMES)
    first, second = members.split(tree)
    assert first["a"].tolist() == [0, 1, 2] and second["b"] == 1
    tiny_run.assert_equal(jax.device_get(members.stack([first, second])), jax.device_get(jax.device_put(tree)))


def test_a_run_by_itself_has_no_axis():
    lone, tree = Members(), {"a": np.arange(3)}
    assert lone.labels == (None,) and len(lone) == 1 and lone.prefix(0) == ""
    assert lone.split(tree) == [tree] and lone.stack([tree]) is tree and lone.abstract(tree) is tree
    assert lone.from_json(lone.to_json([5])) == [5] and lone.from_json(None) == [None]


def test_values_are_stored_by_name():
    members = Members(NAMES)
    assert members.to_json([3, 4]) == {"seed=1": 3, "seed=2": 4}
    assert members.from_json({"seed=2": 4, "seed=1": 3}) == [3, 4]
    assert members.from_json(None) == [None, None] and members.prefix(1) == "seed=2: "


def test_the_abstract_state_has_the_axis_and_its_shardings():
    state = tiny_run.parts().training.abstract_state
    for leaf, own in zip(jax.tree.leaves(Members(NAMES).abstract(state)), jax.tree.leaves(state), strict=True):
        assert leaf.shape == (2, *own.shape) and leaf.dtype == own.dtype
        assert leaf.sharding.spec == PartitionSpec(None, *own.sharding.spec)
