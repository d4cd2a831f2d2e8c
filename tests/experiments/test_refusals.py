"""Tests that a study or benchmark rejects settings that it cannot carry out, before a run or a text
is read.
"""

import pytest

from experiments.bench import device, speed
from experiments.bench.speed import Peer
from experiments.paper import ablation, attention, context_length, recl
from support import tiny_run
from txl_jax.config import config_tree
from txl_jax.errors import UserError

# Without a memory, same_length must be off.
NO_MEMORY = {"eval.mem_len": 0, "eval.same_length": False}
WITHOUT_RECURRENCE = {"train.mem_len": 0, "train.same_length": False}
# Shaw's encoding requires a table of some size.
SHAW = {"model.encoding": "shaw", "model.num_positions": 9}


@pytest.mark.parametrize(
    ("plan", "changes", "pattern"),
    [
        (ablation.Plan(seeds=(1, 1)), {}, r"\[1, 1\]"),
        (ablation.Plan(lengths=(0,)), {}, r"\[0\]"),
        (ablation.Plan(), {"model.network": "lstm"}, r"model\.network\b.*\blstm\b"),
        (ablation.Plan(), {"train.mem_len": 0}, r"train\.mem_len"),
        (attention.Plan(), {"model.network": "lstm"}, r"\blstm\b"),
        (attention.Plan(), SHAW, r"\bshaw\b"),
        (attention.Plan(), NO_MEMORY, r"eval\.mem_len\D*\b0\b"),
        (context_length.Plan(lengths=(8, 0)), {}, r"\[8, 0\]"),
        # A model with a memory has no windows, and so no stride. One without it must have one, and
        # not one above the shortest length.
        (context_length.Plan(lengths=(8,), stride=4), {}, r"\bstride\D*\b4\b"),
        (context_length.Plan(lengths=(8,)), WITHOUT_RECURRENCE, r"\bstride\b"),
        (
            context_length.Plan(lengths=(8, 6), stride=7),
            WITHOUT_RECURRENCE,
            r"\bstride\D*\b7\b.*\b6\b",
        ),
        # The last number is the step between contexts, and the second their largest.
        (recl.Plan(lengths=(2, 8, 0)), {}, r"\b2,8,0\b"),
        (recl.Plan(lengths=(5, 9, 5)), {}, r"\b5,9,5\b"),
        # Names with a typing error.
        (device.Plan(paths=("fusd",)), {}, "'fusd'"),
        (device.Plan(tasks=("fusd", "training")), {}, "'fusd'"),
        (device.Plan(tiles=("8x8", "fusd")), {}, "'fusd'"),
        (speed.Plan(tasks=("trainig",)), {}, r"'trainig'.*\btraining\b"),
        # The original is code in a directory, which cannot generate.
        (
            speed.Plan(peer=Peer.ORIGINAL, peer_path="/a", tasks=("generation",)),
            {},
            r"--peer=original.*generation",
        ),
        (speed.Plan(peer=Peer.ORIGINAL), {}, "--peer_path"),
        (speed.Plan(peer_path="/a"), {}, "--peer=original"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(plan, changes, pattern):
    config = config_tree.replace(tiny_run.CONFIG, changes)

    def check_all():
        plan.validate()
        plan.check(config)

    with pytest.raises(UserError, match=pattern):
        check_all()
