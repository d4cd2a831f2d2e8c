"""Whole steps of the published models, compiled for devices that are not there, and their costs.

Bytes, FLOPs and collectives are exact for a version of the compiler. The limits are a little above
what is reached, so that a step that moves more bytes, keeps more arrays, computes something twice
or sends more than before fails here, although nothing runs on a device.
"""

import importlib.metadata
from typing import NamedTuple

import jax
import pytest

import txl_jax
from experiments.bench import timing, topologies
from experiments.bench.compile_tasks import compile_task, cost_of_task
from experiments.bench.program_report import textbook_sent_bytes
from txl_jax import flops
from txl_jax.config import config_tree
from txl_jax.modules.positions import encoding_of
from txl_jax.runs.build import build
from txl_jax.sharding.mesh import make_mesh

TPU_STEPS = pytest.mark.nightly(part="tpu_steps")
CUDA = pytest.mark.nightly(part="cuda")


class Limits(NamedTuple):
    """What a step on each device may cost at most. None is not checked."""

    preset: str
    topology: str
    task: str
    # Changes of the preset, in addition to `model.dtype=bfloat16`.
    changes: dict[str, int]
    # Bytes to and from HBM, in GB. Of generation: of a token.
    hbm_gb: float
    # The compiler's own peak, in GB.
    peak_gb: float | None = None
    # Bytes sent to other devices, in GB, and divided by the textbook's.
    sent_gb: float | None = None
    sent_ratio: float | None = None
    # Copies of arrays with a row for each token of the vocabulary, into another layout.
    table_copies: int | None = None
    # Relative difference between FLOPs outside kernels and `flops.of_step` without attention.
    flops_difference: float | None = None
    # FLOPs that the program computes again on purpose.
    recomputed_flops: float = 0.0


ENWIK8_12L = Limits(
    preset="enwik8_12l",
    topology="v5e:1x1",
    task="training",
    changes={"train.batch_size": 22},
    hbm_gb=19.1,
    peak_gb=3.85,
    flops_difference=0.005,
)
ENWIK8_24L = Limits(
    preset="enwik8_24l",
    topology="v5e:4x4",
    task="training",
    changes={"train.batch_size": 64, "mesh.fsdp": 16},
    hbm_gb=15.0,
    peak_gb=2.55,
    sent_gb=1.76,
    sent_ratio=1.13,
    flops_difference=0.005,
)
WT103_BASE = Limits(
    preset="wt103_base",
    topology="v5e:1x1",
    task="training",
    changes={"train.batch_size": 60},
    hbm_gb=38,
    peak_gb=6.2,
    table_copies=2,
    flops_difference=0.005,
    # The logits of the head, 9,000 positions and 20,003 entries of width 410, whose softmax is
    # computed in blocks.
    recomputed_flops=2 * 9000 * 20_003 * 410,
)
GENERATION = Limits(
    preset="enwik8_24l",
    topology="v5e:1x1",
    task="generation",
    changes={},
    hbm_gb=0.85,
)
STEPS = [ENWIK8_12L, ENWIK8_24L, WT103_BASE, GENERATION]

ENWIK8_24L_ON_A_GPU = Limits(
    preset="enwik8_24l",
    topology="h200",
    task="training",
    changes={"train.batch_size": 8},
    hbm_gb=190,
    peak_gb=13,
)
GPU_STEPS = [ENWIK8_24L_ON_A_GPU]


@pytest.fixture(autouse=True)
def no_compilation_cache():
    """Programs that were compiled for a chip that is not there cannot be loaded again."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


def build_step(limits):
    """Builds a preset on a mesh of devices to compile for, which needs their compiler."""
    topologies.set_environment()
    config = txl_jax.preset(limits.preset)
    config = config_tree.replace(config, {"model.dtype": "bfloat16"} | limits.changes)
    mesh = make_mesh(config.mesh, topologies.devices(limits.topology))
    return build(config, vocab_size=timing.vocab_size_of(config.data), mesh=mesh)


def attention_flops(config):
    """The part of `flops.of_step` that kernels compute: scores and weighted sums, three passes.

    A query attends to the memory and, on average, to half of its segment. The backward pass takes
    as much as two forward passes.
    """
    train = config.train
    model = config.model
    keys = train.mem_len + (train.segment_len + 1) / 2
    per_pair = 2 * encoding_of(model).products_per_key * model.n_head * model.d_head
    tokens = train.batch_size * train.segment_len
    return 3 * model.n_layer * per_pair * keys * tokens


def measure(built, limits):
    """Returns what a step costs, by the names of `Limits`."""
    program = compile_task(built, limits.task)
    cost = cost_of_task(built, limits.task, program)
    config = built.config
    measured = {
        "hbm_gb": cost.hbm_bytes / 1e9,
        "peak_gb": program.memory_analysis().peak_memory_in_bytes / 1e9,
        "sent_gb": cost.sent_bytes / 1e9,
    }
    if limits.sent_ratio is not None:
        measured["sent_ratio"] = cost.sent_bytes / textbook_sent_bytes(built)
    if limits.table_copies is not None:
        measured["table_copies"] = table_copies(cost, built.model.vocab_size)
    if limits.flops_difference is not None:
        step = flops.of_step(config, vocab_size=built.model.vocab_size, n_device=1)
        expected = step.flops - attention_flops(config) + limits.recomputed_flops
        expected /= built.mesh.size
        # Tails are not in `of_step`: how often a token needs one depends on the text.
        compiled = 0
        for operation in cost.operations:
            if not operation.is_kernel and not operation.is_assumed:
                compiled += operation.times * operation.flops
        measured["flops_difference"] = abs(compiled / expected - 1)
    return cost, measured


def table_copies(cost, vocab_size):
    """Counts the copies in a step of arrays with at least a row for each token."""
    count = 0
    for operation in cost.operations:
        if operation.line.opcode != "copy":
            continue
        dims = operation.line.arrays[0].dims
        if len(dims) > 1 and max(dims) >= vocab_size:
            count += operation.times
    return count


def check(limits):
    """Checks that a step costs no more than its limits, and names all that it exceeds."""
    built = build_step(limits)
    cost, measured = measure(built, limits)
    too_much = {}
    for name, value in measured.items():
        limit = getattr(limits, name)
        if limit is not None and value > limit:
            too_much[name] = (round(value, 4), limit)
    # Weights are gathered in the dtype of the computation.
    wide = []
    for collective, _ in cost.collectives:
        if collective.kind == "all-gather" and collective.array.dtype == "f32":
            wide.append(str(collective.array))
    if wide:
        too_much["all-gathers in float32"] = (wide, [])
    assert not too_much, measured


def name_of(limits):
    return f"{limits.preset} {limits.topology} {limits.task}"


@TPU_STEPS
@pytest.mark.parametrize("limits", STEPS, ids=name_of)
def test_a_step_on_tpus_costs_at_most(limits):
    # Without the compiler this raises, so that the nightly part cannot pass without a check.
    importlib.metadata.version("libtpu")
    check(limits)


@CUDA
@pytest.mark.parametrize("limits", GPU_STEPS, ids=name_of)
def test_a_step_on_a_gpu_costs_at_most(limits):
    check(limits)
