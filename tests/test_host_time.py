"""Tests that the host time of a step grows with the devices no more than docs/scaling.md states."""

import json
import os
import subprocess
import sys

import pytest

from support import ROOT

PROGRAM = ROOT / "tests" / "support" / "host_time.py"


@pytest.mark.nightly(part="long")
def test_a_step_costs_the_host_little_more_on_more_devices():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(result.stdout)
    for name in ("8", "8, fsdp", "8, 2 x 2 x 2"):
        assert found[name] - found["1"] < 7 * 0.4, name  # Milliseconds per further device.
