"""Tests of documents that are kept apart: every loss is the loss of the document read by itself,
from an empty memory.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import nightly_but
from txl_jax.config import DType, MemoryStart, NormPlace
from txl_jax.errors import UserError
from txl_jax.inference import forward
from txl_jax.ops.attention import Visibility, attention, choose

END = 4  # The token that ends a document.
N_SEGMENT = 9


class Lengths(NamedTuple):
    """How a text is read."""

    segment_len: int
    mem_len: int
    same_length: bool


# Each length of a segment is compiled, so there are few.
LENGTHS = {
    "long": Lengths(3, 40, same_length=False),  # A memory longer than the text.
    "cut": Lengths(3, 4, same_length=True),
}
MODELS = {"post": {}, "pre": {"layer_norm": NormPlace.PRE}}


def text(segment_len):
    """Four rows of tokens, with ends in the places where a reader may go wrong."""
    length = segment_len * N_SEGMENT
    tokens = tiny.text(length + 1, rows=4, seed=2)
    tokens[tokens == END] = END + 1
    # The first token of the text, three ends next to each other, and one end far from the others.
    tokens[0, [0, 7, 8, 9, 21]] = END
    # The last position of the first segment, and the first position of the fourth.
    tokens[1, [segment_len - 1, 3 * segment_len]] = END
    # Both sides of the border after the second segment, and the last input.
    tokens[2, [2 * segment_len - 1, 2 * segment_len, length - 1]] = END
    # The last row has no end.
    return tokens


def reader(model, variables, same_length):
    """(tokens, targets, memory) -> (nats, memory), compiled."""

    @jax.jit
    def read(tokens, targets, memory):
        hidden, memory = model.apply(variables, tokens, memory, same_length=same_length)
        return model.apply(variables, hidden, targets, method=model.nll), memory

    return read


def one_by_one(model, variables, tokens, lengths):
    """Nats [B, T] of a loop over rows and documents, each read by itself from an empty memory, cut
    where segments end.

    The model must have no end token, so that it does not use the code under test.
    """
    read = reader(model, variables, lengths.same_length)
    empty = model.init_memory(batch_size=1, mem_len=lengths.mem_len)
    nats = np.zeros((len(tokens), tokens.shape[1] - 1))
    for row, ids in enumerate(tokens):
        memory = empty
        first = 0
        while first < len(ids) - 1:
            if first > 0 and ids[first - 1] == END:
                memory = empty

            # To the end of the segment or of the document.
            after = first + 1
            while after % lengths.segment_len and ids[after - 1] != END:
                after += 1
            part, memory = read(ids[None, first:after], ids[None, first + 1 : after + 1], memory)
            nats[row, first:after] = part[0]
            first = after
    return nats


def streamed(model, variables, tokens, lengths):
    """Nats [B, T] of the training model, over segments with a memory."""
    read = reader(model, variables, lengths.same_length)
    memory = model.init_memory(batch_size=len(tokens), mem_len=lengths.mem_len)
    nats, _ = tiny.over_segments(read, memory, tokens, lengths.segment_len)
    return nats


def cached(model, variables, tokens, lengths):
    """Nats [B, T] of inference, over segments with a KV cache."""
    weights = tiny.prepared(
        model,
        variables,
        segment_len=lengths.segment_len,
        mem_len=lengths.mem_len,
        same_length=lengths.same_length,
    )
    cache = forward.init_cache(
        weights,
        batch_size=len(tokens),
        segment_len=lengths.segment_len,
        mem_len=lengths.mem_len,
    )

    def read(tokens, targets, cache):
        _, nats, cache = tiny.read_cached(weights, tokens, targets, cache)
        return nats, cache

    nats, _ = tiny.over_segments(read, cache, tokens, lengths.segment_len)
    return nats


@pytest.mark.parametrize(
    ("name", "lengths"),
    nightly_but([("pre", "cut")], [("post", "long"), ("pre", "cut"), ("post", "cut")]),
)
def test_every_loss_is_the_loss_of_the_document_by_itself(name, lengths, x64):
    lengths = LENGTHS[lengths]
    model = tiny.make(**MODELS[name], dtype=DType.FLOAT64, end_token=END)
    without_ends = tiny.make(**MODELS[name], dtype=DType.FLOAT64)
    tokens = text(lengths.segment_len)
    variables = tiny.variables(model)

    expected = one_by_one(without_ends, variables, tokens, lengths)

    for read in (streamed, cached):
        nats = read(model, variables, tokens, lengths)
        np.testing.assert_allclose(nats, expected, rtol=1e-10, atol=1e-10, err_msg=read.__name__)

    # A model that ignores ends has other losses in all rows but the last, so the comparison above
    # would fail.
    nats = streamed(without_ends, variables, tokens, lengths)
    differs = np.abs(nats - expected).max(axis=1) > 1e-3
    assert differs.tolist() == [True, True, True, False]


def test_marked_ends_separate_embeddings_like_an_end_token(x64):
    lengths = LENGTHS["cut"]
    model = tiny.make(dtype=DType.FLOAT64, end_token=END)
    without_ends = tiny.make(dtype=DType.FLOAT64)
    tokens = text(lengths.segment_len)
    variables = tiny.variables(model)
    memory = model.init_memory(batch_size=len(tokens), mem_len=lengths.mem_len)

    @jax.jit
    def read_marked(tokens, targets, memory):
        embedded = without_ends.apply(variables, tokens, method=without_ends.embed_tokens)
        hidden, memory = without_ends.apply(
            variables, embedded, memory, same_length=lengths.same_length, ended=tokens == END
        )
        return without_ends.apply(variables, hidden, targets, method=without_ends.nll), memory

    nats, last = tiny.over_segments(read_marked, memory, tokens, lengths.segment_len)

    np.testing.assert_allclose(
        nats, streamed(model, variables, tokens, lengths), rtol=1e-12, atol=1e-12
    )
    # The last input of row 2 is an end, so its memory is empty.
    assert last.valid[2] == 0


@pytest.mark.parametrize(
    "ended", [np.zeros((4, 2), bool), np.zeros(3, bool), np.zeros((4, 3), np.int32)], ids=str
)
def test_ends_that_do_not_mark_each_position_are_an_error(ended):
    model = tiny.make()
    memory = model.init_memory(batch_size=4, mem_len=2)
    with pytest.raises(UserError, match=r"ended\b.*\[4, 3\].*got"):
        model.apply(tiny.variables(model), np.zeros((4, 3), np.int32), memory, ended=ended)


def test_ends_with_a_memory_that_starts_with_zeros_are_an_error():
    """The next document would begin with masked slots, unlike the first one."""
    model = tiny.make(compat__memory_start=MemoryStart.ZEROS)
    memory = model.init_memory(batch_size=4, mem_len=2)
    ended = np.zeros((4, 3), bool)
    with pytest.raises(UserError, match="zeros"):
        model.apply(tiny.variables(model), np.zeros((4, 3), np.int32), memory, ended=ended)


@pytest.mark.parametrize("path", ["tiled", "fused"])
def test_tiles_and_kernels_take_no_documents(path):
    array = jnp.asarray(np.zeros((1, 2, 3, 4), np.float32))
    visibility = Visibility(np.zeros(1, np.int32), 3, 0, document_start=np.zeros((1, 3), np.int32))

    with pytest.raises(UserError, match=r"data\.reset_at"):
        attention(array, array, array, visibility=visibility, implementation=path)


def test_a_run_with_documents_chooses_the_reference():
    """In training and over a KV cache. The reason tells it from the choice at such small sizes."""
    for choice in tiny_run.parts(end_token=END, data__reset_at="x").attention:
        assert choice.implementation == choose.REFERENCE
        assert "data.reset_at" in choice.reason


@pytest.mark.parametrize(
    ("reset_at", "end_token"),
    [
        pytest.param("x", None, id="no token"),
        pytest.param(None, 3, id="no reset"),
        pytest.param("x", tiny.V, id="beyond the vocabulary"),
        pytest.param("x", -1, id="negative"),
    ],
)
def test_an_end_without_an_effect_is_an_error(reset_at, end_token):
    """The setting is the text of an end, and `end_token` is the token that stands for it.

    The error has the size of the vocabulary, and ends with the token that it got.
    """
    words = rf"end_token\b.*data\.reset_at\b.*\b{tiny.V}\b.*{end_token}$"

    with pytest.raises(UserError, match=words):
        tiny_run.parts(data__reset_at=reset_at, end_token=end_token)
