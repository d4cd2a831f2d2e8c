"""The number of threads with which XLA computes on CPUs.

A sum over another number of threads adds in another order, so its last bits differ. Most commands
need not care. Compression must have the same bits again (`txl_jax.compression`).
"""

import contextlib
import os
from pathlib import Path

import jax

from txl_jax.errors import UserError

# The variable that XLA reads when its first CPU device is made. It is not documented:
# tests/runtime/test_cpu_threads.py counts the threads. `--xla_cpu_multi_thread_eigen=false` in
# XLA_FLAGS did not give the same bits as one thread. Under `taskset`, XLA silently uses fewer.
_VARIABLE = "NPROC"
# The name of XLA's threads.
_THREAD_NAME = "tf_XLAEigen"


def available() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_cpu(threads: int) -> None:
    """Makes JAX compute on the CPU, with this many threads.

    Raises:
      UserError: If JAX computes in this process already, with another number of threads.
    """
    os.environ[_VARIABLE] = str(threads)
    jax.config.update("jax_platforms", "cpu")
    # Starts the threads.
    jax.devices()
    started = count_started()
    if started not in (None, threads):
        raise UserError(
            f"this process must compute with {threads} threads, but JAX has started {started} "
            "already. Start a new process."
        )


def count_started() -> int | None:
    """Returns the number of XLA's threads of this process.

    Returns None if none are found, as outside Linux.
    """
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            names.append(path.read_text().strip())
    return names.count(_THREAD_NAME) or None
