"""Tests of the softmax benchmark."""

import dataclasses
import types

import pytest

from experiments.bench import softmax_speed
from experiments.bench.softmax_speed import Plan
from txl_jax.config import config_tree
from txl_jax.errors import UserError


def run(plan, config):
    softmax_speed.run(plan, types.SimpleNamespace(config=lambda: config))


@pytest.mark.full
def test_a_softmax_that_needs_too_much_memory_gets_fewer_tokens(capsys):
    changes = {"model.d_model": 64, "model.cutoffs": (200, 1000), "train.batch_size": 4, "train.segment_len": 50}
    config = config_tree.replace(softmax_speed.DEFAULTS, changes)
    plan = Plan(vocab_size=4000, calls=2, memory_gb=0.007)  # They need 4 and 9 MB.
    run(plan, config)
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    tokens = {line[1].strip(): line[2].strip() for line in lines}
    assert (tokens["softmax"], tokens["adaptive"], tokens["full"]) == ("tokens", "200", "100")
    too_little = dataclasses.replace(plan, memory_gb=0.000001)
    with pytest.raises(UserError, match=r"memory_gb.*\b1e-06"):
        run(too_little, config_tree.replace(config, {"train.segment_len": 1}))
