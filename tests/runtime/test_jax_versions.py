"""Tests of what differs between versions of jax, as if each version were here."""

import contextlib

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from txl_jax.runtime import jax_versions


@pytest.mark.parametrize("has_it", [False, True])
def test_the_timeout_of_the_end_is_given_where_jax_has_it(monkeypatch, has_it):
    given = {}

    def old(coordinator_address=None, heartbeat_timeout_seconds=100):
        given.update(locals())

    def new(coordinator_address=None, heartbeat_timeout_seconds=100, shutdown_timeout_seconds=300):
        given.update(locals())

    monkeypatch.setattr(jax.distributed, "initialize", new if has_it else old)
    jax_versions.initialize_distributed(
        coordinator_address="a:1", heartbeat_timeout_seconds=5, shutdown_timeout_seconds=60
    )
    given.pop("given")
    expected = {"coordinator_address": "a:1", "heartbeat_timeout_seconds": 5}
    assert given == expected | ({"shutdown_timeout_seconds": 60} if has_it else {})


def test_a_mesh_is_entered_without_jax_set_mesh(monkeypatch):
    """As in jax 0.7.0, where `jax.sharding.use_mesh` does it."""
    entered = []
    monkeypatch.delattr(jax, "set_mesh", raising=False)
    monkeypatch.setattr(
        jax.sharding, "use_mesh", lambda mesh: contextlib.nullcontext(entered.append(mesh)), raising=False
    )
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    with jax_versions.set_mesh(mesh):
        assert entered == [mesh]


@pytest.mark.parametrize("public", [False, True])
def test_described_devices_are_entered_and_left(monkeypatch, public):
    if not public:  # As in jax 0.7.0.
        monkeypatch.delattr(jax.sharding, "use_abstract_mesh", raising=False)
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax_versions.use_abstract_mesh(mesh):
        assert jax.sharding.get_abstract_mesh() == mesh
    assert jax.sharding.get_abstract_mesh() != mesh
