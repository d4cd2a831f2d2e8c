"""Tests of docs/own-module.md: each of its blocks runs after the first, which reads the text."""

import importlib.util

import jax
import numpy as np
import pytest
from flax import nnx

import txl_jax
from support import tiny_model
from support.pages import execute, python_blocks

PAGE = "docs/own-module.md"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the block that has some words, in a directory with a text, and returns its names."""
    (tmp_path / "book.txt").write_bytes(b"the cat sat on the mat. " * 400)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(txl_jax, "load", lambda path: tiny_model.make())

    def run_block(words):
        first, *others = python_blocks(PAGE)
        [block] = [block for block in others if words in block]
        return execute([first, block])

    return run_block


FRAMEWORKS = {
    "linen": "import flax.linen",
    "nnx": "from flax import nnx",
    "equinox": "import equinox",
    "plain jax": "scan_segments",
}


def test_each_block_has_a_test():
    assert len(python_blocks(PAGE)) == 1 + len(FRAMEWORKS) + 3


@pytest.mark.full
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_trains_with_the_memory_carried_on(framework, run):
    """The page asserts that its losses fall. The memory holds what was read."""
    if framework == "equinox" and not importlib.util.find_spec("equinox"):
        pytest.skip("equinox is not installed: it is in the extra test-full")

    names = run(FRAMEWORKS[framework])

    assert len(names["losses"]) in (10, 40)
    assert names["losses"][-1] < 1.0
    assert names["memory"].valid.tolist() == [32] * 4
    assert np.abs(names["memory"].hidden).max() > 0.1


@pytest.mark.full
def test_nnx_begins_with_parameters_of_linen(run):
    """By the page's one line, which is not in a block."""
    names = run(FRAMEWORKS["nnx"])
    core = names["model"].core
    inputs = names["segment"](0).inputs
    net = txl_jax.TransformerXL(names["sizes"], vocab_size=256)
    memory = net.init_memory(batch_size=4, mem_len=32)
    variables = net.init(jax.random.key(7), inputs, memory)
    expected, _ = net.apply(variables, inputs, memory)
    before, _ = core(inputs, memory)

    nnx.update(core, jax.tree.map(nnx.Param, variables["params"]))

    after, _ = core(inputs, memory)
    np.testing.assert_array_equal(after, expected)
    assert np.abs(before - expected).max() > 0.1


@pytest.mark.full
def test_a_loaded_model_is_trained_in_jit(run):
    """The page asserts that its losses equal `score`'s, and that the tuned model's losses fall."""
    names = run("txl_jax.load")

    assert names["tuned"].params is names["params"]
    assert names["model"].score(["abba cab"]) == [names["total"]]


@pytest.mark.full
def test_padded_texts_have_the_losses_of_each_by_itself(run):
    """The page asserts it, of rows with padding before further tokens."""
    names = run("numpy.full((3, L), -1)")

    assert names["count"].tolist() == [51, 36, 39]
    assert [len(text) for text in names["texts"]] == [52, 37, 40]
    assert names["memory"].valid.tolist() == [48, 36, 39]


def test_an_adaptive_softmax_without_the_model(run):
    """The page asserts that its losses are the log probabilities'."""
    names = run("txl_jax.adaptive_nll")

    np.testing.assert_allclose(np.exp(names["log_p"]).sum(-1), 1, rtol=1e-5)
    assert names["embedded"].shape == (2, 8, names["D"])
    for gradient in jax.tree.leaves(names["gradients"]):
        assert np.abs(gradient).max() > 0
