"""Tests of the estimates: from shapes alone, and from the compilers of TPUs and GPUs."""

import importlib.util
import math
import re
import subprocess
import sys
import types

import pytest

from experiments.bench import estimate, program_report, topologies
from experiments.bench.chips import CHIPS
from experiments.bench.compiled.cost import cost_of
from support import ROOT, programs
from txl_jax import flops
from txl_jax.config import ExperimentConfig, ModelConfig, Remat, TrainConfig
from txl_jax.errors import UserError

TINY = [
    "--model.n_layer=3",
    "--model.d_model=64",
    "--model.n_head=4",
    "--model.d_head=16",
    "--model.d_inner=128",
    "--model.dtype=bfloat16",
    "--train.batch_size=8",
    "--train.segment_len=32",
    "--train.mem_len=32",
    "--eval.segment_len=16",
    "--eval.mem_len=32",
    "--eval.clamp_len=none",
]
COMPILERS = ("libtpu", "jax_cuda13_plugin", "jax_cuda12_plugin")
# Tests that need a compiler, which only the nightly part has.
TPU = pytest.mark.nightly(part="tpu")
CUDA = pytest.mark.nightly(part="cuda")


@pytest.fixture
def without_compilers(monkeypatch):
    """Runs the program as if no compiler were installed; returns exit code, output and errors."""
    find_spec = importlib.util.find_spec

    def find_other_spec(name, *rest):
        if name in COMPILERS:
            return None
        return find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_other_spec)
    return lambda *flags: programs.run("experiments.bench.estimate", *TINY, *flags)


def compiled(*flags):
    """Returns the output of the program in its own process.

    It sets variables that compilers read when jax is imported.
    """
    words = programs.command("experiments.bench.estimate", *TINY, *flags)
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def test_without_a_compiler_the_sizes_that_follow_from_shapes_are_printed(
    without_compilers, monkeypatch
):
    """Four devices share parameters, and two share heads."""
    # Sizes are printed to the byte instead of in megabytes.
    monkeypatch.setattr("txl_jax.runtime.environment.megabytes", lambda size: f"{size} B")

    code, out, err = without_compilers("--topology=v4:2x2x2", "--mesh.fsdp=4", "--mesh.tensor=2")

    assert code == 0, err
    assert "8 x TPU v4 (data 1, fsdp 4, tensor 2)" in out
    assert "libtpu" in out
    assert not re.search("(?m)^attention", out), (
        "the implementation depends on the device, which is not known"
    )
    parameters = int(re.search(r"([\d,]+) parameters", out)[1].replace(",", ""))
    sizes = {}
    for name, size in re.findall(r"(?m)^(\w[\w ]*?) +(\d+) B per device$", out):
        sizes[name] = int(size)
    # [N, B, M, D] in bfloat16, and valid [B] in int32, for the two of 8 rows that a device has.
    assert sizes["segment memory"] == 3 * (8 // 4) * 32 * 64 * 2 + 4 * 8 // 4
    # Float32 over eight devices, except for arrays that are whole on each. Adam has two moments of
    # them, and counts.
    assert parameters * 4 / 8 < sizes["parameters"] < parameters * 4 / 8 * 1.2
    assert 2 * sizes["parameters"] <= sizes["optimizer"] <= 2 * sizes["parameters"] + 64


@pytest.mark.parametrize(
    ("flags", "vocab_size"),
    [
        ([], 256),
        (["--data.tokenizer.kind=subword"], 8000),
        (["--data.tokenizer.kind=subword", "--data.tokenizer.vocab_size=500"], 500),
    ],
)
def test_own_text_has_the_vocabulary_of_its_settings(without_compilers, flags, vocab_size):
    """A row of the table, and a number of the softmax's bias, for each token more than none."""
    own_text = ["--topology=rtx4090", "--data.corpus=text", "--data.file=book.txt"]
    parameters = []
    for more in (flags, ["--data.tokenizer.kind=subword", "--data.tokenizer.vocab_size=1"]):
        code, out, err = without_compilers(*own_text, *more)
        assert code == 0, err
        parameters.append(int(re.search(r"([\d,]+) parameters", out)[1].replace(",", "")))
    assert parameters[0] - parameters[1] == (vocab_size - 1) * (64 + 1)


@pytest.mark.parametrize(
    ("topology", "device"),
    [
        pytest.param("v5e:2x2", "TPU v5 lite", marks=TPU),
        pytest.param("h200x4", "H200", marks=CUDA),
        pytest.param("rtx4090x4", "RTX 4090", marks=CUDA),
    ],
)
def test_programs_are_compiled_and_read(topology, device, tmp_path):
    out = compiled(
        f"--topology={topology}", "--mesh.fsdp=2", "--mesh.tensor=2", f"--programs={tmp_path}"
    )
    compiler, version = topologies.compiler_of(topology)
    assert f"4 x {device} (" in out
    assert f"{compiler} {version}" in out.splitlines()[0]
    assert re.search(r"(?m)^an update +[\d.e-]+ TFLOP", out)
    for name in ("training", "evaluation"):
        assert re.search(rf"(?m)^attention, {name} +(reference|tiled|stored|fused)\b", out)
    for name in estimate.TASKS:
        assert re.search(rf"(?m)^{name}: fits, needs \d+ MB of \d", out)
    assert len(re.findall(r"(?m)^\| bytes in memory \| [\d.]+ [kMG]B \|", out)) == 3
    assert len(re.findall(r"(?m)^\| sent to other devices \|", out)) == 3
    assert re.search(r"[\d.]+ x the textbook's", out)
    # --programs stores the text of each compiled program.
    texts = sorted(tmp_path.iterdir())
    assert [text.stem.rpartition("-")[2] for text in texts] == sorted(estimate.TASKS)
    assert all("\nENTRY " in text.read_text() for text in texts)


@TPU
@pytest.mark.parametrize("sizes", ["fsdp=4", "fsdp=2, tensor=2"])
def test_only_sums_of_gradients_cross_slices(sizes):
    """Two slices of four chips: weights are gathered within a slice."""
    program = f"""
import re
from experiments.bench import compile_tasks, topologies
from txl_jax.config import DType, ExperimentConfig, MeshConfig, ModelConfig, TrainConfig
from txl_jax.runs.build import build
from txl_jax.sharding.mesh import make_mesh
topologies.set_environment()
model = ModelConfig(n_layer=3, d_model=64, n_head=4, d_head=16, d_inner=128, dtype=DType.BFLOAT16)
config = ExperimentConfig(model=model, train=TrainConfig(batch_size=8, segment_len=32, mem_len=32))
mesh = make_mesh(MeshConfig({sizes}), topologies.devices("2*v5e:2x2"))
built = build(config, vocab_size=256, mesh=mesh)
text = compile_tasks.compile_task(built, "training").as_text()
found = set(re.findall(r'_xla_megascale_transfer_type="(\\w+)"', text))
assert found == {{"ALL_REDUCE"}} and " all-gather" in text, found
"""
    # It sets what compilers read.
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@TPU
def test_each_configuration_has_the_smallest_slice_that_fits():
    """Of v5e all sizes are tried, from one chip on, and of v4 the one that is named."""
    out = compiled("--configs=small", "--topology=v5e,v4:2x2x1", "--tasks=training")
    expected = [("v5e:1x1", "data 1, fsdp 1, tensor 1"), ("v4:2x2x1", "data 1, fsdp 4, tensor 1")]
    assert re.findall(r"(?m)^small on (\S+):.*\((.*)\)$", out) == expected


# `memory` is what the compiler leaves of the device's memory for a program.
@pytest.mark.parametrize(
    ("topology", "rows", "memory"),
    [
        pytest.param("v5e:1x1", 10_000, "15.75GiB", marks=TPU),
        pytest.param("a100", 40_000, "79.26GiB", marks=CUDA),
    ],
)
def test_a_program_that_does_not_fit_is_reported_with_both_sizes(topology, rows, memory):
    huge = [f"--train.batch_size={rows}", "--train.segment_len=256", "--train.mem_len=256"]
    out = compiled(*huge, f"--topology={topology}", "--tasks=training")
    assert re.search(rf"(?m)^training:.*\d.*\b{re.escape(memory)}", out)


@TPU
@pytest.mark.parametrize("generation", [name for name, chip in CHIPS.items() if not chip.gpu])
def test_every_slice_is_known_to_libtpu(generation):
    topologies.set_environment()
    for name in topologies.slices(generation):
        assert len(topologies.devices(name)) == topologies.parse(name).num_devices, name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--topology=v5e:2x2", "--mesh.fsdp=3"], r"\b4\b.*\b3 x 1\b"),
        (["--topology=v5e:2x2", "--configs=smal"], r"\benwik8_12l\b.*'smal'.*\bsmall\b"),
        # The package that has the compiler, which is missing.
        (["--topology=h200x8", "--configs=small"], "jax-cuda13-plugin"),
        (["--topology=v5e", "--configs=small", "--mesh.fsdp=2"], r"--mesh\.fsdp.*--configs"),
    ],
)
def test_mistakes_are_named(without_compilers, flags, expected):
    code, _, err = without_compilers(*flags)
    assert code == 1 and re.search(expected, err), err


# `count` is the number of devices, and `expected` the mesh's axes (data, fsdp, tensor).
@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [
        pytest.param(8, 4, (1, 4, 1), id="all on fsdp"),
        pytest.param(32, 32, (2, 16, 1), id="as many on fsdp as d_model has columns"),
        pytest.param(2, 4, (1, 2, 2), id="fewer rows than devices, which share heads"),
    ],
)
def test_meshes_use_all_devices_with_as_many_as_possible_on_fsdp(rows, count, expected):
    model = ModelConfig(d_model=16, n_head=4, d_head=4, d_inner=32)
    config = ExperimentConfig(model=model, train=TrainConfig(batch_size=rows))

    first, second = estimate.meshes(config, count)

    # The same mesh with the configuration's own remat, and with full.
    for changes in (first, second):
        mesh = (changes["mesh.data"], changes["mesh.fsdp"], changes["mesh.tensor"])
        assert mesh == expected
    assert first["model.remat"] == config.model.remat
    assert second["model.remat"] == Remat.FULL
    # Three devices divide neither these rows nor four heads.
    assert not list(estimate.meshes(config, 3))


# `known` is what the error offers: a known chip or, if only the size is wrong, a size of this chip.
# A host has 2 x 2 chips, so slices larger than a host have even numbers. A v4 has three axes.
@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("h200x3", "h100"),
        ("h100x12", "h100"),
        ("rtx4090x3", "rtx4090"),
        ("rtx3090", "rtx4090"),
        ("v9:2x2", "h100"),
        ("v5e:2x", "h100"),
        ("0*v5e:4x8", "h100"),
        ("v5e:3x5", "2x4"),
        ("v5e:0x4", "2x4"),
        ("v4:2x2", "2x2x1"),
    ],
)
def test_an_unknown_topology_is_an_error_that_names_known_ones(name, known):
    with pytest.raises(
        UserError, match=rf"2, 4 or a multiple of 8 GPUs,.*'{re.escape(name)}'\. .*\b{known}\b"
    ):
        topologies.parse(name)


def built_on(**sizes):
    """A model of 24 layers, 1,000 features and a million parameters, on a mesh."""
    config = ExperimentConfig(
        model=ModelConfig(n_layer=24, d_model=1000, dtype="bfloat16"),
        train=TrainConfig(batch_size=16, segment_len=100),
    )
    axes = {"data": 1, "fsdp": 1, "tensor": 1} | sizes
    mesh = types.SimpleNamespace(shape=axes, size=math.prod(axes.values()))
    return types.SimpleNamespace(config=config, mesh=mesh, num_parameters=1_000_000)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, 0),
        # All weights, 2 MB, gathered twice and scattered once.
        ({"fsdp": 4}, 3 * 2e6 * 3 / 4),
        # An all-reduce of all gradients, which sends each part twice.
        ({"data": 4}, 2 * 2e6 * 3 / 4),
        # Of the scattered gradients, a quarter is left to reduce.
        ({"data": 2, "fsdp": 4}, 3 * 2e6 * 3 / 4 + 2 * 2e6 / 4 * 1 / 2),
        # Two all-reduces of 16 x 100 x 1,000 numbers, 3.2 MB, in each layer and direction.
        ({"tensor": 2}, 24 * 4 * 2 * 3.2e6 * 1 / 2),
    ],
)
def test_the_textbook_gathers_weights_twice_and_reduces_gradients_once(sizes, expected):
    assert program_report.textbook_sent_bytes(built_on(**sizes)) == pytest.approx(expected)


def test_costs_are_printed_with_their_least_times(capsys):
    program = """HloModule m, num_partitions=4

ENTRY %main (a: bf16[1000,1000]) -> bf16[1000,1000] {
  %a = bf16[1000,1000] parameter(0)
  %b = bf16[1000,1000] all-gather(%a), replica_groups={{0,1,2,3}}
  ROOT %c = bf16[1000,1000] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0},
      metadata={op_name="jit(train_step)/while/body/layer/dot"
      source_file="/x/model.py" source_line=7}
}
""".replace("\n      ", " ")
    cost = cost_of(program, steps=1)
    program_report.print_cost(cost, built_on(fsdp=4), "training", CHIPS["v5e"])
    rows = capsys.readouterr().out.splitlines()
    # 2 GFLOP and 6 MB in milliseconds, at a v5e's FLOPs and bytes in a second.
    assert f"| matmuls | 2.00 GFLOP | {2e12 / 197e12:.2f} ms |" in rows
    assert f"| bytes in memory | 6.00 MB | {6e9 / 819e9:.2f} ms |" in rows
    # A quarter of the matrix comes from each device; the textbook's 4.5 MB is for all weights.
    assert "| sent to other devices | 1.50 MB, 0.33 x the textbook's 4.50 MB |  |" in rows
    assert "| 6.00 MB | /x/model.py:7 | layer/dot |" in rows


def test_every_device_has_a_peak_and_a_memory():
    """Each is of the order that accelerators have, in FLOPs, operations and bytes, per second."""
    for chip in CHIPS.values():
        # A TPU v3 has 900 GB/s in two devices.
        assert 4e11 < chip.bandwidth < 1e13, chip.kind
        assert 1e12 < chip.integer_ops < chip.peaks.flops, chip.kind
        assert 4e13 < flops.device_peak(chip.kind) < 2e15, chip.kind
        assert 1e10 <= chip.memory_bytes < 2e11, chip.kind
