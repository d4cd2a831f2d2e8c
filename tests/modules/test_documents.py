"""Tests documents that are kept apart: every loss is the one of the document read alone, from an
empty memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import nightly_but
from txl_jax.config import DType, NormPlace
from txl_jax.errors import UserError
from txl_jax.inference import forward
from txl_jax.ops.attention import Visibility, attention, choose

END, SEGMENTS = 4, 9
# L, M, same_length. Memories longer than the text, and cut off. Few lengths of segments: each is
# compiled.
LENGTHS = {"long": (3, 40, False), "cut": (3, 4, True)}
MODELS = {"post": {}, "pre": {"layer_norm": NormPlace.PRE}}


def text(segment_len):
    """Rows with ends inside segments, at their first and last positions, side by side, and with
    none.
    """
    length = segment_len * SEGMENTS
    tokens = tiny.text(length + 1, rows=4, seed=2)
    tokens[tokens == END] = END + 1
    last = segment_len - 1
    for row, ends in enumerate(
        [(0, 7, 8, 9, 21), (last, 3 * segment_len), (2 * last + 1, 2 * last + 2, length - 1)]
    ):
        tokens[row, list(ends)] = END
    return tokens


def reader(model, variables, same_length):
    """(tokens, targets, memory) -> (nats, memory), compiled."""

    @jax.jit
    def read(tokens, targets, memory):
        hidden, memory = model.apply(variables, tokens, memory, same_length=same_length)
        return model.apply(variables, hidden, targets, method=model.nll), memory

    return read


def alone(model, variables, tokens, lengths):
    """Nats [B, T] of a loop over rows and documents, each read by itself from an empty memory, cut
    where segments end.

    The model has no end token: nothing of what is tested is used.
    """
    segment_len, mem_len, same_length = lengths
    plain = tiny.make(**{**model, "end_token": None})
    nats_of, found = (
        reader(plain, variables, same_length),
        np.zeros((len(tokens), tokens.shape[1] - 1)),
    )
    for row, ids in enumerate(tokens):
        memory = None
        for first in range(len(ids) - 1):
            begins = first == 0 or ids[first - 1] == END
            if begins:
                memory = plain.init_memory(batch_size=1, mem_len=mem_len)
            if begins or first % segment_len == 0:  # To the end of the segment or of the document.
                after = first + 1
                while after % segment_len and ids[after - 1] != END:
                    after += 1
                nats, memory = nats_of(
                    ids[None, first:after], ids[None, first + 1 : after + 1], memory
                )
                found[row, first:after] = nats[0]
    return found


def streamed(made, variables, tokens, lengths):
    """Nats [B, T] of the training model, over segments with a memory."""
    segment_len, mem_len, same_length = lengths
    memory = made.init_memory(batch_size=len(tokens), mem_len=mem_len)
    return tiny.over_segments(reader(made, variables, same_length), memory, tokens, segment_len)[0]


def cached(made, variables, tokens, lengths):
    """Nats [B, T] of inference, over segments with a KV cache."""
    segment_len, mem_len, same_length = lengths
    sizes = {"segment_len": segment_len, "mem_len": mem_len}
    weights = tiny.prepared(made, variables, **sizes, same_length=same_length)
    cache = forward.init_cache(weights, batch_size=len(tokens), **sizes)
    return tiny.over_segments(
        lambda *of: tiny.read_cached(weights, *of)[1:], cache, tokens, segment_len
    )[0]


@pytest.mark.parametrize(
    ("name", "lengths"),
    nightly_but([("pre", "cut")], [("post", "long"), ("pre", "cut"), ("post", "cut")]),
)
def test_every_loss_is_that_of_the_document_alone(name, lengths, x64):
    model, lengths = MODELS[name] | {"dtype": DType.FLOAT64, "end_token": END}, LENGTHS[lengths]
    made, tokens = tiny.make(**model), text(lengths[0])
    variables = tiny.variables(made)
    expected = alone(model, variables, tokens, lengths)
    for read in (streamed, cached):
        np.testing.assert_allclose(
            read(made, variables, tokens, lengths), expected, rtol=1e-10, atol=1e-10
        )
    without = streamed(tiny.make(**{**model, "end_token": None}), variables, tokens, lengths)
    differs = np.abs(without - expected).max(axis=1) > 1e-3
    assert differs.tolist() == [True, True, True, False]


def test_tiles_and_kernels_take_no_documents_and_a_run_chooses_the_reference():
    arrays = [jnp.zeros((1, 2, 3, 4))] * 3
    visibility = Visibility(
        jnp.zeros(1, jnp.int32), 3, 0, document_start=jnp.zeros((1, 3), jnp.int32)
    )
    for path in ("tiled", "fused"):
        with pytest.raises(UserError, match=r"data\.reset_at"):
            attention(*arrays, visibility=visibility, implementation=path)
    for chosen in tiny_run.parts(end_token=END, data__reset_at="x").attention:
        assert chosen.implementation == choose.REFERENCE and "data.reset_at" in chosen.reason


@pytest.mark.parametrize(
    ("reset_at", "end_token"), [("x", None), (None, 3), ("x", tiny.V), ("x", -1)]
)
def test_an_end_that_would_not_act_is_refused(reset_at, end_token):
    with pytest.raises(
        UserError, match=rf"end_token\b.*data\.reset_at\b.*\b{tiny.V}\b.*{end_token}$"
    ):
        tiny_run.parts(data__reset_at=reset_at, end_token=end_token)
