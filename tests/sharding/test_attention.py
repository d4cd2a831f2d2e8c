"""Tests that every implementation of attention gives on meshes of eight devices what the reference gives on one."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from support.xla_flags import xla_flags

PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "attention_on_meshes.py"
REPOSITORY = PROGRAM.parents[2]


@pytest.fixture(scope="module")
def found():
    """The JSON of `support.attention_on_meshes`."""
    variables = {"XLA_FLAGS": xla_flags(devices=8), "JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment = os.environ | variables | {"PYTHONPATH": path}
    result = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("implementation", ["reference", "tiled", "tpu", "gpu"])
@pytest.mark.parametrize("mesh", ["data", "mixed", "tensor"])
@pytest.mark.parametrize("call", ["training", "inference"])
def test_a_mesh_attends_as_one_device_does(found, call, mesh, implementation):
    """Values and six gradients, with the dropout mask of the whole batch; kernels are interpreted."""
    differences = found[f"{call} {mesh} {implementation}"]
    assert len(differences) == {"training": 7, "inference": 1}[call]
    assert max(differences) < 2e-5, differences
