"""Tests that every implementation of attention gives on meshes of eight devices what the reference gives on one."""

import pytest

FEW = ("mixed", "reference", "tiled", "stored", "tpu")
ALL = ("data", "mixed", "tensor", "reference", "tiled", "stored", "tpu")


@pytest.mark.parametrize("parts", [FEW, pytest.param(ALL, marks=pytest.mark.nightly(part="cases"))], ids=["few", "all"])
def test_a_mesh_attends_as_one_device_does(parts, on_eight_devices):
    """Values and six gradients, with the dropout mask of the whole batch; kernels are interpreted."""
    found = on_eight_devices("-m", "support.attention_on_meshes", *parts)
    assert len(found) == {FEW: 8, ALL: 24}[parts]
    for name, differences in found.items():
        assert len(differences) == (7 if name.startswith("training") else 1)
        assert max(differences) < 2e-5, name
