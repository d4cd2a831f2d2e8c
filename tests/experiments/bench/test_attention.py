"""Tests of the benchmark of attention: what it counts, checks and prints."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import attention
from experiments.bench.attention import Case, Plan, make_case
from txl_jax.config import EvalConfig, ExperimentConfig, ModelConfig, TrainConfig, config_tree
from txl_jax.errors import UserError
from txl_jax.ops.attention import Implementation, Tile

CONFIG = ExperimentConfig(
    model=ModelConfig(n_layer=2, d_model=24, n_head=3, d_head=8, d_inner=16),
    train=TrainConfig(batch_size=4, segment_len=20, mem_len=13),
    eval=EvalConfig(batch_size=1, segment_len=6, mem_len=16, clamp_len=9, same_length=True),
)
DROPOUT = config_tree.replace(CONFIG, {"model.dropout.attention": 0.3})


def case(task: str, config: ExperimentConfig = CONFIG, **changes) -> Case:
    return dataclasses.replace(make_case("tiny", config, task, batch=2, dtype="float32"), **changes)


@pytest.mark.parametrize("window", [None, 1, 19])  # Of no query, of all, of a part.
@pytest.mark.parametrize(("task", "passes"), [("training", 3), ("evaluation", 1)])
def test_operations_are_counted_on_visible_pairs(task, passes, window):
    """Three products of the forward pass, and twice as many backward; without position keys two."""
    sizes = dataclasses.replace(case(task), window=window)
    distance = sizes.mem_len + np.arange(sizes.segment_len)[:, None] - np.arange(sizes.mem_len + sizes.segment_len)
    visible = np.sum((distance >= 0) & (distance < (sizes.window or 99)))
    pairs = sizes.batch * sizes.n_head * visible
    assert sizes.flops("tiled") == passes * 3 * 2 * 8 * pairs
    assert sizes.flops("plain") == passes * 2 * 2 * 8 * pairs


@pytest.mark.full
@pytest.mark.parametrize("task", attention.TASKS)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_products_alone_are_those_of_all_pairs(task, platform):
    sizes = case(task, platform=platform)  # In evaluation distances are clamped: fewer position keys than keys.
    function, inputs = attention.products(sizes)
    compiled = jax.jit(function).lower(inputs).compile()
    loops = sizes.batch * sizes.n_head if platform == "cpu" else 1  # XLA counts a loop's body once.
    assert compiled.cost_analysis()["flops"] * loops == pytest.approx(sizes.flops("products"), rel=0.01)
    assert all(np.isfinite(found).all() and np.any(found) for found in compiled(inputs))


@pytest.mark.full
def test_each_path_has_a_row_or_a_reason(capsys):
    plan = Plan(configs=("tiny",), calls=2, batch_size=2, paths=("reference", "fused", "plain"))
    attention.run(plan, types.SimpleNamespace(config_of_flagfile=lambda name: CONFIG))
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("| tiny")]
    for task, sizes in (("training", "2 x 3 x 20 x 33, 8"), ("evaluation", "1 x 3 x 6 x 24, 8")):
        found = {row[3].partition(" ")[0]: row for row in rows if row[1:3] == [task, sizes]}
        assert found.keys() == {"reference", "plain", "products"}
        assert found["reference"][8] == found["products"][9] == "1.00" and float(found["plain"][4]) < 1e-3
    assert any(line.startswith("no fused: ") for line in out.splitlines())


@pytest.mark.parametrize("task", attention.TASKS)
@pytest.mark.parametrize("error", [0, 0.01, jnp.nan])
def test_a_path_with_other_numbers_is_not_timed(monkeypatch, task, error):
    """The replacement is the reference, with an error in what it returns: forward, and so backward."""
    name = "attention" if task == "training" else "cached_attention"
    reference = getattr(attention, name)

    def replacement(*args, implementation, **named):
        found = reference(*args, implementation="reference", **named)
        return found if implementation == "reference" else found * (1 + error)

    monkeypatch.setattr(attention, name, replacement)
    arguments = case(task, DROPOUT), "tiled", Implementation("tiled", tile=Tile(8, 8))
    if not error:
        assert attention.largest_difference(*arguments) == 0
        return
    with pytest.raises(UserError, match=rf"tiny, {task}.*tiled.*1e-03.*(1.0e-02|nan)"):
        attention.largest_difference(*arguments)


def test_unknown_names_and_models_without_this_attention_are_refused():
    for settings in ({"paths": ("fusd",)}, {"tasks": ("fusd", "training")}):
        with pytest.raises(UserError, match="'fusd'"):
            Plan(**settings).validate()
    with pytest.raises(UserError, match=r"tiny has .*\bshaw\b.*model.encoding=relative"):
        case("training", config_tree.replace(CONFIG, {"model.encoding": "shaw"}))
