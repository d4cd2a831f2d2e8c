"""Tests of the speed benchmark: its settings, its table and its record."""

import dataclasses
import json

import pytest

from experiments.bench import speed
from experiments.bench.speed import Peer, Plan
from support import tiny
from txl_jax.bench.compare_huggingface import with_peer_compat
from txl_jax.config import EvalConfig, ExperimentConfig, GenerateConfig, TrainConfig
from txl_jax.config import tree as config_tree
from txl_jax.errors import UserError

CONFIG = ExperimentConfig(
    model=dataclasses.replace(tiny.CONFIG, cutoffs=(4, 9)),
    train=TrainConfig(batch_size=2, segment_len=4, mem_len=6),
    eval=EvalConfig(batch_size=1, segment_len=3, mem_len=7),
    generate=GenerateConfig(top_k=5),
)


@pytest.mark.full
def test_a_row_per_task_and_generation_twice_with_tails(tmp_path):
    path = tmp_path / "speed.json"
    plan = Plan(tasks=("data_loading", "generation"), calls=2, warmup=0, vocab_size=tiny.V, json=str(path))
    record = speed.benchmark(CONFIG, plan)
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert [len(task["seconds"]) for task in record["tasks"]] == [2, 2, 2]
    assert record["vocab_size"] == tiny.V and record["plan"]["calls"] == 2 and record["config"]["train.mem_len"] == 6


def test_the_peer_has_all_tasks_but_data_loading_and_others_are_refused():
    assert Plan(peer=Peer.HUGGINGFACE).chosen_tasks == ("training", "evaluation", "generation")
    for settings, words in (
        ({"tasks": ("trainig",)}, r"'trainig'.*\btraining\b"),
        ({"peer": Peer.HUGGINGFACE, "tasks": ("data_loading",)}, r"data_loading.*--peer"),
        ({"peer": Peer.HUGGINGFACE, "warmup": 0}, r"warmup is 0\b.*\b1\b"),
    ):
        with pytest.raises(UserError, match=words):
            Plan(**settings).validate()


def test_the_peer_compat_preset_is_hugging_faces_with_a_masked_memory():
    preset = config_tree.apply_preset(CONFIG, "hf").compat
    found = with_peer_compat(config_tree.replace(CONFIG, {"compat.layer_norm_eps": 1e-3}))
    assert dataclasses.replace(found.compat, memory_start=preset.memory_start) == preset
    assert found.compat.memory_start != preset.memory_start
    assert found.model == CONFIG.model
