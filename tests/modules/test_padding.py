"""Tests of batches whose rows have different lengths: each row computes what it does by itself,
without padding, from segment to segment.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from support.cases import full_but
from txl_jax.config import DType, MemoryStart, NormPlace
from txl_jax.errors import UserError

L = 4
END = 5
# Tokens of three rows in three segments of 4. Rows end inside a segment, at a segment's end, and
# pause for a segment.
LENGTHS = np.asarray([[4, 3, 4], [2, 4, 0], [4, 1, 3]], np.int32)


class Case(NamedTuple):
    """A model, and how it reads."""

    mem_len: int
    settings: Mapping[str, Any] = MappingProxyType({})
    end_token: int | None = None
    same_length: bool = False
    clamp_len: int | None = None


CASES = {
    "long memory": Case(20),
    "short memory": Case(3, {"layer_norm": NormPlace.PRE}, clamp_len=2),
    "same length": Case(6, {"compat.memory_start": MemoryStart.ZEROS}, same_length=True),
    "documents": Case(6, end_token=END),
    "without memory": Case(0),
}


class Results(NamedTuple):
    """Losses [B, T] of a row's own tokens one after the other, and the memory after them."""

    nats: list[np.ndarray]
    hidden: np.ndarray
    valid: np.ndarray


def model_and_variables(case):
    settings = {name.replace(".", "__"): value for name, value in case.settings.items()}
    model = tiny.make(end_token=case.end_token, dtype=DType.FLOAT64, **settings)
    return model, tiny.variables(model)


def rows_of_tokens():
    """Inputs and targets of each row [T], without padding."""
    text = tiny.text(3 * L + 1, seed=4)
    text[text == END] = END + 1
    # An end inside the second segment of row 0, and the last token of row 1's first segment.
    text[0, 5] = END
    text[1, 1] = END
    return [(row[:n], row[1 : n + 1]) for row, n in zip(text, LENGTHS.sum(axis=1), strict=True)]


def loss_of(model, case):
    """(variables, inputs, targets, memory, lengths) -> (sum of nats, (nats, memory))."""

    def loss(variables, inputs, targets, memory, lengths):
        hidden, memory = model.apply(
            variables,
            inputs,
            memory,
            lengths=lengths,
            same_length=case.same_length,
            clamp_len=case.clamp_len,
        )
        nats = model.apply(variables, hidden, targets, method=model.nll)
        return nats.sum(), (nats, memory)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def padded(case, *, padding):
    """The results of a batch with padding of some token, and the gradients."""
    model, variables = model_and_variables(case)
    read = loss_of(model, case)
    memory = model.init_memory(batch_size=3, mem_len=case.mem_len)
    nats = [np.zeros(0)] * 3
    total = jax.tree.map(jnp.zeros_like, variables)
    starts = np.zeros(3, int)
    for lengths in LENGTHS.T:
        inputs = np.full((3, L), padding, np.int32)
        targets = np.full((3, L), -1, np.int32)
        for row, n in enumerate(lengths):
            own_inputs, own_targets = rows_of_tokens()[row]
            inputs[row, :n] = own_inputs[starts[row] :][:n]
            targets[row, :n] = own_targets[starts[row] :][:n]
        starts += lengths

        (_, (losses, memory)), gradients = read(variables, inputs, targets, memory, lengths)
        assert not np.any(losses[targets < 0])
        for row, n in enumerate(lengths):
            nats[row] = np.concatenate([nats[row], losses[row, :n]])
        total = jax.tree.map(jnp.add, total, gradients)
    return Results(nats, memory.hidden, memory.valid), total


def one_by_one(case):
    """The same from rows that are read by themselves, without padding and without `lengths`."""
    model, variables = model_and_variables(case)
    read = loss_of(model, case)
    total = jax.tree.map(jnp.zeros_like, variables)
    nats = []
    memories = []
    for (inputs, targets), lengths in zip(rows_of_tokens(), LENGTHS, strict=True):
        memory = model.init_memory(batch_size=1, mem_len=case.mem_len)
        parts = []
        start = 0
        for n in lengths[lengths > 0]:
            segment = slice(start, start + n)
            (_, (losses, memory)), gradients = read(
                variables, inputs[None, segment], targets[None, segment], memory, None
            )
            parts.append(losses[0])
            total = jax.tree.map(jnp.add, total, gradients)
            start += n
        nats.append(np.concatenate(parts))
        memories.append(memory)
    hidden = np.concatenate([memory.hidden for memory in memories], axis=1)
    valid = np.concatenate([memory.valid for memory in memories])
    return Results(nats, hidden, valid), total


@pytest.mark.parametrize("name", full_but(["short memory", "same length", "documents"], CASES))
def test_padded_rows_compute_what_each_row_does_by_itself(name, x64):
    """Losses, memory and gradients, in float64. The padding may be any token, such as the end."""
    case = CASES[name]
    expected, expected_gradients = one_by_one(case)

    results, gradients = padded(case, padding=END)

    np.testing.assert_array_equal(results.valid, expected.valid)
    np.testing.assert_allclose(results.hidden, expected.hidden, rtol=0, atol=1e-12)
    for row in range(3):
        np.testing.assert_allclose(results.nats[row], expected.nats[row], rtol=1e-12)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-11),
        gradients,
        expected_gradients,
    )


def test_lengths_of_whole_segments_change_nothing_and_others_are_clipped():
    model, variables = tiny.make(), tiny.variables(tiny.make())
    memory = model.init_memory(batch_size=3, mem_len=6)
    before = model.apply(variables, tiny.text(L, seed=1), memory)[1]

    def after(lengths):
        return model.apply(variables, tiny.text(L), before, lengths=lengths)[1]

    whole = after(None)
    for lengths in (np.full(3, L), np.full(3, L + 5)):
        jax.tree.map(np.testing.assert_array_equal, after(lengths), whole)
    jax.tree.map(np.testing.assert_array_equal, after(np.full(3, -2)), before)


def test_padding_of_end_tokens_empties_a_row():
    """Without lengths, in a model that keeps documents apart."""
    model = tiny.make(end_token=END)
    tokens = np.where(tiny.text(L) == END, END + 1, tiny.text(L))
    tokens[1, 2:] = END
    memory = model.init_memory(batch_size=3, mem_len=6)

    _, memory = model.apply(tiny.variables(model), tokens, memory)

    assert memory.valid.tolist() == [L, 0, L]


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param(np.full(3, 2.0), id="floats"),
        pytest.param(np.full((3, L), 1), id="a mask"),
        pytest.param(np.full(2, 1), id="other rows"),
        pytest.param(2, id="one number"),
    ],
)
def test_lengths_that_are_not_one_per_row_are_an_error(lengths):
    model = tiny.make()
    memory = model.init_memory(batch_size=3, mem_len=6)

    with pytest.raises(UserError, match=r"^lengths .*\[3\]"):
        model.apply(tiny.variables(model), tiny.text(L), memory, lengths=lengths)
