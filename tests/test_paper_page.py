"""Tests that docs/examples/transformer_xl.py, the paper on one page, computes what txl_jax does."""

import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from support import ROOT, tiny, tiny_run
from txl_jax.recurrence import Segments
from txl_jax.training.step import TrainState, make_train_step

PAGE = ROOT / "docs" / "examples" / "transformer_xl.py"
# The memory of the second segment is partly the zeros of the start. The third segment's memory has
# rows of both other segments.
S, L, M = 3, 4, 6
RATE = 0.5


@pytest.fixture
def page(x64):
    """The page's names, in float64. Its arrays are broadcast without spelling out the axes."""
    with jax.numpy_rank_promotion("allow"):
        yield runpy.run_path(str(PAGE))


def parts():
    """The library's parts. The memory starts as on the page: with zeros that are attended to."""
    return tiny_run.parts(
        model__dtype="float64",
        model__dropout__rate=0.0,
        model__compat__memory_start="zeros",
        train__segment_len=L,
        train__mem_len=M,
        train__segments_per_call=1,
    )


def segments():
    """Inputs and targets, int [S, B, L] each. Segments of a row follow each other."""
    tokens = tiny.text(S * L + 1)
    shape = (tiny.B, S, L)
    inputs = tokens[:, :-1].reshape(shape).swapaxes(0, 1)
    targets = tokens[:, 1:].reshape(shape).swapaxes(0, 1)
    return inputs, targets


def page_model(page):
    return page["TransformerXL"](
        n_layer=tiny.N,
        d_model=tiny.D,
        n_head=tiny.H,
        d_head=tiny.E,
        d_inner=tiny.F,
        n_token=tiny.V,
    )


def page_params(params):
    """The library's parameters under the page's names. The library stacks its layers."""
    stack = params["stack"]
    layers = stack["layers"]
    attention = layers["attention"]
    feed_forward = layers["feed_forward"]
    stacked = {
        "w_query": attention["query"],
        "w_key": attention["key"],
        "w_value": attention["value"],
        "w_distance": attention["position_key"],
        "w_output": attention["output"],
        "attention_norm": layers["attention_norm"],
        "inner": {"kernel": feed_forward["inner_kernel"], "bias": feed_forward["inner_bias"]},
        "outer": {"kernel": feed_forward["outer_kernel"], "bias": feed_forward["outer_bias"]},
        "feed_forward_norm": layers["feed_forward_norm"],
    }
    renamed = {
        "table": params["embedding"]["table_0"],
        "bias": params["softmax"]["bias"],
        "u": stack["biases"]["content"],
        "v": stack["biases"]["position"],
    }
    for n in range(tiny.N):
        renamed[f"layer_{n}"] = jax.tree.map(lambda leaf, n=n: leaf[n], stacked)
    return renamed


def read_by_library(params, model):
    """The losses of the segments [S] and the last memory."""

    def read(memory, segment):
        inputs, targets = segment
        hidden, memory = model.apply({"params": params}, inputs, memory)
        nats = model.apply({"params": params}, hidden, targets, method=model.nll)
        return memory, nats.mean()

    memory, losses = jax.lax.scan(read, model.init_memory(batch_size=tiny.B, mem_len=M), segments())
    return losses, memory.hidden


def read_by_page(params, page):
    """The same by the page. Its parameters are views of the library's, and so are its gradients."""

    def read(memory, segment):
        loss, memory = page["loss"](page_params(params), page_model(page), memory, *segment)
        return memory, loss

    memory, losses = jax.lax.scan(read, jnp.zeros((tiny.N, tiny.B, M, tiny.D)), segments())
    return losses, memory


def with_gradient(read, argument):
    """Makes a function of the parameters: a gradient through all segments, and what `read` returns.

    The gradient is of a sum in which each segment's loss has another weight.
    """

    def total(params):
        losses, memory = read(params, argument)
        return losses @ jnp.arange(1.0, S + 1), (losses, memory)

    return jax.jit(jax.grad(total, has_aux=True))


def test_losses_memory_and_gradients_through_segments_are_the_librarys(page):
    model = parts().model
    params = tiny.variables(model)["params"]
    read = with_gradient(read_by_library, model)
    expected_gradients, (expected_losses, expected_memory) = read(params)
    read = with_gradient(read_by_page, page)
    gradients, (losses, memory) = read(params)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-9)
    np.testing.assert_allclose(memory, expected_memory, rtol=0, atol=1e-9)
    assert_same(gradients, expected_gradients)


def test_training_steps_are_the_librarys(page):
    """With plain gradient descent, whose updates are the gradients."""
    made = parts()
    params = jax.device_get(tiny.variables(made.model)["params"])
    optimizer = optax.sgd(RATE)
    inputs, targets = segments()

    step = make_train_step(made.model, optimizer, optax.constant_schedule(RATE), made.config)
    memory = made.model.init_memory(batch_size=tiny.B, mem_len=M)
    before = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), memory)
    successive = Segments(inputs, targets, np.ones(inputs.shape), np.zeros(inputs.shape[:2], bool))
    expected, metrics = jax.device_get(jax.jit(step)(before, successive))

    renamed = page_params(params)
    state = page["TrainState"](renamed, optimizer.init(renamed), jnp.zeros(memory.hidden.shape))
    state, losses = page["train_on"](page_model(page), optimizer, state, (inputs, targets))

    np.testing.assert_allclose(losses, metrics.nats / metrics.tokens, rtol=0, atol=1e-9)
    np.testing.assert_allclose(state.memory, expected.memory.hidden, rtol=0, atol=1e-9)
    assert_same(state.params, page_params(expected.params))


def assert_same(tree, expected):
    """Compares two trees by leaf. No leaf may be zero, or it would show nothing."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True)
    for (path, leaf), other in pairs:
        name = jax.tree_util.keystr(path)
        assert np.abs(other).max() > 1e-6, name
        np.testing.assert_allclose(leaf, other, rtol=0, atol=1e-9, err_msg=name)


def test_the_page_imports_nothing_of_the_library():
    modules = re.findall(r"^ *(?:import|from) (\w+)", PAGE.read_text(), flags=re.MULTILINE)
    assert {"jax", "flax", "optax"} <= set(modules)
    assert not {"txl_jax", "experiments", "launch"} & set(modules)


def run_program(*arguments):
    command = [sys.executable, PAGE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
def test_bits_per_byte_fall_on_a_text(tmp_path):
    """In a text that repeats itself, only the first bytes are hard to predict."""
    path = tmp_path / "book.txt"
    path.write_bytes(b"the cat sat on the mat. " * 1000)
    done = run_program(path, "--steps=120", "--mem_len=16")
    assert done.returncode == 0, done.stderr
    bits = [float(number) for number in re.findall(r"(\S+) bits per byte", done.stdout)]
    assert len(bits) == 3  # After 50, 100 and 120 steps.
    assert 1 < bits[0] < 8, "a random byte has eight bits"
    assert bits[2] < 0.2


@pytest.mark.full
def test_a_text_without_a_whole_segment_is_an_error(tmp_path):
    path = tmp_path / "short.txt"
    # As many bytes as a batch of segments reads. The target of the last one is missing.
    path.write_bytes(b"x" * 1024)
    done = run_program(path)
    assert done.returncode == 1
    assert "1025 bytes, got 1024" in done.stderr
    assert "Traceback" not in done.stderr
