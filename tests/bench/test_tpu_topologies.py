"""Tests of the names of TPU slices."""

import pytest

from txl_jax.bench import tpu_topologies
from txl_jax.errors import UserError


@pytest.mark.parametrize("topology", ["v5e:3x5", "v5e:4x4x4", "v4:4x4", "v5p:2x1x1"])
def test_a_slice_is_whole_hosts_of_its_generation(topology):
    with pytest.raises(UserError, match=rf"\b{topology}\b.*\b\d+x\d+"):
        tpu_topologies.split(topology)


@pytest.mark.parametrize("topology", ["v9:2x2", "v5e", "v5e:2x", "v5e:2x2x2x2", "4x4"])
def test_a_slice_is_written_as_generation_and_shape(topology):
    with pytest.raises(UserError, match=rf"'{topology}'.*\bv5e\b.*\bv4:2x2x4\b"):
        tpu_topologies.split(topology)


def test_a_generation_alone_is_all_its_slices_from_small_to_large():
    assert tpu_topologies.slices("v5e:4x8") == ["v5e:4x8"]
    found = tpu_topologies.slices("v4")
    assert found[0] == "v4:2x2x1"
    assert [tpu_topologies.num_devices(name) for name in found] == [4, 8, 16, 32, 64, 128]
    assert tpu_topologies.num_devices("v3:2x2") == 8  # Two devices per chip.


def test_several_slices_are_written_with_their_number():
    assert tpu_topologies.split("2*v5e:4x8") == ("v5e", "4x8")
    assert [tpu_topologies.count_slices(name) for name in ("2*v5e:4x8", "16*v4:2x2x4", "v5e:4x8")] == [2, 16, 1]
    assert tpu_topologies.num_devices("2*v5e:4x8") == 64
    assert tpu_topologies.slices("2*v5e:4x8") == ["2*v5e:4x8"]
    for name in ("0*v5e:4x8", "2*v5e", "2x*v5e:4x8"):
        with pytest.raises(UserError, match=r"\b2\*v5e:4x8\b"):
            tpu_topologies.split(name)
