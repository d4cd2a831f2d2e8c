"""Tests the compiled programs of serving against the library's own scoring and generation, and rows
against rows.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from support import tiny_model
from support.cases import full_but
from support.serving import ROWS, ids, step_of
from txl_jax.config import CacheDType, GenerateConfig, WeightDType
from txl_jax.errors import UserError
from txl_jax.inference.decode import row_key
from txl_jax.ops.matmul import Int8, Transposed
from txl_jax.serving.rows import Rows, Step

# It is read in segments of 64, 16 and 9 tokens: the last token is read when the next one is drawn.
PROMPT = ids(90)
SEED = 5


@functools.cache
def programs(**changes):
    """The programs of the tiny model, prepared parameters, and the model."""
    model = tiny_model.make(**changes)
    step = step_of(model)
    return step, step.prepare_params(model.params), model


def read(step, weights, rings, row, tokens, *, position=0):
    """Reads a prompt. Returns the rings, the row's position and the scores of each segment.

    Together these are the scores of all tokens but the first.
    """
    segments = []
    while len(tokens) > 1:
        rings, scores = step.read(weights, rings, row, position, tokens, scored=True)
        n_read = len(scores.nats)
        tokens = tokens[n_read:]
        position += n_read
        segments.append(scores)
    return rings, position, segments


def nats_of(segments):
    return np.concatenate([scores.nats for scores in segments])


@dataclasses.dataclass
class Writer:
    """A row that samples tokens after `last`, `step.block` of them in each call.

    `others` changes the arguments of the other rows.
    """

    row: int
    last: int
    position: int
    others: Callable[[Rows], None] | None = None
    temperature: float = 1.0
    top_p: float = 1.0

    def write(self, step, weights, rings, length):
        """Returns the rings, the tokens that the row samples, and their nats."""
        tokens = []
        nats = []
        while len(tokens) < length:
            n_step = min(step.block, length - len(tokens))
            rows = self._arguments(tokens, n_step)
            rings, sampled, scores = step.write(weights, rings, rows)
            tokens += sampled[self.row, :n_step].tolist()
            nats += scores.nats[self.row, :n_step].tolist()
        return rings, tokens, nats

    def _arguments(self, tokens, n_step):
        rows = Rows.idle(ROWS)
        if self.others is not None:
            self.others(rows)
        row = self.row
        rows.last[row] = tokens[-1] if tokens else self.last
        rows.position[row] = self.position + len(tokens)
        rows.number[row] = len(tokens)
        rows.steps[row] = n_step
        rows.key[row] = row_key(SEED)
        rows.scored[row] = True
        rows.temperature[row] = self.temperature
        rows.top_p[row] = self.top_p
        return rows


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="matrices are transposed on a CPU")
@pytest.mark.parametrize(
    ("rows", "dtype", "kind"),
    [
        pytest.param(2, None, Transposed, id="two rows"),
        pytest.param(1, None, jax.Array, id="one row"),
        pytest.param(2, WeightDType.INT8, Int8, id="two rows, int8"),
    ],
)
def test_several_rows_have_transposed_matrices(rows, dtype, kind):
    model = tiny_model.make(eval__weight_dtype=dtype)
    weights = Step(model.components, batch_size=rows).prepare_params(model.params)
    layer = weights.token.layers[0]
    assert isinstance(layer.query_key_value, kind)
    assert isinstance(layer.output, kind)
    for part in layer.feed_forward:
        assert isinstance(part.kernel, kind)


# What changes in the model, by how the memory starts.
STARTS = {"masked": {}, "zeros": {"model__compat__memory_start": "zeros"}}
LIMITS = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}]


@pytest.mark.parametrize("start", full_but(["masked"], STARTS))
def test_a_prompt_has_the_scores_of_the_library_and_draws_its_tokens(start):
    step, weights, model = programs(**STARTS[start])
    rings = step.init_cache(weights)
    # An earlier request left its states in the row.
    rings, _, _ = read(step, weights, rings, 2, ids(70, seed=8))
    beginning = step.empty_row(weights)
    if beginning is not None:
        rings = step.put(rings, 2, beginning)

    rings, position, segments = read(step, weights, rings, 2, PROMPT)

    expected = model.score([PROMPT], per_token=True)[0]
    np.testing.assert_allclose(nats_of(segments), expected, rtol=1e-5)
    assert [len(scores.nats) for scores in segments] == [64, 16, 9]
    assert position == 64 + 16 + 9

    state = step.take(rings, 2)
    for limits in LIMITS:
        writer = Writer(2, PROMPT[-1], position, **limits)
        rings = step.put(rings, 2, state)
        # Four calls of 5 tokens, and one of 3.
        rings, sampled, nats = writer.write(step, weights, rings, 23)

        settings = GenerateConfig(length=23, top_k=None, seed=SEED, **limits)
        text = model.generate([PROMPT], settings)[0]
        assert sampled == model.encode(text).tolist(), limits
        whole = model.score([np.concatenate([PROMPT, sampled])], per_token=True)[0]
        np.testing.assert_allclose(nats, whole[-23:], rtol=1e-4, err_msg=str(limits))


@pytest.mark.full
def test_int8_weights_have_the_scores_of_the_library():
    """Other segments round elsewhere: what weights of int8 are multiplied with keeps 16 bits."""
    step, weights, model = programs(eval__weight_dtype=WeightDType.INT8)
    _, _, exact_model = programs()
    rings = step.init_cache(weights)
    assert rings.keys[0].dtype == "float32", "the cache keeps the model's dtype"

    _, _, segments = read(step, weights, rings, 2, PROMPT)

    nats = nats_of(segments)
    expected = model.score([PROMPT], per_token=True)[0]
    exact = exact_model.score([PROMPT], per_token=True)[0]
    np.testing.assert_allclose(nats, expected, rtol=0, atol=5e-3)
    assert np.abs(nats - exact).max() > 0.02, "the weights are rounded"


@pytest.mark.full
def test_a_cache_of_int8_has_scores_near_the_exact_ones():
    step, weights, _ = programs(eval__cache_dtype=CacheDType.INT8)
    _, _, exact_model = programs()

    rings, position, segments = read(step, weights, step.init_cache(weights), 1, PROMPT)
    writer = Writer(1, PROMPT[-1], position, temperature=0.0)
    rings, sampled, nats = writer.write(step, weights, rings, 12)

    keys = step.take(rings, 1).keys
    # The scales are float32.
    assert {leaf.dtype.name for leaf in jax.tree.leaves(keys)} == {"int8", "float32"}
    whole = exact_model.score([np.concatenate([PROMPT, sampled])], per_token=True)[0]
    error = np.abs(np.concatenate([nats_of(segments), nats]) - whole).max()
    # Without an error the cache would not have been read.
    assert 1e-4 < error < 0.2


def test_a_row_is_the_same_to_the_last_bit_whatever_the_others_do():
    step, weights, _ = programs()

    def all_write(rows):
        """Lets all rows write, with arguments that differ from row to row."""
        for row in range(ROWS):
            rows.last[row] = row
            rows.position[row] = 3 + 7 * row
            rows.steps[row] = step.block - row
            rows.key[row] = row_key(row)
            rows.temperature[row] = row / 2
            rows.top_p[row] = 1 - row / 5

    def outcome(row, others):
        """The tokens and nats that a row writes, and the nats of its prompt."""
        rings = step.init_cache(weights)
        rings, position, segments = read(step, weights, rings, row, PROMPT[:30])
        if others is not None:  # The neighbour reads while this row writes.
            rings, _, _ = read(step, weights, rings, (row + 1) % ROWS, PROMPT)
        writer = Writer(row, PROMPT[29], position, others)
        _, tokens, nats = writer.write(step, weights, rings, 60)
        return tokens, nats, nats_of(segments).tolist()

    expected = outcome(0, None)
    assert outcome(3, None) == expected
    assert outcome(1, all_write) == expected
    assert outcome(2, all_write) == expected


def test_a_row_that_goes_back_draws_the_same_again():
    """It goes back to the first token of a call, after a call in which it was idle.

    Rings are rounded up to a multiple of 16 slots. These need 16, 11 of memory and 5 of a call, so
    that no spare slot hides a mistake.
    """
    model = {"model__n_layer": 1, "eval__mem_len": 11, "eval__same_length": False}
    step, weights, _ = programs(**model)
    assert step.capacity == step.mem_len + step.block
    rings, position, _ = read(step, weights, step.init_cache(weights), 0, PROMPT)
    writer = Writer(0, PROMPT[-1], position, temperature=0.0)
    rings, first, nats = writer.write(step, weights, rings, step.block)

    others = Rows.idle(ROWS)
    others.last[0] = first[-1]
    others.position[0] = position + step.block
    others.steps[1] = step.block
    rings, _, _ = step.write(weights, rings, others)
    writer = Writer(0, first[0], position + 1, temperature=0.0)
    _, second, nats_again = writer.write(step, weights, rings, step.block - 1)

    assert first[1:] == second
    assert nats[1:] == nats_again


def test_several_devices_are_refused():
    mesh = jax.sharding.AbstractMesh((4, 2, 1), ("data", "fsdp", "tensor"))
    components = dataclasses.replace(tiny_model.make().components, mesh=mesh)
    with pytest.raises(UserError, match="mesh of 8"):
        Step(components, batch_size=ROWS)


def test_documents_that_are_kept_apart_are_refused():
    components = tiny_model.make(end_token=3, data__reset_at="c").components
    with pytest.raises(UserError, match="token 'c'"):
        Step(components, batch_size=ROWS)
