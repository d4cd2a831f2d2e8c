"""Tests of the speed benchmarks, of a model and of the server: settings, tasks, timing and
tables.
"""

import dataclasses
import functools
import types

import numpy as np
import pytest

from experiments.bench import serving, speed, timing
from experiments.bench.speed import Plan
from experiments.bench.timing import Task
from support import tiny, tiny_run
from txl_jax.config import EvalConfig, ExperimentConfig, GenerateConfig, TrainConfig, config_tree
from txl_jax.errors import UserError
from txl_jax.runs.build import build

CONFIG = ExperimentConfig(
    model=dataclasses.replace(tiny.CONFIG, n_layer=1),
    train=TrainConfig(
        batch_size=2,
        segment_len=4,
        mem_len=6,
        segments_per_call=2,
        **dict.fromkeys(tiny_run.COUNTS, 2),
    ),
    eval=EvalConfig(batch_size=1, segment_len=3, mem_len=7, clamp_len=5),
    generate=GenerateConfig(samples=3, top_k=5),
)


def test_tasks_are_timed_in_turns_and_compared_call_by_call():
    order = []
    ours = Task("a", 16, functools.partial(order.append, "a"))
    peer = Task("b", 8, functools.partial(order.append, "b"))
    timing.time_in_turns([ours, peer], warmup=1, calls=3)
    assert order == list("abababab")
    assert len(ours.seconds) == len(peer.seconds) == 3

    # The cells are the median, the slowest and the fastest of 16, 8 and 4 tokens per second. The
    # peer has 2, 1.6 and 1.
    ours.seconds = [1.0, 2.0, 4.0]
    peer.seconds = [4.0, 5.0, 8.0]
    assert ours.cells == ["8", "4", "16"]
    assert ours.speedups(peer) == [8.0, 5.0, 4.0]
    assert ours.speedup(peer) == 5.0


def test_tokens_follow_the_power_law():
    """A token of rank r is as frequent as (r + 2.7) ** -1.1, for ranks from 1 on."""
    expected = np.cumsum((np.arange(tiny.V) + 3.7) ** -1.1)
    counts = np.bincount(timing.draw_tokens(tiny.V, 100_000), minlength=tiny.V)
    np.testing.assert_allclose(np.cumsum(counts) / 100_000, expected / expected[-1], atol=0.005)


@pytest.fixture(scope="module")
def components():
    return build(CONFIG, vocab_size=tiny.V)


def cells_of(line):
    """Returns the cells of a table's row."""
    return [cell.strip() for cell in line.split("|")[1:-1]]


@pytest.mark.full
def test_a_row_per_task_and_generation_twice_with_tails(capsys):
    config = config_tree.replace(CONFIG, {"model.cutoffs": (4, 9), "data.corpus": "python_stdlib"})
    plan = Plan(tasks=("generation",), calls=2, warmup=1)

    speed.run(plan, types.SimpleNamespace(config=lambda: config))

    # The lines before are the model, the machine and the table's head. A row has three samples of
    # one token at a time, and the memory of 7.
    first, second = capsys.readouterr().out.splitlines()[5:]
    assert cells_of(first)[:3] == ["generation", "3 x 1", "7"]
    assert cells_of(second)[:3] == ["generation, every tail read", "3 x 1", "7"]


# Tokens of a call: 2 segments of 2 x 4, 8 segments of 1 x 3, and 16 tokens of 3 samples.
@pytest.mark.parametrize(
    ("name", "tokens", "shape", "mem_len"),
    [
        pytest.param("training", 16, (2, 4), 6, marks=pytest.mark.full),
        ("evaluation", 24, (1, 3), 7),
        pytest.param("generation", 48, (3, 1), 7, marks=pytest.mark.full),
    ],
)
def test_each_task_runs_and_knows_its_size(components, name, tokens, shape, mem_len):
    [task] = speed.tasks(name, components)

    # The first call compiles, and the second one takes the memory of the first.
    task.call()
    task.call()

    lengths = task.lengths
    assert task.tokens == tokens
    assert (lengths.batch_size, lengths.segment_len) == shape
    assert lengths.mem_len == mem_len
    assert task.flops_per_token > 1000


@pytest.mark.full
@pytest.mark.parametrize("rule", [None, "sgd", "rms"])
def test_evaluation_that_learns_is_timed_next_to_training_of_its_shape(rule):
    """It has the rows and lengths of evaluation, not of training."""
    config = config_tree.replace(CONFIG, {"eval.dynamic.rule": rule, "eval.batch_size": 3})
    learning, training = speed.dynamic_and_training(build(config, vocab_size=tiny.V))
    assert learning.name == f"dynamic evaluation, {rule or 'rmsprop'}"
    for task in (learning, training):
        task.call()
        task.call()
        lengths = task.lengths
        assert (lengths.batch_size, lengths.segment_len, lengths.mem_len) == (3, 3, 7)
    # Calls of 8 segments, and of train.segments_per_call.
    assert (learning.tokens, training.tokens) == (3 * 3 * 8, 3 * 3 * 2)


def test_evaluation_that_learns_is_timed_only_if_it_is_named():
    assert Plan().chosen_tasks == ("training", "evaluation", "generation")
    Plan(tasks=("dynamic",)).validate()
    with pytest.raises(UserError, match="dynamic"):
        Plan(tasks=("dynamic",), peer="hf").validate()


@pytest.mark.full
def test_tokens_that_are_read_again_are_not_counted_and_windows_not_timed(components):
    changes = {
        "train.stride": 3,
        "train.mem_len": 0,
        "eval.stride": 2,
        "eval.mem_len": 0,
        "eval.same_length": False,
    }
    # Windows of 4 tokens, of which 3 are new: a call has 2 windows in each of 2 rows, and computes
    # 4 tokens for each 3 that count.
    strided = build(config_tree.replace(CONFIG, changes), vocab_size=tiny.V)
    training = speed.training(strided)
    assert training.tokens == 12
    assert training.lengths.segment_len == 4
    whole = build(config_tree.replace(CONFIG, changes | {"train.stride": None}), vocab_size=tiny.V)
    assert training.flops_per_token == pytest.approx(4 / 3 * speed.training(whole).flops_per_token)
    with pytest.raises(UserError, match=r"eval\.stride\D*\b2\b"):
        speed.evaluation(strided)


@pytest.mark.full
def test_rows_of_a_server_and_one_row_are_timed(capsys):
    small = {
        "model.n_layer": 1,
        "model.d_model": 8,
        "model.n_head": 2,
        "model.d_head": 4,
        "model.d_inner": 8,
    }
    config = config_tree.replace(
        serving.DEFAULTS, small | {"eval.mem_len": 9, "model.cutoffs": (5, 9)}
    )

    serving.run(serving.Plan(rows=3, calls=2), types.SimpleNamespace(config=lambda: config))

    lines = capsys.readouterr().out.splitlines()
    heading, three_rows, one_row = (cells_of(line) for line in lines if line.startswith("| "))
    assert heading[0] == "rows"
    assert three_rows[0] == "3"
    assert one_row[0] == "1"
    for cell in (*three_rows[1:4], *one_row[1:4]):
        assert float(cell.replace(",", "")) > 0
    assert lines[-1].startswith("3 rows: ")
    assert lines[-1].endswith("one request at a time")
