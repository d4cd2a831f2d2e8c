"""Tests of the benchmark of attention: what it counts, checks and prints."""

import csv
import dataclasses
import re
import types
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest

from experiments.bench import device
from experiments.bench.device import Case, Plan, make_case
from txl_jax.config import EvalConfig, ExperimentConfig, ModelConfig, TrainConfig, config_tree
from txl_jax.errors import UserError
from txl_jax.ops.attention import choose
from txl_jax.ops.attention.tpu import kernels

CONFIG = ExperimentConfig(
    model=ModelConfig(n_layer=2, d_model=24, n_head=3, d_head=8, d_inner=16),
    train=TrainConfig(batch_size=4, segment_len=20, mem_len=13),
    eval=EvalConfig(batch_size=1, segment_len=6, mem_len=16, clamp_len=9, same_length=True),
)


def case(task: str, config: ExperimentConfig = CONFIG, **changes) -> Case:
    return dataclasses.replace(make_case("tiny", config, task, batch=2, dtype="float32"), **changes)


# Windows that limit no query, all queries, and a part of them.
@pytest.mark.parametrize("window", [None, 1, 19])
@pytest.mark.parametrize(("task", "passes"), [("training", 3), ("evaluation", 1)])
def test_operations_are_counted_on_visible_pairs(task, passes, window):
    """The forward pass has three products, or two without position keys.

    The backward pass has twice as many.
    """
    sizes = dataclasses.replace(case(task), window=window)

    queries = sizes.mem_len + np.arange(sizes.segment_len)
    keys = np.arange(sizes.mem_len + sizes.segment_len)
    distance = queries[:, None] - keys
    # No distance is as large as 99.
    visible = np.sum((distance >= 0) & (distance < (sizes.window or 99)))
    pairs = sizes.batch * sizes.n_head * visible
    # A product takes two operations for each of a head's 8 features.
    assert sizes.flops() == passes * 3 * 2 * 8 * pairs
    assert dataclasses.replace(sizes, n_positions=0).flops() == passes * 2 * 2 * 8 * pairs


class Page(NamedTuple):
    """What the benchmark has printed and written."""

    # Rows of the table by task and path.
    rows: dict[tuple[str, str], dict[str, str]]
    # Lines of the page.
    lines: list[str]
    # The message of the error at the end, or None.
    error: str | None

    def has_line(self, start, text=""):
        """Returns whether a line starts with a text and contains another one."""
        return any(line.startswith(start) and text in line for line in self.lines)


@pytest.fixture
def run_benchmark(tmp_path, capsys):
    """Runs the benchmark with some settings, and returns its `Page`.

    The configuration "tiny", which no flagfile has, is `CONFIG`.
    """

    def run(**settings):
        out = tmp_path / "out"
        plan = Plan(configs=("tiny",), calls=2, batch_size=2, out=str(out), **settings)
        error = None
        try:
            device.run(plan, types.SimpleNamespace(config_of_flagfile=lambda name: CONFIG))
        except UserError as raised:
            error = str(raised)

        written = (out / "device.md").read_text()
        assert capsys.readouterr().out.startswith(written)
        assert "Traceback" not in written
        rows = {}
        with open(out / "device.csv") as file:
            for row in csv.DictReader(file):
                assert f"| {row['path']} " in written
                rows[row["task"], row["path"]] = row
        return Page(rows, written.splitlines(), error)

    return run


@pytest.mark.full
def test_each_path_has_a_row_or_a_reason(run_benchmark, monkeypatch):
    monkeypatch.setattr(choose, "tiles_are_faster", lambda problem: True)

    page = run_benchmark(
        paths=("reference", "tiled", "fused", "plain"), tiles=("8x8", "16x16", "999x999")
    )

    assert page.error is None
    assert list(page.rows) == [
        ("training", "reference"),
        ("training", "tiled 64x1024"),
        ("training", "tiled 8x8"),
        ("training", "tiled 16x16"),
        ("training", "plain: tiled 64x1024"),
        ("evaluation", "reference"),
        ("evaluation", "tiled 512x1024"),
        ("evaluation", "tiled 8x8"),
        ("evaluation", "tiled 16x16"),
        ("evaluation", "plain: tiled 512x1024"),
    ]
    # Rows, heads, queries, keys and the width of a head. --batch_size is for training only. The
    # cache of 16 keys has 18, which are whole segments of 6, and the segment itself adds 6.
    sizes = {"training": ["2", "3", "20", "33", "8"], "evaluation": ["1", "3", "6", "24", "8"]}
    for (task, name), row in page.rows.items():
        assert re.findall(r"\d+", row["sizes"]) == sizes[task], (task, name)
        assert row["time"].endswith(" ms"), (task, name)
        assert float(row["difference"] or 0) < 1e-3, (task, name)
        assert row["speedup"] == "1.00" or name != "reference", (task, name)
    # Of the tiles with a row, which are the default and the two of --tiles that are valid.
    choices = [line for line in page.lines if "of 3 tiles auto takes tiled" in line]
    assert len(choices) == 2
    assert all(line.startswith("- tiny, ") for line in choices)
    # All rows except the two references, with which they are compared.
    assert "- 8 within rounding, 0 wrong" in page.lines
    assert page.has_line("- no fused, because its kernels are for TPU")
    # Part of the calls whose gradients no accelerator has shown, which the page lists on a CPU.
    assert page.has_line("", "take_along_axis")


INTERPRETED = {"paths": ("reference", "interpreted"), "tasks": ("training",)}


@pytest.fixture
def interpreted(run_benchmark):
    """The name of the interpreted kernels, which are right."""
    page = run_benchmark(**INTERPRETED)
    [name] = [name for _, name in page.rows if name.endswith(" interpreted")]
    assert float(page.rows["training", name]["difference"]) < 1e-5
    assert page.rows["training", name]["time"]
    assert page.error is None
    return name


@pytest.mark.full
def test_a_wrong_kernel_is_named_and_not_timed(run_benchmark, interpreted, monkeypatch):
    """It has the wrong sign in what moves the scores of distances to their keys."""
    skew = kernels.skew
    monkeypatch.setattr(kernels, "skew", lambda *arguments: -skew(*arguments))

    page = run_benchmark(**INTERPRETED)

    assert page.rows["training", interpreted]["difference"].startswith("WRONG ")
    assert not page.rows["training", interpreted]["time"]
    assert page.rows["training", "reference"]["time"]
    assert page.error.startswith("1 ")
    assert page.has_line(f"- tiny, training, {interpreted}: its ")


@pytest.mark.full
def test_a_kernel_that_does_not_compile_is_named(run_benchmark, interpreted, monkeypatch):
    error = NotImplementedError("no such product\nin Mosaic")
    monkeypatch.setattr(kernels, "skew", mock.Mock(side_effect=error))

    page = run_benchmark(**INTERPRETED)

    assert list(page.rows) == [("training", "reference")]
    assert page.error is None
    reason = "does not compile or run: no such product (tiny training)"
    assert f"- {interpreted} {reason}" in page.lines


def test_models_without_this_attention_are_refused():
    with pytest.raises(UserError, match=r"tiny .*model.encoding=relative.*\bshaw\b"):
        case("training", config_tree.replace(CONFIG, {"model.encoding": "shaw"}))
