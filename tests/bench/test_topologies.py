"""Tests of the names of devices that are not at hand, of TPU slices, and of GPUs described to XLA."""

import pytest

from txl_jax.bench import gpu_topologies, topologies, tpu_topologies
from txl_jax.bench.roofline import CHIPS
from txl_jax.errors import UserError


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("h200x3", r"h200x3\b.*\b3 GPUs.*\b8\b"),
        ("h100x12", r"12 GPUs.*multiple of 8"),
        ("v9:2x2", r"'v9:2x2'.*\bv4:2x2x4\b.*\bh100\b"),
        ("v5e:3x5", r"v5e:3x5.*\b4x8\b"),
        ("v5e:2x", r"'v5e:2x'.*\bv5e\b.*\bv4:2x2x4\b"),
        ("0*v5e:4x8", r"\b2\*v5e:4x8\b"),
    ],
)
def test_what_is_no_topology_is_refused_with_what_there_is(topology, words):
    with pytest.raises(UserError, match=words):
        topologies.num_devices(topology)


def test_a_name_without_a_size_is_all_sizes_from_small_to_large():
    assert topologies.slices("h200") == ["h200x1", "h200x2", "h200x4", "h200x8"]
    assert topologies.slices("h200x16") == ["h200x16"]
    assert [topologies.smallest(name) for name in ("a100", "v5e", "v4:2x2x4")] == ["a100x1", "v5e:1x1", "v4:2x2x4"]
    found = [topologies.num_devices(name) for name in ("h100", "h100x8", "h100x24", "v5e:2x4")]
    assert found == [1, 8, 24, 8]


def test_a_generation_alone_is_all_its_slices_from_small_to_large():
    assert tpu_topologies.slices("v5e:4x8") == ["v5e:4x8"]
    assert tpu_topologies.split("2*v5e:4x8") == ("v5e", "4x8") and tpu_topologies.num_devices("2*v5e:4x8") == 64
    assert [tpu_topologies.count_slices(name) for name in ("2*v5e:4x8", "v5e:4x8")] == [2, 1]
    found = tpu_topologies.slices("v4")
    assert found[0] == "v4:2x2x1"
    assert [tpu_topologies.num_devices(name) for name in found] == [4, 8, 16, 32, 64, 128]
    assert tpu_topologies.num_devices("v3:2x2") == 8  # Two devices per chip.


@pytest.mark.parametrize("name", gpu_topologies.GPUS)
def test_a_gpu_is_described_with_the_rates_of_its_data_sheet(name):
    chip, gpu = topologies.chip(f"{name}x8"), gpu_topologies.GPUS[name]
    assert chip is CHIPS[name] and chip.hbm_bytes == gpu.memory_bytes
    assert gpu.bandwidth == pytest.approx(chip.hbm_bandwidth, rel=0.01)
    # Tensor cores do 16 times the multiply-adds of the other units; of H100 and H200 at a lower clock.
    others = 2 * gpu.cores * gpu.units_per_core * gpu.clock_ghz * 1e9
    assert 14 <= chip.peak_flops / others <= 16.5
    assert f'"{gpu.description}"' in gpu_topologies.target_config(gpu)
