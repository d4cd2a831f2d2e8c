"""Tests of the names of devices that are not at hand, and of GPUs described to XLA, where its plugin is installed."""

import json
import os
import subprocess
import sys

import pytest

from support import ROOT
from txl_jax.bench import gpu_topologies, topologies
from txl_jax.bench.roofline import CHIPS
from txl_jax.errors import UserError

needs_plugin = pytest.mark.skipif(
    gpu_topologies.plugin_version() is None, reason=f"needs jax's CUDA plugin: {gpu_topologies.INSTALL}"
)
# Compiles a product for the first GPU and prints (its kind, how many there are, scratch bytes).
PROGRAM = """
import json, sys
from experiments.bench import aot_environment
aot_environment.set_environment()
import jax, jax.numpy as jnp
from txl_jax.bench import topologies
found = topologies.devices(sys.argv[1])
rows = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
compiled = topologies.lower_for(found[0], lambda a, b: jnp.tanh(a @ b.T).sum(), rows, rows).compile()
memory = compiled.memory_analysis()
print(json.dumps([found[0].device_kind, len(found), memory.argument_size_in_bytes, "gemm" in compiled.as_text()]))
"""


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("h200x3", r"h200x3\b.*\b3 GPUs.*\b8\b"),
        ("h100x12", r"12 GPUs.*multiple of 8"),
        ("a100x0", r"0 GPUs"),
        ("h200:2x2", r"'h200:2x2'.*\bh200x8\b"),
        ("b200", r"'b200'.*\bv5e\b.*\bh200\b"),
        ("v9:2x2", r"'v9:2x2'.*\bv4:2x2x4\b.*\bh100\b"),
        ("v5e:3x5", r"v5e:3x5.*\b4x8\b"),
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


@pytest.mark.parametrize("name", gpu_topologies.GPUS)
def test_a_gpu_is_described_with_the_rates_of_its_data_sheet(name):
    chip, gpu = topologies.chip(f"{name}x8"), gpu_topologies.GPUS[name]
    assert chip is CHIPS[name] and chip.hbm_bytes == gpu.memory_bytes
    assert gpu.bandwidth == pytest.approx(chip.hbm_bandwidth, rel=0.01)
    # Tensor cores do 16 times the multiply-adds of the other units; of H100 and H200 at a lower clock.
    others = 2 * gpu.cores * gpu.units_per_core * gpu.clock_ghz * 1e9
    assert 14 <= chip.peak_flops / others <= 16.5
    assert f'"{gpu.description}"' in gpu_topologies.target_config(gpu)


@needs_plugin
@pytest.mark.parametrize(
    ("topology", "kind", "count"), [("h200", "H200", 1), ("h100x8", "H100", 8), ("a100x16", "A100", 16)]
)
def test_a_program_is_compiled_for_a_gpu_that_is_not_there(topology, kind, count):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, topology], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    name, found, argument_bytes, has_product = json.loads(done.stdout.splitlines()[-1])
    assert kind in name and found == count and argument_bytes == 2 * 64 * 32 * 2 and has_product
