"""The TPU kernels, interpreted, on the shards of a mesh: rows over data and fsdp, heads over tensor."""

import json
import os
import pathlib
import subprocess
import sys

from support.xla_flags import xla_flags

PROGRAM = pathlib.Path(__file__).parents[3] / "support" / "kernels_on_eight_devices.py"


def test_eight_devices_equal_one_with_the_same_dropout():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices=8),
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    output = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(output.stdout.splitlines()[-1])
    assert found["n_device"] == 8 and len(found["differences"]) == 7
    assert max(found["differences"].values()) < 2e-5, found
