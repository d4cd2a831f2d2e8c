"""Tests of the parts of a whole model: tied positions, remat, dtypes, matmuls, norms, memory.

Values and gradients are compared with the original's in tests/test_golden.py.
"""

import collections
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import full_but, nightly_but
from txl_jax.config import AttentionWindow, DType, Encoding, NormPlace, Remat
from txl_jax.memory import Memory
from txl_jax.modules.block import layer_norm
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention.distances import sinusoids

L = 3
M = 8


class Results(NamedTuple):
    """Results of a call of the model, besides the loss."""

    hidden: jax.Array
    nll: jax.Array
    memory: Memory


def loss_of(model: TransformerXL, *, deterministic: bool = True):
    """(variables, rngs) -> (the sum of the losses, `Results`).

    Rows of the memory have no, some and all slots filled.
    """
    empty = model.init_memory(batch_size=tiny.B, mem_len=M)
    states = np.random.default_rng(2).normal(size=empty.hidden.shape).astype(empty.hidden.dtype)
    filled = empty.replace(hidden=states, valid=np.asarray([0, 5, M], np.int32))

    def loss(variables, rngs=None):
        encode = tiny.encoder(model, deterministic=deterministic)
        hidden, memory = encode(variables, tiny.text(L), filled, rngs)
        nll = model.apply(variables, hidden, tiny.text(L, seed=1), method=model.nll)
        return nll.sum(), Results(hidden, nll, memory)

    return loss


def test_tied_positions_are_the_keys_matrix_and_the_query_of_distance_zero(x64):
    """Against a model with separate matrices, filled in by hand."""
    tied = tiny.make(dtype=DType.FLOAT64, tie_positions=True, untie_r=False)
    params = tiny.variables(tied)["params"]
    layers = params["stack"]["layers"]
    assert set(layers["attention"]) == {"query", "key", "value", "output"}
    assert "biases" not in params["stack"]

    # The same numbers as the parameters of a model with separate matrices.
    separate = tiny.make(dtype=DType.FLOAT64, tie_positions=False, untie_r=True)
    code = np.asarray(sinusoids(jnp.zeros(1, int), tiny.D, jnp.float64)[0])
    query = np.einsum("d,ndhe->nhe", code, layers["attention"]["query"])
    separate_layers = {
        **layers,
        "attention": {**layers["attention"], "position_key": layers["attention"]["key"]},
        "biases": {"content": query, "position": query},
    }
    separate_params = {**params, "stack": {"layers": separate_layers}}

    def states(model, params):
        memory = model.init_memory(batch_size=tiny.B, mem_len=5)
        encode = tiny.encoder(model)
        return tiny.stream(encode, {"params": params}, tiny.text(12), [4, 4, 4], memory)

    np.testing.assert_allclose(states(tied, params), states(separate, separate_params), rtol=1e-12)


@pytest.mark.parametrize("remat", full_but([Remat.FULL], [Remat.DOTS, Remat.FULL]))
def test_remat_changes_neither_values_nor_gradients(remat, x64):
    """With dropout: it changes no mask, which the backward pass draws once more.

    The number of matmuls in the backward pass shows what is rematerialised.
    """
    variables = tiny.variables(tiny.make(dtype=DType.FLOAT64))
    rngs = {"dropout": jax.random.key(3, impl="rbg")}  # Compiles faster than the default.
    traced = {}
    n_matmul = {}
    for setting in (Remat.NONE, Remat.DOTS, Remat.FULL):
        model = tiny.make(
            dtype=DType.FLOAT64, remat=setting, dropout__rate=0.3, dropout__attention=0.2
        )
        step = jax.value_and_grad(loss_of(model, deterministic=False), has_aux=True)
        traced[setting] = jax.jit(step).trace(variables, rngs)
        n_matmul[setting] = len(matmul_shapes(traced[setting].jaxpr))

    results = traced[remat].lower().compile()(variables, rngs)

    expected = traced[Remat.NONE].lower().compile()(variables, rngs)
    tiny_run.assert_close(results, expected, atol=1e-11)
    assert n_matmul[Remat.NONE] < n_matmul[Remat.DOTS] < n_matmul[Remat.FULL]


def test_bfloat16_computes_close_to_float32():
    exact = tiny.make()
    fast = tiny.make(dtype=DType.BFLOAT16)
    variables = tiny.variables(fast)
    for path, leaf in jax.tree.leaves_with_path(variables):
        assert leaf.dtype == np.float32, jax.tree_util.keystr(path)

    def values_and_gradients(model):
        return jax.jit(jax.value_and_grad(loss_of(model), has_aux=True))(variables)

    (_, results), gradients = values_and_gradients(fast)
    (_, expected), expected_gradients = values_and_gradients(exact)

    assert results.hidden.dtype == jnp.bfloat16
    assert results.memory.hidden.dtype == jnp.bfloat16
    assert results.nll.dtype == jnp.float32
    # The distance of two bfloat16 numbers near 1 is 2**-7, about 0.008. Some tens of roundings
    # follow each other.
    assert 0 < distance(results.hidden, expected.hidden) < 0.01
    assert 0 < distance(results.nll, expected.nll) < 0.005
    for (path, gradient), expected_gradient in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(expected_gradients), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert gradient.dtype == jnp.float32, name
        assert distance(gradient, expected_gradient) < 0.03, name


def distance(array, expected) -> float:
    """Root mean square of the difference, relative to the expected values' root mean square."""
    array = np.asarray(array, np.float64)
    expected = np.asarray(expected, np.float64)
    return np.sqrt(np.mean((array - expected) ** 2) / np.mean(expected**2))


def matmul_shapes(jaxpr):
    """The shapes of both operands of every matmul, also of matmuls in inner programs."""
    shapes = []
    for equation in tiny.equations(jaxpr):
        if equation.primitive.name == "dot_general":
            first, second = equation.invars
            shapes.append((first.aval.shape, second.aval.shape))
    return shapes


def test_memory_and_segment_are_projected_apart():
    """No matmul over all K rows: it would round otherwise, and compute a gradient of the memory,
    which has none.
    """
    # Sizes that nothing else has, nor their sum.
    n_query = 7
    n_slot = 9
    model = tiny.make()
    memory = model.init_memory(batch_size=tiny.B, mem_len=n_slot)
    variables = {"params": tiny_run.params(model)}

    def loss(variables):
        hidden, _ = model.apply(variables, tiny.text(n_query), memory)
        return hidden.sum()

    n_projection = collections.Counter()
    for first, second in matmul_shapes(jax.make_jaxpr(jax.grad(loss))(variables)):
        sizes = {*first, *second}
        if not {tiny.B, tiny.D, tiny.H, tiny.E} <= sizes:
            continue
        for n_row in (n_slot, n_query, n_slot + n_query):
            n_projection[n_row] += n_row in sizes

    # Keys and values, and their gradients for the weights.
    assert n_projection[n_slot] == 2 + 2
    # Also queries and outputs, and gradients for the states.
    assert n_projection[n_query] == 4 + 4 + 4
    assert n_projection[n_slot + n_query] == 0


def test_layer_norm_takes_the_variance_of_centred_values():
    """The variance is 1. In float32 E[x^2] - E[x]^2 of these is 0 or 8."""
    norm = layer_norm("norm", tiny.CONFIG)

    @jax.jit
    def normalized(inputs):
        outputs, _ = norm.init_with_output(jax.random.key(0), inputs)
        return outputs

    inputs = np.asarray([9_999, 10_001], np.float32)
    np.testing.assert_allclose(normalized(inputs), [-1, 1], rtol=1e-4)


# The memory: segmentation and causality.

# Tokens of a text. Every segment length is a compilation.
T = 4


class Split(NamedTuple):
    """A model whose text is read in segments."""

    changes: dict[str, Any]  # Changes of the model.
    options: dict[str, Any]  # Options of a call.
    mem_len: int = T  # A window needs no more memory than its own width.


SPLITS = {
    "post": Split({}, {}),
    "pre": Split({"layer_norm": NormPlace.PRE}, {}),
    "clamp": Split({}, {"clamp_len": 3}),
    "window": Split({"untie_r": True}, {"same_length": True}, mem_len=3),
    "wider window": Split(
        {"compat__same_length_window": AttentionWindow.MEM_LEN_PLUS_ONE},
        {"same_length": True},
        mem_len=3,
    ),
}


def segmentations():
    """Yields the lengths of segments, for all ways to cut a text of T tokens."""
    for n_cut in range(T):
        for cuts in itertools.combinations(range(1, T), n_cut):
            yield np.diff([0, *cuts, T]).tolist()


@pytest.mark.parametrize("name", nightly_but(["pre", "window"], SPLITS))
def test_any_segmentation_gives_the_same_states(name, x64):
    changes, options, mem_len = SPLITS[name]
    model = tiny.make(dtype="float64", **changes)
    variables = tiny.variables(model)
    encode = tiny.encoder(model, **options)
    memory = model.init_memory(batch_size=tiny.B, mem_len=mem_len)

    whole, *parts = segmentations()
    # Each of the T - 1 places between tokens has a cut or none.
    assert whole == [T]
    assert len(parts) == 2 ** (T - 1) - 1
    expected = tiny.stream(encode, variables, tiny.text(T), whole, memory)

    for lengths in parts:
        states = tiny.stream(encode, variables, tiny.text(T), lengths, memory)
        np.testing.assert_allclose(
            states, expected, rtol=0, atol=1e-12, err_msg=f"segments of {lengths}"
        )


OPTIONS = [*itertools.product(Encoding, ({}, {"same_length": True}, {"clamp_len": 2}))]
QUICK = [*((encoding, {}) for encoding in Encoding), (Encoding.RELATIVE, {"same_length": True})]


@pytest.mark.parametrize(("encoding", "options"), nightly_but(QUICK, OPTIONS), ids=str)
def test_the_future_has_exactly_no_influence(options, encoding):
    n_token = 5
    model = tiny.make(encoding=encoding)
    variables = {"params": tiny_run.params(model)}
    tokens = tiny.text(n_token)
    encode = tiny.encoder(model, **options)
    empty = model.init_memory(batch_size=tiny.B, mem_len=3)
    _, memory = encode(variables, tiny.text(n_token, seed=1), empty)
    hidden = np.asarray(encode(variables, tokens, memory)[0])

    for t in range(n_token):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % tiny.V
        changed_hidden = np.asarray(encode(variables, changed, memory)[0])

        np.testing.assert_array_equal(
            changed_hidden[:, :t], hidden[:, :t], err_msg=f"states before token {t}"
        )
        is_changed = np.any(changed_hidden[:, t] != hidden[:, t], axis=-1)
        assert np.all(is_changed), f"states of token {t}"
