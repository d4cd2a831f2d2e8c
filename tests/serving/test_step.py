"""Tests the compiled programs of serving against the library's own scoring and generation, and rows
against rows.
"""

import dataclasses
import functools

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

PROMPT = ids(90)  # A whole segment of 64, one of 16, and 9 tokens of another; the memory has 9.


@functools.cache
def programs(**changes):
    """The programs of the tiny model, prepared parameters, and the model."""
    model = tiny_model.make(**changes)
    step = step_of(model)
    return step, step.prepare_params(model.params), model


def read(step, weights, rings, row, tokens, *, position=0):
    """The rings, the row's position and the scores of all tokens but the first."""
    found = []
    while len(tokens) > 1:
        rings, scores = step.read(weights, rings, row, position, tokens, scored=True)
        tokens, position = tokens[len(scores.nats) :], position + len(scores.nats)
        found.append(scores)
    return rings, position, found


def write(
    step,
    weights,
    rings,
    row,
    last,
    position,
    length,
    *,
    others=None,
    seed=5,
    temperature=1.0,
    top_p=1.0,
):
    """The rings, `length` tokens that the row draws, and their nats; `others` changes the arguments
    of other rows.
    """
    tokens, nats = [], []
    while len(tokens) < length:
        rows = Rows.idle(ROWS)
        if others is not None:
            others(rows)
        values = {
            "last": tokens[-1] if tokens else last,
            "position": position + len(tokens),
            "number": len(tokens),
        }
        values |= {
            "steps": min(step.block, length - len(tokens)),
            "key": row_key(seed),
            "scored": True,
        }
        for name, value in (values | {"temperature": temperature, "top_p": top_p}).items():
            getattr(rows, name)[row] = value
        rings, drawn, scores = step.write(weights, rings, rows)
        tokens += drawn[row, : values["steps"]].tolist()
        nats += scores.nats[row, : values["steps"]].tolist()
    return rings, tokens, nats


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="matrices are transposed on a CPU")
@pytest.mark.parametrize(
    ("rows", "dtype", "kind"), [(2, None, Transposed), (1, None, jax.Array), (2, "int8", Int8)]
)
def test_several_rows_have_transposed_matrices(rows, dtype, kind):
    model = tiny_model.make(eval__weight_dtype=dtype and WeightDType(dtype))
    layer = Step(model.components, batch_size=rows).prepare_params(model.params).token.layers[0]
    matrices = layer.query_key_value, layer.output, *(part.kernel for part in layer.feed_forward)
    assert all(isinstance(matrix, kind) for matrix in matrices)


@pytest.mark.parametrize("start", full_but(["masked"], ["masked", "zeros"]))
def test_a_prompt_has_the_scores_of_the_library_and_draws_its_tokens(start):
    step, weights, model = programs(model__compat__memory_start=start)
    rings = step.init_cache(weights)
    # What an earlier request left in the row.
    rings, _, _ = read(step, weights, rings, 2, ids(70, seed=8))
    if (beginning := step.empty_row(weights)) is not None:
        rings = step.put(rings, 2, beginning)
    rings, position, found = read(step, weights, rings, 2, PROMPT)
    nats = np.concatenate([scores.nats for scores in found])
    np.testing.assert_allclose(nats, model.score([PROMPT], per_token=True)[0], rtol=1e-5)
    assert [len(scores.nats) for scores in found] == [64, 16, 9] and position == 89
    state = step.take(rings, 2)
    for limits in ({"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}):
        rings = step.put(rings, 2, state)
        rings, drawn, of_drawn = write(step, weights, rings, 2, PROMPT[-1], position, 23, **limits)
        settings = GenerateConfig(length=23, top_k=None, seed=5, **limits)
        assert drawn == model.encode(model.generate([PROMPT], settings)[0]).tolist()
        whole = model.score([np.concatenate([PROMPT, drawn])], per_token=True)[0]
        np.testing.assert_allclose(of_drawn, whole[-23:], rtol=1e-4)


@pytest.mark.full
def test_int8_has_the_scores_of_the_library():
    """Other segments round elsewhere: what weights of int8 are multiplied with keeps 16 bits."""
    step, weights, model = programs(eval__weight_dtype=WeightDType.INT8)
    assert step.init_cache(weights).keys[0].dtype == "float32"
    _, _, found = read(step, weights, step.init_cache(weights), 2, PROMPT)
    nats, plain = (
        np.concatenate([scores.nats for scores in found]),
        programs()[2].score([PROMPT], per_token=True)[0],
    )
    np.testing.assert_allclose(nats, model.score([PROMPT], per_token=True)[0], rtol=0, atol=5e-3)
    assert np.abs(nats - plain).max() > 0.02
    step, weights, _ = programs(eval__cache_dtype=CacheDType.INT8)
    rings, position, found = read(step, weights, step.init_cache(weights), 1, PROMPT)
    rings, drawn, nats = write(step, weights, rings, 1, PROMPT[-1], position, 12, temperature=0.0)
    # And scales.
    assert {leaf.dtype.name for leaf in jax.tree.leaves(step.take(rings, 1).keys)} == {
        "int8",
        "float32",
    }
    whole = programs()[2].score([np.concatenate([PROMPT, drawn])], per_token=True)[0]
    assert 1e-4 < np.abs(np.concatenate([*(each.nats for each in found), nats]) - whole).max() < 0.2


def test_a_row_is_the_same_to_the_last_bit_whatever_the_others_do():
    step, weights, _ = programs()

    def busy(rows):
        for row in range(ROWS):
            rows.last[row], rows.position[row], rows.steps[row] = row, 3 + 7 * row, step.block - row
            rows.key[row], rows.temperature[row], rows.top_p[row] = (
                row_key(row),
                row / 2,
                1 - row / 5,
            )

    found = []
    for row, others in ((0, None), (3, None), (1, busy), (2, busy)):
        rings, position, scores = read(step, weights, step.init_cache(weights), row, PROMPT[:30])
        if others:  # The neighbour reads while this row writes.
            rings, _, _ = read(step, weights, rings, (row + 1) % ROWS, PROMPT)
        _, tokens, nats = write(step, weights, rings, row, PROMPT[29], position, 60, others=others)
        found.append((tokens, nats, [each.nats.tolist() for each in scores]))
    assert found == found[:1] * 4


def test_a_row_that_goes_back_draws_the_same_again():
    """To the first token of a call, after one in which the row was idle; the ring has no slot more
    than that needs.
    """
    step, weights, _ = programs(eval__mem_len=11, eval__same_length=False)
    assert step.capacity == step.mem_len + step.block
    rings, position, _ = read(step, weights, step.init_cache(weights), 0, PROMPT)
    rings, first, nats = write(
        step, weights, rings, 0, PROMPT[-1], position, step.block, temperature=0.0
    )
    others = Rows.idle(ROWS)
    others.last[0], others.position[0], others.steps[1] = (
        first[-1],
        position + step.block,
        step.block,
    )
    rings, _, _ = step.write(weights, rings, others)
    _, second, again = write(
        step, weights, rings, 0, first[0], position + 1, step.block - 1, temperature=0.0
    )
    assert first[1:] == second and nats[1:] == again


def test_several_devices_and_documents_kept_apart_are_refused():
    components = tiny_model.make().components
    mesh = jax.sharding.AbstractMesh((4, 2, 1), ("data", "fsdp", "tensor"))
    with pytest.raises(UserError, match="mesh of 8"):
        Step(dataclasses.replace(components, mesh=mesh), batch_size=ROWS)
    with pytest.raises(UserError, match="token 'c'"):
        Step(tiny_model.make(end_token=3, data__reset_at="c").components, batch_size=ROWS)
