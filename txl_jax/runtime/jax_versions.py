"""Differences between the versions of jax that are supported: each is in this file alone.

`txl_jax/version.py` has the oldest version. What Pallas lacks is a limit of its kernels (`ops/attention/*/limits.py`).
"""

import inspect
from typing import Any

import jax


def initialize_distributed(*, shutdown_timeout_seconds: int, **arguments: Any) -> None:
    """Calls `jax.distributed.initialize`; jax 0.7 has no setting for the timeout of the end."""
    if "shutdown_timeout_seconds" in inspect.signature(jax.distributed.initialize).parameters:
        arguments["shutdown_timeout_seconds"] = shutdown_timeout_seconds
    jax.distributed.initialize(**arguments)
