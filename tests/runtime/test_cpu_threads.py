"""Tests of the number of XLA's threads, which an undocumented variable sets."""

import os
import subprocess
import sys

import pytest

from support import ON_PATH
from txl_jax.errors import UserError
from txl_jax.runtime import cpu_threads

COUNT = """
import sys
from txl_jax.runtime import cpu_threads
cpu_threads.use_cpu(int(sys.argv[1]))
print(cpu_threads.count_started())
"""


@pytest.mark.full
@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_threads_as_were_asked_for(threads):
    """With fewer cores or more, and whatever the variable was before: here another number."""
    result = subprocess.run(
        [sys.executable, "-c", COUNT, str(threads)],
        env=os.environ | ON_PATH | {"NPROC": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [str(threads)]


def test_a_process_that_has_others_already(monkeypatch):
    # So that the value from before comes back after the test: `use_cpu` changes the variable.
    monkeypatch.setenv("NPROC", os.environ.get("NPROC", ""))
    monkeypatch.setattr(cpu_threads, "count_started", lambda: 2)
    cpu_threads.use_cpu(2)
    with pytest.raises(UserError, match="must compute with 3 threads, but JAX has started 2"):
        cpu_threads.use_cpu(3)
