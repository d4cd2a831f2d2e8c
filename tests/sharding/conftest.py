"""Programs on eight made-up CPU devices."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from support import ROOT
from support.xla_flags import xla_flags
from txl_jax.runtime.storage import locked


@pytest.fixture(scope="session")
def on_eight_devices(tmp_path_factory, testrun_uid):
    """Returns the JSON that a Python program prints; each runs once for all tests of all workers."""
    folder = tmp_path_factory.getbasetemp().parent / f"eight-devices-{testrun_uid}"
    folder.mkdir(exist_ok=True)

    def run(*arguments, **variables):
        path = folder / hashlib.sha256(repr((arguments, variables)).encode()).hexdigest()
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                path.write_text(_printed(arguments, variables))
        return json.loads(path.read_text())

    return run


def _printed(arguments, variables):
    environment = os.environ | {"XLA_FLAGS": xla_flags(devices=8), "JAX_PLATFORMS": "cpu"} | variables
    # Programs of eight CPU devices that jaxlib 0.10.2 reads from its cache write where they must not: five of seven
    # processes ended in "corrupted size vs. prev_size". Those that it compiles do not.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    # XLA found no way between two shardings but through all of the array.
    assert "full rematerialization" not in result.stderr
    return result.stdout
