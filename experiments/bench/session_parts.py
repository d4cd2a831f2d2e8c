"""The parts that `experiments.bench.session` measures, each in a separate process."""

import collections
import csv
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import chips, speed, timing
from experiments.bench.compiled.cost import cost_of
from experiments.bench.trace_table import shares_by_source, shares_of_trace
from txl_jax import flops
from txl_jax.config import ExperimentConfig, MeshConfig, config_tree
from txl_jax.config.experiment import preset
from txl_jax.runs.attention_choice import record_of
from txl_jax.runs.build import Built, build
from txl_jax.runs.generate import check_can_generate
from txl_jax.runtime import environment
from txl_jax.sharding.mesh import make_mesh

LEGEND = """Measured: the median of the calls.
Least: what the compiled program needs at the data sheet's rates for all its bytes, or for all its
operations, whichever is longer. Sum: the same for each operation alone, added up, as if nothing
overlapped. MFU: the model's FLOPs in the measured time, of the data sheet's peak in bfloat16.
Peak memory: the compiler's, and the device's own record where it has one."""
_SMALL_MEMORY_BYTES = 40e9  # Devices with less memory get half of the batch size.
_TRACED_CALLS = 3
_ROWS_OF_TRACE = 20
_COPY_BYTES = 4_000_000_000
_MATMUL_SIZE = 8192


@dataclasses.dataclass(frozen=True)
class ResultTable:
    """A table of the page."""

    columns: list[str]
    rows: list[list[str]]

    def titled(self, title: str) -> "ResultTable":
        """Returns the table with an additional first column that repeats the title."""
        return ResultTable(["", *self.columns], [[title, *row] for row in self.rows])


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measured configurations."""

    miniature: bool

    def config(self, name: str, changes: Mapping[str, Any]) -> ExperimentConfig:
        """Returns a published configuration for this device, with changes.

        It computes in bfloat16, with one training step per call and the published batch size,
        except enwik8_24l, whose 64 rows are meant for multiple devices.
        """
        all_changes = {"model.dtype": "bfloat16", "train.segments_per_call": 1, **changes}
        if name == "enwik8_24l":
            has_small_memory = environment.memory_bytes() < _SMALL_MEMORY_BYTES
            all_changes["train.batch_size"] = 4 if has_small_memory else 8
        config = config_tree.replace(preset(name), all_changes)
        if not self.miniature:
            return config
        # Two layers of an eighth of the width and of the lengths, and two rows.
        model = config.model
        shrunk = {
            "model.n_layer": 2,
            "model.n_head": 2,
            "model.d_model": 64,
            "model.d_head": 32,
            "model.d_inner": 2 * model.d_inner // 16,
            "model.d_embed": None,
            "train.batch_size": 2,
        }
        for group, lengths in (("train", config.train), ("eval", config.eval)):
            shrunk[f"{group}.segment_len"] = max(lengths.segment_len // 8, 1)
            shrunk[f"{group}.mem_len"] = lengths.mem_len // 8
        return config_tree.replace(config, shrunk)

    @property
    def divisor(self) -> int:
        """Divisor of the lengths of the attention benchmark."""
        return 16 if self.miniature else 1

    @property
    def calls(self) -> int:
        """The number of timed calls of a step."""
        return 2 if self.miniature else 10


@dataclasses.dataclass(frozen=True)
class Part:
    """A part to measure in a separate process."""

    name: str
    about: str
    # Seconds, with compilation, after which the part counts as failed.
    limit: int
    # Measures, and returns the tables for the page. It may write files into the passed directory.
    measure: Callable[[Sizes, str], list[ResultTable]]


def _measure_peaks(sizes: Sizes, out: str) -> list[ResultTable]:
    """Measures a large matmul in bfloat16, and a large copy."""
    del out
    size = _MATMUL_SIZE // sizes.divisor
    matrix = jnp.ones((size, size), jnp.bfloat16)
    multiply = jax.jit(lambda left, right: left @ right)
    seconds = _median_seconds(lambda: multiply(matrix, matrix), sizes.calls)
    rate = 2 * size**3 / seconds
    peaks = chips.peaks_of(environment.device_kind())
    text = f"matmul of {size} x {size}, bfloat16"
    rows = [_peak_row(text, seconds, rate, peaks and peaks.flops, "FLOP/s")]

    # Each number is read and written. The addition keeps the copy from being optimized away.
    array = jnp.zeros(_COPY_BYTES // sizes.divisor**2 // 4, jnp.float32)
    copy = jax.jit(lambda numbers: numbers + 1)
    seconds = _median_seconds(lambda: copy(array), sizes.calls)
    rate = 2 * array.nbytes / seconds
    text = f"copy of {environment.megabytes(array.nbytes)}, read and written"
    rows.append(_peak_row(text, seconds, rate, peaks and peaks.hbm_bytes, "B/s"))
    return [ResultTable(["what", "time", "rate", "of the data sheet's"], rows)]


def _peak_row(what: str, seconds: float, rate: float, peak: float | None, unit: str) -> list[str]:
    share = f"{rate / peak:.1%}" if peak else "unknown"
    return [what, _milliseconds(seconds), _with_unit(rate, unit), share]


def _median_seconds(call: Callable[[], Any], calls: int) -> float:
    """Times successive calls, after a first call that compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _measure_step(
    sizes: Sizes,
    out: str,
    *,
    name: str,
    changes: Mapping[str, Any] | None = None,
    trace: bool = False,
) -> list[ResultTable]:
    """Measures a configuration's training steps, and where their time goes if `trace`."""
    config = sizes.config(name, changes or {})
    built = _build(config)
    # With tracing and lowering, which `compilation.seconds` omits.
    start = time.perf_counter()
    compilation = built.compile_step()
    compile_seconds = time.perf_counter() - start
    executable = compilation.executable

    segments = timing.random_segments(built, config.train)
    call = timing.repeated(compilation.program, built.init_state(), segments)
    seconds = _median_seconds(call, sizes.calls)
    cost = flops.of_step(config, vocab_size=built.model.vocab_size, n_device=built.mesh.size)
    tables = [
        _model_table(built, f"{config.train.batch_size} x {config.train.segment_len}"),
        _time_table(executable, seconds, tokens=cost.tokens, model_flops=cost.flops),
        ResultTable(
            ["compiled in", "peak memory, compiler's", "device's"],
            [[f"{compile_seconds:.0f} s", *_memory_cells(executable)]],
        ),
    ]
    if trace:
        folder = os.path.join(out, f"trace_{name}")
        with jax.profiler.trace(folder, profiler_options=_device_only()):
            for _ in range(_TRACED_CALLS):
                call()
        text = executable.as_text()
        assert text is not None, "a compiled program has a text"
        tables.append(_trace_table(folder, text, _TRACED_CALLS))
    return tables


def _measure_generation(sizes: Sizes, out: str, *, name: str) -> list[ResultTable]:
    """Measures successive sampled tokens of one sample, starting from a full memory."""
    del out
    config = sizes.config(name, {"generate.samples": 1})
    check_can_generate(config)
    built = _build(config)
    tables = [_model_table(built, f"memory {config.eval.mem_len}")]
    for task in speed.tasks("generation", built):
        seconds = _median_seconds(task.call, sizes.calls)
        # A call samples multiple successive tokens. One token is a step.
        table = _time_table(
            task.program,
            seconds / task.tokens,
            steps=task.tokens,
            tokens=1,
            model_flops=task.flops_per_token,
        )
        tables.append(table.titled(task.name))
    return tables


def _measure_attention(sizes: Sizes, out: str) -> list[ResultTable]:
    """Measures attention paths with `experiments.bench.device`, which writes its own page."""
    command = [sys.executable, "-m", "experiments.bench.device", "--configs=enwik8_24l"]
    command += ["--tasks=training", "--tiles=", "--paths=reference,stored,tiled,fused"]
    command += [f"--batch_size={1 if sizes.miniature else 8}", f"--shrink={sizes.divisor}"]
    folder = os.path.join(out, "attention")
    subprocess.run([*command, f"--out={folder}"], check=True)
    with open(os.path.join(folder, "device.csv"), encoding="utf-8", newline="") as file:
        columns, *rows = csv.reader(file)
    return [ResultTable(columns, rows)]


def _build(config: ExperimentConfig) -> Built:
    """Returns the model and its functions on the first device only."""
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    vocab_size = timing.vocab_size_of(config.data)
    return build(config, vocab_size=vocab_size, mesh=mesh)


def _model_table(built: Built, sizes: str) -> ResultTable:
    """Describes a model and the settings that determine its speed."""
    model = built.model.config
    assert built.attention is not None  # All measured models have attention.
    attention = ", ".join(f"{task}: {path}" for task, path in record_of(built.attention).items())
    columns = ["parameters", "sizes", "dtype", "remat", "dropout", "attention"]
    cells = [
        f"{built.num_parameters:,}",
        sizes,
        str(model.dtype),
        str(model.remat),
        f"{model.dropout.rate:g}",
        attention,
    ]
    return ResultTable(columns, [cells])


def _time_table(
    program: Any, seconds: float, *, tokens: int, model_flops: float | None, steps: int = 1
) -> ResultTable:
    """Compares the measured seconds of a step with the minimum for its compiled program."""
    # The loop over tokens runs once per token, which the program does not state.
    cost = cost_of(program.as_text(), steps=steps, rounds=steps)
    peaks = chips.peaks_of(environment.device_kind())
    least = "unknown"
    roofline_sum = "unknown"
    mfu = "unknown"
    if peaks is not None:
        least_seconds = max(cost.hbm_bytes / peaks.hbm_bytes, cost.flops / peaks.flops)
        least = f"{_milliseconds(least_seconds)} ({cost.bound(peaks)})"
        roofline_sum = _milliseconds(cost.roofline_seconds(peaks))
        if model_flops is not None:
            mfu = f"{model_flops / seconds / peaks.flops:.1%}"
    columns = ["measured", "least", "sum", "bytes", "FLOPs", "tokens/s", "MFU"]
    cells = [
        _milliseconds(seconds),
        least,
        roofline_sum,
        environment.megabytes(cost.hbm_bytes),
        environment.brief_number(cost.flops),
        f"{tokens / seconds:,.4g}",
        mfu,
    ]
    return ResultTable(columns, [cells])


def _memory_cells(program: Any) -> list[str]:
    """Returns the peak memory that the compiler states, and the device's own record."""
    planned = environment.megabytes(program.memory_analysis().peak_memory_in_bytes)
    in_use = environment.device_memory_bytes()
    return [planned, "unknown" if in_use is None else environment.megabytes(in_use)]


def _with_unit(number: float, unit: str) -> str:
    """Formats a number with three digits, such as "790 TFLOP/s"."""
    brief = environment.brief_number(number)
    digits = brief.rstrip("kGMT")
    return f"{digits} {brief[len(digits) :]}{unit}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _device_only() -> Any:
    """Returns options for a trace without Python calls, which would be most of it."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    return options


def _trace_table(folder: str, text: str, calls: int) -> ResultTable:
    """Lists the lines of code, or kinds of operations, with the most time in a traced call."""
    cost = cost_of(text)
    sources = {}
    bytes_of_source: dict[str, float] = collections.defaultdict(float)
    for operation in cost.operations:
        sources[operation.line.name] = operation.source
        bytes_of_source[operation.source] += operation.times * operation.traffic.total
    shares = shares_by_source(shares_of_trace(folder), sources)
    total = sum(share.seconds for _, share in shares)

    rows = []
    for source, share in shares[:_ROWS_OF_TRACE]:
        moved = bytes_of_source.get(source, 0.0)
        cells = [source, _milliseconds(share.seconds / calls), f"{share.seconds / total:.1%}"]
        cells += [f"{share.events / calls:.0f}", environment.megabytes(moved) if moved else ""]
        rows.append(cells)
    rest = sum(share.seconds for _, share in shares[_ROWS_OF_TRACE:])
    if rest:
        rows.append(["all others", _milliseconds(rest / calls), f"{rest / total:.1%}", "", ""])
    return ResultTable(
        ["line of code, or operation", "time in a call", "share", "events", "bytes"], rows
    )


_PEAKS = Part("peaks", "a large matmul and a large copy", 45, _measure_peaks)
_STEP = Part(
    "step",
    "an update of enwik8_24l, and where its time goes",
    100,
    functools.partial(_measure_step, name="enwik8_24l", trace=True),
)
_ATTENTION = Part("attention", "one layer's attention, by path", 100, _measure_attention)
_STEP_WITHOUT_DROPOUT = Part(
    "step_without_dropout",
    "an update of enwik8_24l without dropout: what its masks cost",
    75,
    functools.partial(
        _measure_step,
        name="enwik8_24l",
        changes={"model.dropout.rate": 0.0, "model.dropout.attention": 0.0},
    ),
)
_STEP_REMAT_NONE = Part(
    "step_remat_none",
    "an update of enwik8_24l that keeps all activations",
    75,
    functools.partial(_measure_step, name="enwik8_24l", changes={"model.remat": "none"}),
)
_STEP_12L = Part(
    "step_12l",
    "an update of enwik8_12l",
    75,
    functools.partial(_measure_step, name="enwik8_12l"),
)
_STEP_WT103 = Part(
    "step_wt103",
    "an update of wt103_base, with its large vocabulary",
    100,
    functools.partial(_measure_step, name="wt103_base", trace=True),
)
_GENERATION_24L = Part(
    "generation_24l",
    "a generated byte of enwik8_24l, memory 3,800",
    75,
    functools.partial(_measure_generation, name="enwik8_24l"),
)
_GENERATION_WT103 = Part(
    "generation_wt103",
    "a generated word of wt103_base",
    75,
    functools.partial(_measure_generation, name="wt103_base"),
)
# The most informative parts first. Most of a part's time is compilation.
PARTS = (
    _PEAKS,
    _STEP,
    _ATTENTION,
    _STEP_WITHOUT_DROPOUT,
    _STEP_REMAT_NONE,
    _STEP_12L,
    _STEP_WT103,
    _GENERATION_24L,
    _GENERATION_WT103,
)
