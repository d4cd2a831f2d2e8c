"""Tests of the benchmark of attention: what it counts, checks and prints."""

import csv
import dataclasses
import re
import types

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


@pytest.mark.parametrize("window", [None, 1, 19])  # Of no query, of all, of a part.
@pytest.mark.parametrize(("task", "passes"), [("training", 3), ("evaluation", 1)])
def test_operations_are_counted_on_visible_pairs(task, passes, window):
    """Three products of the forward pass, and twice as many backward; without position keys two."""
    sizes = dataclasses.replace(case(task), window=window)
    distance = (
        sizes.mem_len
        + np.arange(sizes.segment_len)[:, None]
        - np.arange(sizes.mem_len + sizes.segment_len)
    )
    visible = np.sum((distance >= 0) & (distance < (sizes.window or 99)))
    pairs = sizes.batch * sizes.n_head * visible
    assert sizes.flops() == passes * 3 * 2 * 8 * pairs
    assert dataclasses.replace(sizes, n_positions=0).flops() == passes * 2 * 2 * 8 * pairs


@pytest.fixture
def page(tmp_path, capsys):
    """Returns the function of settings that runs the benchmark: rows by task and path, lines below
    the table, error.
    """

    def run(**settings):
        plan, error = (
            Plan(configs=("tiny",), calls=2, batch_size=2, out=str(tmp_path / "out"), **settings),
            None,
        )
        try:
            device.run(plan, types.SimpleNamespace(config_of_flagfile=lambda name: CONFIG))
        except UserError as found:
            error = str(found)
        printed, written = capsys.readouterr().out, (tmp_path / "out" / "device.md").read_text()
        assert printed.startswith(written) and "Traceback" not in written
        with open(tmp_path / "out" / "device.csv") as file:
            rows = list(csv.DictReader(file))
        assert all(f"| {row['path']} " in written for row in rows)
        return {(row["task"], row["path"]): row for row in rows}, written.splitlines(), error

    return run


@pytest.mark.full
def test_each_path_has_a_row_or_a_reason(page, monkeypatch):
    monkeypatch.setattr(choose, "tiles_are_faster", lambda problem: True)
    rows, lines, error = page(
        paths=("reference", "tiled", "fused", "plain"), tiles=("8x8", "16x16", "999x999")
    )
    names = ["reference", "tiled 64x1024", "tiled 8x8", "tiled 16x16", "plain: tiled 64x1024"]
    names_over_a_cache = [name.replace("64x1024", "512x1024") for name in names]
    over_a_cache = [("evaluation", name) for name in names_over_a_cache]
    assert list(rows) == [*(("training", name) for name in names), *over_a_cache] and error is None
    sizes = {"training": [2, 3, 20, 33, 8], "evaluation": [1, 3, 6, 24, 8]}
    for (task, name), row in rows.items():
        assert [int(n) for n in re.findall(r"\d+", row["sizes"])] == sizes[task]
        assert row["time"].endswith(" ms") and float(row["difference"] or 0) < 1e-3
        assert row["speedup"] == "1.00" or name != "reference"
    assert (
        len(
            [
                line
                for line in lines
                if line.startswith("- tiny, ") and "of 3 tiles auto takes tiled" in line
            ]
        )
        == 2
    )
    assert "- 8 within rounding, 0 wrong" in lines
    assert [line for line in lines if line.startswith("- no fused, as its kernels are for TPU")]
    assert [line for line in lines if "take_along_axis" in line]


@pytest.mark.full
def test_interpreted_kernels_go_the_whole_way_and_a_wrong_one_is_named_and_not_timed(
    page, monkeypatch
):
    settings = {"paths": ("reference", "interpreted"), "tasks": ("training",)}
    rows, _, error = page(**settings)
    [name] = [name for _, name in rows if name.endswith(" interpreted")]
    assert (
        float(rows["training", name]["difference"]) < 1e-5
        and rows["training", name]["time"]
        and error is None
    )
    real = kernels.skew
    monkeypatch.setattr(kernels, "skew", lambda *args: -real(*args))
    rows, lines, error = page(**settings)
    assert (
        rows["training", name]["difference"].startswith("WRONG ")
        and not rows["training", name]["time"]
    )
    assert rows["training", "reference"]["time"] and error.startswith("1 ")
    assert [line for line in lines if line.startswith(f"- tiny, training, {name}: its ")]

    def fail(*args):
        raise NotImplementedError("no such product\nin Mosaic")

    monkeypatch.setattr(kernels, "skew", fail)
    rows, lines, error = page(**settings)
    assert list(rows) == [("training", "reference")] and error is None
    assert f"- {name} does not compile or run: no such product (tiny training)" in lines


def test_models_without_this_attention_are_refused():
    with pytest.raises(UserError, match=r"tiny .*model.encoding=relative.*\bshaw\b"):
        case("training", config_tree.replace(CONFIG, {"model.encoding": "shaw"}))
