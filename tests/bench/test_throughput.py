"""Tests of throughput: what is timed, the comparison with Hugging Face, and what becomes of the times."""

import dataclasses

import jax
import pytest

from support import tiny, tiny_run
from txl_jax.bench import compare_huggingface, throughput
from txl_jax.bench.throughput import Task, Throughput
from txl_jax.config import EvalConfig, ExperimentConfig, GenerateConfig, TrainConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError
from txl_jax.inference.generator import Generator
from txl_jax.runs.build import build

CONFIG = ExperimentConfig(
    model=tiny.CONFIG,
    train=TrainConfig(batch_size=2, segment_len=4, mem_len=6, segments_per_call=2, **dict.fromkeys(tiny_run.COUNTS, 2)),
    eval=EvalConfig(batch_size=1, segment_len=3, mem_len=7, clamp_len=5, segments_per_call=2),
    generate=GenerateConfig(samples=3, top_k=5),
)


@pytest.fixture(scope="module")
def components():
    return build(CONFIG, vocab_size=tiny.V)


def test_calls_are_interleaved_after_warm_up():
    order = []
    tasks = [Task(name, "", 0, 8, lambda name=name: order.append(name)) for name in "ab"]
    found = throughput.measure_interleaved(tasks, warmup=1, calls=3)
    assert order == list("abababab")
    assert [len(one.seconds) for one in found] == [3, 3]


def test_the_speedup_is_the_ratio_of_throughputs_call_by_call():
    """Ours handles twice the peer's tokens in a call."""
    slow = Throughput(Task("x", "1 x 8", 0, 8, lambda: None), (1.0, 4.0, 2.0))
    assert (slow.median, min(slow.tokens_per_second), max(slow.tokens_per_second)) == (4.0, 2.0, 8.0)
    ours = Throughput(Task("x", "", 0, 16, lambda: None), (1.0, 2.0, 4.0))
    peer = Throughput(Task("x", "", 0, 8, lambda: None), (4.0, 5.0, 8.0))
    comparison = compare_huggingface.Comparison(ours, peer)
    assert comparison.speedups == [8.0, 5.0, 4.0] and comparison.speedup == 5.0
    record = comparison.as_record()
    assert record["speedup"] == 5.0 and record["peer"]["tokens_per_second"] == 8 / 5


@pytest.mark.parametrize(
    ("name", "tokens", "shape", "mem_len"),
    [
        ("data_loading", 16, "2 x 4", 6),
        pytest.param("training", 16, "2 x 4", 6, marks=pytest.mark.full),
        ("evaluation", 6, "1 x 3", 7),
        pytest.param("generation", 48, "3 x 1", 7, marks=pytest.mark.full),
    ],
)
def test_each_task_runs_and_knows_its_size(components, name, tokens, shape, mem_len):
    params = () if name in ("data_loading", "training") else (tiny_run.params(components.model),)
    task = getattr(throughput, name)(components, *params)
    task.call()
    task.call()
    assert (task.tokens, task.shape, task.mem_len) == (tokens, shape, mem_len)
    assert task.compile_seconds > 0
    if name != "data_loading":
        assert task.memory_bytes > 1000 and task.flops_per_token > 1000
    if name == "generation":
        assert task.first_token_seconds > 0 and task.bytes_per_step > 1000


@pytest.mark.full
def test_tokens_that_are_read_again_are_not_counted_and_windows_not_timed(components):
    changes = {"train.stride": 3, "train.mem_len": 0, "eval.stride": 2, "eval.mem_len": 0, "eval.same_length": False}
    strided = build(config_tree.replace(components.config, changes), vocab_size=tiny.V)
    tasks = [throughput.data_loading(strided), throughput.training(strided)]
    assert [task.tokens for task in tasks] == [12, 12] and tasks[1].shape == "2 x 4"
    whole = build(config_tree.replace(components.config, changes | {"train.stride": None}), vocab_size=tiny.V)
    assert tasks[1].flops_per_token == pytest.approx(4 / 3 * throughput.training(whole).flops_per_token)
    with pytest.raises(UserError, match=r"eval\.stride\D*\b2\b"):
        throughput.evaluation(strided, tiny_run.params(strided.model))


@pytest.mark.nightly(part="huggingface")
def test_the_peer_has_our_losses_and_tasks(components):
    params = tiny_run.params(components.model)
    peer = compare_huggingface.make_peer(components, params, components.config.eval)
    assert compare_huggingface.check_same_losses(components, params, peer) < 1e-4
    assert compare_huggingface.effect_of_cache_dtype(components, params) == 0
    for make in (compare_huggingface.evaluation, compare_huggingface.generation):
        ours, theirs = make(components, params, peer)
        ours.call(), theirs.call()
        assert ours.mem_len == theirs.mem_len
    ours, theirs = compare_huggingface.training(components, params)
    theirs.call()
    assert theirs.tokens == 8
    unclamped = dataclasses.replace(components.config.eval, clamp_len=None)
    other = compare_huggingface.make_peer(components, params, unclamped)
    with pytest.raises(UserError, match=rf"nats.*\b{compare_huggingface.TOLERANCE:g}\b"):  # Then nothing is timed.
        compare_huggingface.check_same_losses(components, params, other)


def test_settings_that_the_peer_does_not_have_are_refused():
    config = dataclasses.replace(CONFIG, generate=GenerateConfig(samples=3))
    with pytest.raises(UserError, match=r"generate\.samples\D*\b3\b"):
        compare_huggingface.check_generation_settings(config)


def test_weights_for_single_tokens_are_those_of_segments(components):
    """Arrays that both layouts share are held once."""
    generator = Generator(components.model, components.config.eval, components.config.generate)
    segment, token = generator.prepare_params(jax.device_put(tiny_run.params(components.model)))
    shared = [jax.tree.leaves((weights.embed_and_norm, weights.clusters)) for weights in (segment, token)]
    of_segment, of_token = ({leaf.unsafe_buffer_pointer() for leaf in leaves} for leaves in shared)
    assert of_segment == of_token
