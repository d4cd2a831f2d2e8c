"""Tests that a mesh over several slices of TPUs crosses them along its outermost axis only."""

import dataclasses

import numpy as np
import pytest

from txl_jax.config import MeshConfig
from txl_jax.errors import UserError
from txl_jax.sharding import mesh as mesh_module


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU, as far as jax needs one to make a mesh."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    process_index: int = 0


def chips(num_slices):
    """Chips of 4 x 4 slices, with those of different slices mixed."""
    places = [(index, (index % 4, index // 4, 0)) for index in reversed(range(16))]
    return [Chip(16 * number + index, number, place) for index, place in places for number in range(num_slices)]


def grid(devices, **sizes):
    slices = mesh_module._slices(devices)
    shape = mesh_module._shape(MeshConfig(**sizes), len(devices), num_slices=len(slices))
    return mesh_module._device_grid(slices, shape)


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 16}, {"fsdp": 4, "tensor": 4}, {"fsdp": 2, "tensor": 4}])
def test_only_data_crosses_slices(sizes):
    found = np.vectorize(lambda chip: chip.slice_index)(grid(chips(2), **sizes))
    assert found.shape[1:] == (sizes.get("fsdp", 1), sizes.get("tensor", 1)) and found.size == 32
    half = len(found) // 2
    assert (found[:half] == 0).all() and (found[half:] == 1).all()


def test_chips_that_are_left_idle_and_are_no_box_are_those_of_each_slice():
    found = grid(chips(2), data=7)
    assert found.shape == (14, 1, 1)
    assert [chip.slice_index for chip in found.flat] == [0] * 7 + [1] * 7
    assert len({chip.id for chip in found.flat}) == 14


def test_sizes_that_do_not_fit_the_slices_are_refused():
    with pytest.raises(UserError, match=r"\b31 devices\b.*\b2 slices\b"):
        grid(chips(2)[1:])
    with pytest.raises(UserError, match=r"\b2 x 16 x 1\b.*\b16 devices\b"):
        grid(chips(2), data=2, fsdp=16)
