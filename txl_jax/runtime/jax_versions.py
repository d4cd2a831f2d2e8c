"""Differences between the versions of jax that are supported: each is in this file alone.

`txl_jax/version.py` has the oldest version. What Pallas lacks is a limit of its kernels (`ops/attention/*/limits.py`).
"""

import contextlib
import inspect
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh


def set_mesh(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """Enters a mesh: `jax.set_mesh`, for which jax 0.7.0 has `jax.sharding.use_mesh`."""
    if hasattr(jax, "set_mesh"):
        return jax.set_mesh(mesh)
    return jax.sharding.use_mesh(mesh)  # type: ignore[attr-defined]


def use_abstract_mesh(mesh: AbstractMesh) -> contextlib.AbstractContextManager[Any]:
    """Enters a mesh of described devices: `jax.sharding.use_abstract_mesh`, which jax 0.7.0 has in its sources only."""
    if hasattr(jax.sharding, "use_abstract_mesh"):
        return jax.sharding.use_abstract_mesh(mesh)
    from jax._src import mesh as mesh_lib

    return mesh_lib.use_abstract_mesh(mesh)


def initialize_distributed(*, shutdown_timeout_seconds: int, **arguments: Any) -> None:
    """Calls `jax.distributed.initialize`; jax 0.7 has no setting for the timeout of the end."""
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        arguments["shutdown_timeout_seconds"] = shutdown_timeout_seconds
    jax.distributed.initialize(**arguments)
