"""Tests of the names of devices to compile for, and of their descriptions."""

import pytest

from txl_jax import flops
from txl_jax.bench import topologies
from txl_jax.errors import UserError


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("h200x3", r"h200x3\b.*\b3 GPUs.*\b8\b"),
        ("h100x12", r"12 GPUs.*multiple of 8"),
        ("v9:2x2", r"'v9:2x2'.*\bv4:2x2x4\b.*\bh100\b"),
        ("v5e:3x5", r"v5e:3x5.*\b4x8\b"),
        ("v5e:2x", r"'v5e:2x'.*\bv5e\b.*\bv4:2x2x4\b"),
        ("v5e:0x4", r"v5e:0x4.*\b4x8\b"),
        ("0*v5e:4x8", r"\b2\*v5e:4x8\b"),
    ],
)
def test_what_is_no_topology_is_refused_with_what_there_is(topology, words):
    with pytest.raises(UserError, match=words):
        topologies.parse(topology)


def test_a_name_without_a_size_is_all_sizes_from_small_to_large():
    assert topologies.slices("h200") == ["h200x1", "h200x2", "h200x4", "h200x8"]
    assert topologies.slices("v4")[0] == "v4:2x2x1"
    for name in ("h200x16", "v5e:4x8", "2*v5e:4x8"):
        assert topologies.slices(name) == [name]


@pytest.mark.parametrize(
    ("name", "num_slices", "num_devices"),
    [
        *(("h100", 1, 1), ("h100x8", 1, 8), ("h100x24", 1, 24), ("v5e:2x4", 1, 8), ("2*v5e:4x8", 2, 64)),
        *((name, 1, count) for name, count in zip(topologies.slices("v4"), (4, 8, 16, 32, 64, 128), strict=True)),
        ("v3:2x2", 1, 8),  # Two devices per chip.
    ],
)
def test_devices_are_counted(name, num_slices, num_devices):
    found = topologies.parse(name)
    assert (found.num_slices, found.num_devices) == (num_slices, num_devices)


@pytest.mark.parametrize("chip", topologies.CHIPS.values(), ids=topologies.CHIPS)
def test_a_device_has_the_figures_of_its_data_sheet(chip):
    peak, gpu = flops.device_peak(chip.kind), chip.gpu
    assert 4e13 < peak < 2e15 and 1e10 <= chip.memory_bytes < 2e11
    if gpu:
        assert 1e10 < gpu.bandwidth < 1e13 and f'"{gpu.description}"' in topologies.target_config(chip)
        # Tensor cores do 16 times the multiply-adds of the other units; of H100 and H200 at a lower clock.
        assert 14 <= peak / (2 * gpu.cores * gpu.units_per_core * gpu.clock_ghz * 1e9) <= 16.5
