"""Tests of the encodings that the paper compares with: their parameters, and what distances beyond a table get.

Values and gradients are compared with the original's in tests/test_golden.py, and inference with training in
tests/inference/test_forward.py.
"""

import flax.traverse_util
import jax
import numpy as np
import pytest

from support import tiny
from txl_jax.config import CompatConfig, DType, Encoding, ShawTerms

L, M, N_POSITION = 5, 4, 6
ORIGINAL = CompatConfig(shaw_terms=ShawTerms.ORIGINAL)


def make(encoding: Encoding, **changes):
    return tiny.make(encoding=encoding, num_positions=changes.pop("num_positions", N_POSITION), **changes)


def shapes(model) -> dict[str, tuple[int, ...]]:
    variables = jax.eval_shape(lambda: tiny.variables(model))
    return {path: leaf.shape for path, leaf in flax.traverse_util.flatten_dict(variables, sep="/").items()}


@pytest.mark.parametrize(
    ("model", "learned"),
    [
        (make(Encoding.SHAW), {"attention/positions/key": (N_POSITION, tiny.H, tiny.E)}),
        (
            make(Encoding.SHAW, compat=ORIGINAL),
            {
                "attention/positions/key": (N_POSITION, tiny.H, tiny.E),
                "attention/positions/score": (N_POSITION, tiny.H),
                "attention/positions/content": (tiny.H, tiny.E),
            },
        ),
        (make(Encoding.AL_RFOU), {"positions/vector": (N_POSITION, tiny.D)}),
    ],
    ids=["shaw", "shaw, as the original", "al_rfou"],
)
def test_each_layer_learns_a_table(model, learned):
    without = shapes(tiny.make(encoding=Encoding.VASWANI))
    of_layers = {f"params/stack/layers/{path}": (tiny.N, *shape) for path, shape in learned.items()}
    assert shapes(model) == without | of_layers


@pytest.mark.parametrize("encoding", [Encoding.SHAW, Encoding.AL_RFOU])
@pytest.mark.parametrize("clamp_len", [None, 2, 30])
def test_distances_beyond_the_table_or_the_clamp_share_the_last_one(encoding, clamp_len, x64):
    """A table that goes on with copies of the last row that counts gives the same."""
    short, long = (make(encoding, num_positions=n, dtype=DType.FLOAT64) for n in (3, L + M))
    variables, last = tiny.variables(short), min(clamp_len or 2, 2)

    def lengthen(path, leaf):
        if "positions" not in [key.key for key in path]:
            return leaf
        return leaf[:, np.minimum(np.arange(L + M), last)]

    longer = jax.tree_util.tree_map_with_path(lengthen, variables)
    text = tiny.text(2 * L)
    memory = short.init_memory(batch_size=tiny.B, mem_len=M)
    found = tiny.stream(tiny.encoder(short, clamp_len=clamp_len), variables, text, [L, L], memory)
    expected = tiny.stream(tiny.encoder(long), longer, text, [L, L], memory)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_al_rfous_memory_keeps_inputs_with_their_positions():
    """Keys and values of the past do not change: nothing is added to what is stored."""
    model = make(Encoding.AL_RFOU)
    variables = tiny.variables(model)
    _, memory = tiny.encoder(model)(variables, tiny.text(L), model.init_memory(batch_size=tiny.B, mem_len=M))
    embedded = model.apply(variables, tiny.text(L), clamp_len=None, method=model.embed)
    vectors = variables["params"]["stack"]["layers"]["positions"]["vector"][0]
    distances = np.arange(L - 1, -1, -1)
    np.testing.assert_allclose(memory.hidden[0], (embedded + vectors[distances][None])[:, -M:], rtol=1e-6)
