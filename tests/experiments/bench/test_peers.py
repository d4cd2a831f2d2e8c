"""Tests of the peers: their losses and draws, their tasks, and what they do not have."""

import dataclasses
import hashlib
import os
import re
import sys

import numpy as np
import pytest

from experiments.bench import peers, speed
from experiments.bench.peers import HuggingFaceModel, OriginalModel
from support import tiny, tiny_run
from txl_jax.config import EvalConfig, ExperimentConfig, GenerateConfig, TrainConfig, config_tree
from txl_jax.config.experiment import apply_preset
from txl_jax.errors import UserError
from txl_jax.runs.build import build

L = 4
M = 7
# Largest difference of a token's loss, in nats, that rounding makes in models this small.
# `peers.TOLERANCE` also allows for large ones.
ROUNDING = 2e-5
LENGTHS = {
    "batch_size": tiny.B,
    "segment_len": L,
    "mem_len": M,
    "clamp_len": 6,
    "same_length": True,
}
CONFIG = ExperimentConfig(
    model=tiny.CONFIG, train=TrainConfig(**LENGTHS), eval=EvalConfig(**LENGTHS)
)
CLUSTERS = {"model.cutoffs": (4, 9), "model.div_val": 2, "model.tie_projs": (False, True, True)}
HUGGINGFACE = pytest.mark.nightly(part="huggingface")
ORIGINAL = pytest.mark.nightly(part="original")
# transformers' own use of names that have changed since.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def make_components(changes):
    import torch

    # For matrices this small, more only wait: eight times as long on a busy machine.
    torch.set_num_threads(1)
    return build(peers.with_peer_compat(config_tree.replace(CONFIG, changes)), vocab_size=tiny.V)


def make(kind=HuggingFaceModel, **changes):
    """Makes a peer with clusters. Its updates are too small to change a loss."""
    components = make_components(CLUSTERS | {"optimizer.learning_rate": 1e-12})
    return kind(components.config, tiny_run.params(components.model), vocab_size=tiny.V, **changes)


def clone() -> str:
    """Returns the clone of the authors' repository that TXL_ORIGINAL names.

    Skips the test without it, or without torch.
    """
    pytest.importorskip("torch")
    if not os.environ.get("TXL_ORIGINAL"):
        pytest.skip(
            f"TXL_ORIGINAL is not set: this test runs code from a clone of {peers.REPOSITORY}"
        )
    return os.environ["TXL_ORIGINAL"]


def segments(tokens: np.ndarray):
    """Yields (inputs, targets) of each segment."""
    for start in range(0, tokens.shape[1] - 1, L):
        part = tokens[:, start : start + L + 1]
        yield part[:, :-1], part[:, 1:]


@HUGGINGFACE
@pytest.mark.parametrize("changes", [{}, CLUSTERS], ids=["full softmax", "clusters"])
def test_losses_are_ours_and_each_task_has_its_counterpart(changes, capsys, monkeypatch):
    components = make_components(changes)
    [peer] = peers.checked_peers(components, None)
    # The check has filled its memories.
    for use, rows in (("evaluation", tiny.B), ("training", tiny.B), ("generation", 1)):
        assert [tuple(states.shape) for states in peer._memory[use]] == tiny.N * [(M, rows, tiny.D)]
    # The largest difference between a loss of ours and the peer's.
    assert float(re.search(r"loss: (\S+) nats", capsys.readouterr().out)[1]) < ROUNDING
    for name, tokens in (("training", tiny.B * L), ("evaluation", tiny.B * L), ("generation", 1)):
        ours, *_ = speed.tasks(name, components)
        theirs = peer.task(name, ours, components)
        theirs.call()
        assert theirs.tokens == tokens, name

    # `checked_peers` scores our model with the peer's preset. With other settings our losses differ
    # from its losses, and nothing is timed.
    monkeypatch.setattr(
        peers, "apply_preset", lambda config, _: config_tree.replace(config, {"eval.clamp_len": 2})
    )
    with pytest.raises(UserError, match=rf"\b{peers.TOLERANCE:g} nats\b"):
        peers.checked_peers(components, None)


@ORIGINAL
@pytest.mark.parametrize("changes", [{}, CLUSTERS], ids=["full softmax", "clusters"])
def test_the_originals_losses_are_ours_eager_and_compiled(changes, capsys):
    path = clone()
    components = make_components(changes)
    models = peers.checked_peers(components, path)
    losses = dict(re.findall(r"loss, (\w+): (\S+) nats", capsys.readouterr().out))
    assert losses.keys() == {"eager", "compiled"}
    # The largest differences between a loss of ours and theirs.
    assert float(losses["eager"]) < ROUNDING
    assert float(losses["compiled"]) < ROUNDING

    for name in ("training", "evaluation"):
        ours, *_ = speed.tasks(name, components)
        for model, label in zip(models, losses, strict=True):
            theirs = model.task(name, ours, components)
            theirs.call()
            assert (theirs.name, theirs.tokens) == (f"{ours.name}, {label}", tiny.B * L)


@HUGGINGFACE
@pytest.mark.parametrize("top_k", [3, None])
def test_generation_draws_what_the_library_draws(top_k):
    """Token by token over its memory, until the memory's first tokens are long gone."""
    import torch

    # It draws with a generator of its own, which begins with seed 0.
    peer = make()
    tokens = [peer.generate_token(top_k) for _ in range(3 * M)]

    torch.manual_seed(0)
    first = torch.zeros((1, 1), dtype=torch.int64)
    expected = peer._model.generate(first, max_new_tokens=3 * M, do_sample=True, top_k=top_k or 0)
    assert tokens == expected[0, 1:].tolist()
    assert len(set(tokens)) > 2, "draws differ"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(HuggingFaceModel, {}, marks=HUGGINGFACE, id="huggingface"),
        pytest.param(OriginalModel, {"compiled": False}, marks=ORIGINAL, id="original, eager"),
        pytest.param(OriginalModel, {"compiled": True}, marks=ORIGINAL, id="original, compiled"),
    ],
)
def test_training_and_evaluation_carry_their_memory(kind, changes):
    """A training step has the mean loss of its segment, read after the segment before.

    That is the loss of an evaluation, as the learning rate is almost 0 and there is no dropout.
    """
    if kind is OriginalModel:
        changes = changes | {"path": clone()}
    peer = make(kind, **changes)
    first, second = segments(tiny.text(2 * L + 1))

    first_losses = peer.evaluate(*first)
    second_losses = peer.evaluate(*second)
    means = [first_losses.mean(), second_losses.mean()]
    steps = [peer.train_step(*first), peer.train_step(*second)]
    np.testing.assert_allclose(steps, means, rtol=1e-5)

    # The second segment was read with the first in the memory.
    from_an_empty_memory = make(kind, **changes).evaluate(*second)
    assert np.abs(second_losses - from_an_empty_memory).max() > 1e-3


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"\btorch\b.*\[peer\]"):
        HuggingFaceModel(CONFIG, {}, vocab_size=tiny.V)
    # The directory's files, of which there are none, count as the release's.
    monkeypatch.setattr(peers, "_DIGEST", hashlib.sha256().hexdigest())
    with pytest.raises(UserError, match=r"\btorch\b.*\[peer\]"):
        OriginalModel(CONFIG, {}, vocab_size=tiny.V, path="/nowhere", compiled=False)


def test_another_folder_and_models_that_the_original_lacks_are_refused(tmp_path):
    """Code that is not the release's is not run."""
    (tmp_path / "pytorch").mkdir()
    (tmp_path / "pytorch" / "mem_transformer.py").write_text(
        "raise AssertionError('other code was run')"
    )
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=rf"--peer_path.*{peers.REPOSITORY}.*{path}"):
            OriginalModel(CONFIG, {}, vocab_size=tiny.V, path=str(path), compiled=True)
    for changes in ({"model.untie_r": True}, {"model.encoding": "shaw"}):
        config = config_tree.replace(CONFIG, changes)
        with pytest.raises(UserError, match=next(iter(changes))):
            OriginalModel(config, {}, vocab_size=tiny.V, path=str(tmp_path), compiled=False)


def test_settings_are_the_presets_with_a_masked_memory_and_those_that_the_peer_lacks_are_refused():
    preset = apply_preset(CONFIG, "hf").model.compat
    changed = peers.with_peer_compat(
        config_tree.replace(CONFIG, {"model.compat.layer_norm_eps": 1e-3})
    )
    assert dataclasses.replace(changed.model.compat, memory_start=preset.memory_start) == preset
    assert changed.model.compat.memory_start != preset.memory_start
    assert dataclasses.replace(changed.model, compat=CONFIG.model.compat) == CONFIG.model
    with pytest.raises(UserError, match=r"generate\.samples must be 1.*\b3\b"):
        peers.with_peer_compat(dataclasses.replace(CONFIG, generate=GenerateConfig(samples=3)))
