"""Tests of absolute positions: parameters, codes at the input, what memory and dropout mean with them.

Values and gradients are compared with the original's in tests/test_golden.py.
"""

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import oracles, tiny
from txl_jax import memory as memory_lib
from txl_jax.config import DType, Encoding
from txl_jax.modules.transformer_xl import TransformerXL

L, M = 5, 4


def make(**changes) -> TransformerXL:
    return tiny.make(encoding=Encoding.VASWANI, **changes)


def shapes(model: TransformerXL) -> dict[str, tuple[int, ...]]:
    variables = jax.eval_shape(lambda: tiny.variables(model))
    return {path: leaf.shape for path, leaf in flax.traverse_util.flatten_dict(variables, sep="/").items()}


def embed(model: TransformerXL, clamp_len: int | None) -> jax.Array:
    return model.apply(tiny.variables(make()), tiny.text(L), clamp_len=clamp_len, method=model.embed)


@pytest.mark.parametrize("untie_r", [False, True])
def test_nothing_of_relative_attention_is_left(untie_r):
    relative, absolute = shapes(tiny.make(untie_r=untie_r)), shapes(make())
    gone = {path for path in relative if "/biases/" in path or path.endswith("/position_key")}
    assert len(gone) == 3
    assert absolute == {path: shape for path, shape in relative.items() if path not in gone}


@pytest.mark.parametrize("clamp_len", [None, 2])
def test_the_distance_to_the_segments_end_is_added_to_the_embedding(clamp_len, x64):
    codes = embed(make(dtype=DType.FLOAT64), clamp_len) - embed(tiny.make(dtype=DType.FLOAT64), clamp_len)
    for i in range(L):
        distance = min(L - 1 - i, clamp_len or L)
        expected = oracles.sinusoid(distance, tiny.D)
        np.testing.assert_allclose(codes[:, i], [expected] * tiny.B, rtol=0, atol=1e-12, err_msg=str(i))


def test_stored_states_have_no_places():
    """The slots of the memory may change places: nothing is added to them, and attention treats them alike."""
    variables, tokens, rng = tiny.variables(make()), tiny.text(L), np.random.default_rng(2)
    states = rng.normal(size=(tiny.N, tiny.B, M, tiny.D)).astype(np.float32)
    full, order = jnp.full((tiny.B,), M, jnp.int32), [2, 0, 3, 1]

    def difference(model, variables):
        encode = tiny.encoder(model)
        read = [
            encode(variables, tokens, memory_lib.Memory(jnp.asarray(s), full)) for s in (states, states[:, :, order])
        ]
        return np.abs(read[0][0] - read[1][0]).max()

    assert difference(make(), variables) < 1e-5
    assert difference(tiny.make(), tiny.variables(tiny.make())) > 0.1  # Relative positions depend on the order.


def test_the_memory_keeps_the_first_layers_input_with_its_code():
    model, variables = make(), tiny.variables(make())
    _, memory = tiny.encoder(model)(variables, tiny.text(L), model.init_memory(batch_size=tiny.B, mem_len=M))
    np.testing.assert_allclose(memory.hidden[0], embed(model, None)[:, -M:], rtol=1e-6)


def test_embedding_and_code_are_dropped_together():
    """One dropout on their sum, as in the original, and none on codes alone."""
    model, variables, dropped = make(dropout__rate=0.5), tiny.variables(make()), []

    def interceptor(call, args, kwargs, context):
        if isinstance(context.module, nn.Dropout) and context.module.path in (("drop_input",), ("drop_output",)):
            dropped.append(args[0])
        return call(*args, **kwargs)

    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    options = {"clamp_len": None, "same_length": False, "deterministic": False}
    rngs = {"dropout": jax.random.key(0, impl="rbg")}
    with nn.intercept_methods(interceptor):
        model.apply(variables, tiny.text(L), memory, rngs=rngs, **options)
    assert [array.shape for array in dropped] == [(tiny.B, L, tiny.D)] * 2  # The input, and the last layer.
    np.testing.assert_array_equal(dropped[0], embed(model, None))
