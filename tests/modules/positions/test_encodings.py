"""Tests of what an encoding adds to states, memory and dropout, and of distances beyond a table.

Values and gradients are compared with the original's in tests/test_golden.py, inference with training in
tests/inference/test_forward.py, and parameters are in tests/modules/test_parameters.py.
"""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from support.cases import nightly_but
from txl_jax import memory as memory_lib
from txl_jax.config import DType, Encoding
from txl_jax.inference.prepare import prepare_params
from txl_jax.modules.positions import ENCODINGS

L, M = 5, 4


def embed(model, variables, clamp_len=None):
    return model.apply(variables, tiny.text(L), clamp_len=clamp_len, method=model.embed)


def test_slots_of_a_memory_without_positions_may_change_places():
    """Nothing is added to stored states, and attention treats them alike."""
    tokens, rng = tiny.text(L), np.random.default_rng(2)
    states = rng.normal(size=(tiny.N, tiny.B, M, tiny.D)).astype(np.float32)
    full, order = jnp.full((tiny.B,), M, jnp.int32), [2, 0, 3, 1]

    def difference(model):
        encode, variables = tiny.encoder(model), tiny.variables(model)
        read = [
            encode(variables, tokens, memory_lib.Memory(jnp.asarray(s), full)) for s in (states, states[:, :, order])
        ]
        return np.abs(read[0][0] - read[1][0]).max()

    assert difference(tiny.make(encoding=Encoding.VASWANI)) < 1e-5
    assert difference(tiny.make()) > 0.1  # Relative positions depend on the order.


@pytest.mark.parametrize("encoding", [Encoding.VASWANI, Encoding.AL_RFOU])
def test_the_memory_keeps_the_first_layers_input_with_its_positions(encoding):
    model = tiny.make(encoding=encoding)
    variables, memory = tiny.variables(model), model.init_memory(batch_size=tiny.B, mem_len=M)
    _, memory = tiny.encoder(model)(variables, tiny.text(L), memory)
    expected = embed(model, variables)
    if encoding is Encoding.AL_RFOU:
        vectors = variables["params"]["stack"]["layers"]["positions"]["vector"][0]
        expected += vectors[np.arange(L - 1, -1, -1)][None]
    np.testing.assert_allclose(memory.hidden[0], expected[:, -M:], rtol=1e-6)


def test_embedding_and_code_are_dropped_together():
    """One dropout on their sum, as in the original, and none on codes alone."""
    model, dropped = tiny.make(encoding=Encoding.VASWANI, dropout__rate=0.5), []
    variables, memory = tiny.variables(model), model.init_memory(batch_size=tiny.B, mem_len=M)

    def interceptor(call, args, kwargs, context):
        if isinstance(context.module, nn.Dropout) and context.module.path in (("drop_input",), ("drop_output",)):
            dropped.append(args[0])
        return call(*args, **kwargs)

    @jax.jit
    def what_is_dropped():
        rngs = {"dropout": jax.random.key(0, impl="rbg")}
        with nn.intercept_methods(interceptor):
            model.apply(variables, tiny.text(L), memory, rngs=rngs, deterministic=False)
        return tuple(dropped), embed(model, variables)

    found, embedded = what_is_dropped()
    assert [array.shape for array in found] == [(tiny.B, L, tiny.D)] * 2  # The input, and the last layer.
    np.testing.assert_array_equal(found[0], embedded)


@pytest.mark.parametrize(
    ("encoding", "clamp_len"),
    nightly_but(
        [(Encoding.SHAW, None), (Encoding.AL_RFOU, 2)],
        itertools.product([Encoding.SHAW, Encoding.AL_RFOU], [None, 2, 30]),
    ),
)
def test_distances_beyond_the_table_or_the_clamp_share_the_last_one(encoding, clamp_len, x64):
    """A table that goes on with copies of the last row that counts gives the same."""
    short, long = (tiny.make(encoding=encoding, num_positions=n, dtype=DType.FLOAT64) for n in (3, L + M))
    variables, last = tiny.variables(short), min(clamp_len or 2, 2)

    def lengthen(path, leaf):
        if "positions" not in [key.key for key in path]:
            return leaf
        return leaf[:, np.minimum(np.arange(L + M), last)]

    longer = jax.tree_util.tree_map_with_path(lengthen, variables)
    text, memory = tiny.text(2 * L), short.init_memory(batch_size=tiny.B, mem_len=M)
    found = tiny.stream(tiny.encoder(short, clamp_len=clamp_len), variables, text, [L, L], memory)
    expected = tiny.stream(tiny.encoder(long), longer, text, [L, L], memory)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("encoding", nightly_but([Encoding.RELATIVE, Encoding.VASWANI], Encoding))
def test_encodings_say_what_they_can_do(encoding, x64):
    """Single tokens give the states of a segment or not, and position keys are a third product of query and key."""
    model = tiny.make(encoding=encoding, dtype=DType.FLOAT64)
    variables, encode, text = tiny.variables(model), tiny.encoder(model), tiny.text(4)
    memory = model.init_memory(batch_size=tiny.B, mem_len=4)
    whole, one_by_one = (tiny.stream(encode, variables, text, lengths, memory) for lengths in ([4], [1] * 4))
    assert (np.abs(whole - one_by_one).max() < 1e-12) == ENCODINGS[encoding].generates_by_token

    prepare = functools.partial(prepare_params, model=model, segment_len=2, mem_len=4, clamp_len=None)
    keys = jax.eval_shape(lambda: prepare(variables["params"])).layers[0].position_keys
    has_keys = keys is not None and keys.key is not None
    assert ENCODINGS[encoding].products_per_key == (3 if has_keys else 2)
