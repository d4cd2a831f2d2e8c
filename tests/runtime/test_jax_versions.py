"""Tests of what differs between versions of jax, as if each version were here."""

import jax
import pytest

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
