"""Tests of the estimates: from shapes alone, and from the compilers of TPUs and GPUs."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from support import ROOT, programs
from txl_jax.bench import gpu_topologies

TINY = [
    *("--model.n_layer=3", "--model.d_model=64", "--model.n_head=4", "--model.d_head=16", "--model.d_inner=128"),
    *("--model.dtype=bfloat16", "--train.batch_size=8", "--train.segment_len=32", "--train.mem_len=32"),
    *("--eval.segment_len=16", "--eval.mem_len=32", "--eval.clamp_len=none"),
]
COMPILERS = ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin")
TPU, CUDA = pytest.mark.nightly(part="tpu"), pytest.mark.nightly(part="cuda")


@pytest.fixture
def without_compilers(monkeypatch):
    """Runs the program as if no compiler were installed; returns exit code, output and errors."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in COMPILERS else find_spec(name, *rest)
    )
    return lambda *flags: programs.run("experiments.bench.estimate", *TINY, *flags)


def estimate(*flags):
    """(exit code, output, errors) of the program, which sets what compilers read when jax is imported."""
    command = programs.command("experiments.bench.estimate", *TINY, *flags)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout, result.stderr


def test_without_a_compiler_the_sizes_that_follow_from_shapes_are_printed(without_compilers, tmp_path):
    """One of four devices that share parameters, and of two that share heads."""
    flags = ["--topology=v4:2x2x2", "--mesh.fsdp=4", "--mesh.tensor=2", f"--json={tmp_path / 'e.json'}"]
    code, out, err = without_compilers(*flags)
    assert code == 0, err
    assert re.search(r"\b8\b.*\bv4\b.*\bdata 1\b.*\bfsdp 4\b.*\btensor 2\b", out) and "libtpu" in out
    [found] = json.loads((tmp_path / "e.json").read_text())["estimates"]
    sizes = found["device_bytes"]
    assert (
        sizes["segment memory"] == 3 * (8 // 4) * 32 * 64 * 2 + 4 * 8 // 4
    )  # [N, B, M, D] in bfloat16, and valid [B].
    assert found["parameters"] * 4 / 8 < sizes["parameters"] < found["parameters"] * 4 / 8 * 1.2
    assert 2 * sizes["parameters"] <= sizes["optimizer"] <= 2 * sizes["parameters"] + 64
    assert found["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    assert found["attention"] == {}, "which of them depends on the device, which is not known"


@TPU
def test_programs_are_compiled_for_a_slice(tmp_path):
    flags = ["--topology=v5e:2x4", "--mesh.fsdp=4", "--mesh.tensor=2", f"--json={tmp_path / 'e.json'}"]
    code, out, err = estimate(*flags)
    assert code == 0, err
    found = {each["task"]: each for each in json.loads((tmp_path / "e.json").read_text())["estimates"]}
    assert set(found) == {"training", "evaluation", "generation"}
    implementations = found["training"]["attention"]
    assert set(implementations) == {"training", "evaluation"}
    assert re.search(rf"(?m)^attention, training +{re.escape(implementations['training'])}$", out)
    for name, each in found.items():
        assert re.search(rf"(?m)^{name}:.*\d", out) and each["peak_bytes"] >= each["scratch_bytes"] > 0
    sent = found["training"]["collectives"]
    assert {one["kind"] for one in sent} >= {"all-reduce"}
    assert any("/stack/" in one["source"] for one in sent), "nothing is sent in the layers"
    layer = found["training"]["parameters"] * 4 // 3
    assert max(one["largest"] for one in sent if one["kind"] == "all-gather") <= layer


@TPU
@pytest.mark.parametrize("sizes", [["--mesh.fsdp=4"], ["--mesh.fsdp=2", "--mesh.tensor=2"]], ids=" ".join)
def test_only_sums_of_gradients_cross_slices(tmp_path, sizes):
    """Two slices of four chips: weights are gathered within a slice, and a chip sends its shard's gradient."""
    flags = [*sizes, "--topology=2*v5e:2x2", "--tasks=training", f"--json={tmp_path / 'e.json'}"]
    code, out, err = estimate(*flags)
    assert code == 0, err
    [found] = json.loads((tmp_path / "e.json").read_text())["estimates"]
    assert found["crossings"] and {one["kind"] for one in found["crossings"]} == {"all-reduce"}
    assert {one["devices"] for one in found["crossings"]} == {2} and "| between slices |" in out
    assert all(one["devices"] <= 4 for one in found["collectives"])
    crossed = sum(one["n_bytes"] * one["times"] for one in found["crossings"])
    assert found["parameters"] * 2 / 4 < crossed < found["parameters"] * 4, (
        "gradients are sharded, in two or four bytes"
    )


@TPU
def test_a_table_has_the_smallest_slice_that_fits():
    code, out, err = estimate("--configs=small", "--topology=v5e,v4:2x2x1")
    assert code == 0, err
    rows = [line for line in out.splitlines() if line.startswith("| small")]
    assert [row.split(" | ")[2] for row in rows] == ["v5e:1x1", "v4:2x2x1"]
    assert [row.split(" | ")[3] for row in rows] == ["1 x 1 x 1", "1 x 4 x 1"]


@CUDA
def test_programs_are_compiled_for_gpus(tmp_path):
    flags = ["--mesh.fsdp=2", "--mesh.tensor=2", "--tasks=training", f"--json={tmp_path / 'e.json'}"]
    code, out, err = estimate(*flags, "--topology=h200x4")
    assert code == 0, err
    record = json.loads((tmp_path / "e.json").read_text())
    [found] = record["estimates"]
    assert record["CUDA plugin"] == gpu_topologies.plugin_version() and re.search(r"\b4 x H200\b", out)
    assert found["peak_bytes"] > found["scratch_bytes"] > sum(found["device_bytes"].values()) / 10
    assert {one["kind"] for one in found["collectives"]} >= {"all-reduce", "all-gather"}


@pytest.mark.parametrize(
    ("topology", "rows", "memory"),
    [pytest.param("v5e:1x1", 10_000, "15.75GiB", marks=TPU), pytest.param("a100", 40_000, "79.26GiB", marks=CUDA)],
)
def test_a_program_that_does_not_fit_is_reported_with_both_sizes(topology, rows, memory):
    huge = [f"--train.batch_size={rows}", "--train.segment_len=256", "--train.mem_len=256"]
    code, out, err = estimate(*huge, f"--topology={topology}", "--tasks=training")
    assert code == 0, err
    assert re.search(rf"(?m)^training:.*\d.*\b{re.escape(memory)}", out)


@TPU
def test_every_slice_is_known_to_libtpu():
    program = """
from experiments.bench import aot_environment
aot_environment.set_environment()
from txl_jax.bench import tpu_topologies
for generation, shapes in tpu_topologies.SLICES.items():
    for shape in shapes:
        topology = f"{generation}:{shape}"
        assert len(tpu_topologies.devices(topology)) == tpu_topologies.num_devices(topology), topology
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--topology=v5e:2x2", "--mesh.fsdp=3"], ["3 x 1", "4"]),
        (["--topology=v5e:2x2", "--configs=smal"], ["smal", "small", "enwik8_12l"]),
        (["--topology=h200x8", "--configs=small"], ["jax-cuda13-plugin"]),
        (["--topology=v5e", "--configs=small", "--mesh.fsdp=2"], ["--mesh.fsdp", "--configs"]),
    ],
)
def test_mistakes_are_named(without_compilers, flags, expected):
    code, _, err = without_compilers(*flags)
    assert code == 1
    for words in expected:
        assert re.search(rf"(?<!\w){re.escape(words)}(?!\w)", err), (words, err)
