"""Tests of the model's parts in place: tied positions, remat, types, products, norms, memory.

Values and gradients are compared with the original's in tests/test_golden.py.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from support.cases import nightly_but
from txl_jax.config import AttentionWindow, DType, Encoding, NormPlace, Remat
from txl_jax.modules.block import layer_norm
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention.distances import sinusoids

L, M = 3, 8


def loss_of(model: TransformerXL, *, deterministic: bool = True):
    """(variables, rngs) -> (summed nll, (hidden, nll, memory)).

    Rows have different numbers of filled slots.
    """
    empty = model.init_memory(batch_size=tiny.B, mem_len=M)
    states = np.random.default_rng(2).normal(size=empty.hidden.shape).astype(empty.hidden.dtype)
    filled = empty.replace(hidden=jnp.asarray(states), valid=jnp.asarray([0, 5, M], jnp.int32))

    @jax.jit
    def loss(variables, rngs=None):
        encode = tiny.encoder(model, deterministic=deterministic)
        hidden, memory = encode(variables, tiny.text(L), filled, rngs)
        nll = model.apply(variables, hidden, tiny.text(L, seed=1), method=model.nll)
        return nll.sum(), (hidden, nll, memory)

    return loss


def test_tied_positions_are_the_keys_matrix_and_the_query_of_distance_zero(x64):
    """Against a model with matrices of their own, filled in by hand."""
    tied, own = (
        tiny.make(dtype=DType.FLOAT64, tie_positions=tie, untie_r=not tie) for tie in (True, False)
    )
    params = tiny.variables(tied)["params"]
    layers = params["stack"]["layers"]
    assert (
        set(layers["attention"]) == {"query", "key", "value", "output"}
        and "biases" not in params["stack"]
    )
    code = sinusoids(jnp.zeros(1, int), tiny.D, jnp.float64)[0]
    query = jnp.einsum("d,ndhe->nhe", code, layers["attention"]["query"])
    attention = {**layers["attention"], "position_key": layers["attention"]["key"]}
    filled = {**layers, "attention": attention, "biases": {"content": query, "position": query}}
    memory = own.init_memory(batch_size=tiny.B, mem_len=5)
    found, expected = (
        tiny.stream(tiny.encoder(model), {"params": of}, tiny.text(11), [4, 4, 3], memory)
        for model, of in ((tied, params), (own, {**params, "stack": {"layers": filled}}))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("remat", nightly_but([Remat.FULL], [Remat.DOTS, Remat.FULL]))
def test_remat_changes_neither_values_nor_gradients(remat, x64):
    # Which compiles faster.
    traced, products, rngs = {}, {}, {"dropout": jax.random.key(3, impl="rbg")}
    variables = tiny.variables(tiny.make(dtype=DType.FLOAT64))
    for of in (Remat.NONE, Remat.DOTS, Remat.FULL):
        model = tiny.make(dtype=DType.FLOAT64, remat=of, dropout__rate=0.3, dropout__attention=0.2)
        step = jax.value_and_grad(loss_of(model, deterministic=False), has_aux=True)
        traced[of] = jax.jit(step).trace(variables, rngs)
        products[of] = len(products_of(traced[of].jaxpr))
    found, expected = (traced[of].lower().compile()(variables, rngs) for of in (remat, Remat.NONE))
    tiny_run.assert_close(found, expected, atol=1e-11)
    # The number of matrix products in the backward pass shows what is rematerialised.
    assert products[Remat.NONE] < products[Remat.DOTS] < products[Remat.FULL]


def test_bfloat16_computes_close_to_float32():
    exact, fast = tiny.make(), tiny.make(dtype=DType.BFLOAT16)
    variables = tiny.variables(fast)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    (expected, gradients), (found, fast_gradients) = (
        jax.jit(jax.value_and_grad(loss_of(model), has_aux=True))(variables)
        for model in (exact, fast)
    )
    (hidden, nll, _), (fast_hidden, fast_nll, memory) = expected[1], found[1]
    assert (fast_hidden.dtype, memory.hidden.dtype, fast_nll.dtype) == (
        jnp.bfloat16,
        jnp.bfloat16,
        jnp.float32,
    )
    # The distance of two bfloat16 numbers near 1 is 2**-7; some tens of roundings follow each
    # other.
    assert 0 < distance(fast_hidden, hidden) < 0.01
    assert 0 < distance(fast_nll, nll) < 0.005
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(fast_gradients), jax.tree.leaves(gradients), strict=True
    ):
        assert leaf.dtype == jnp.float32 and distance(leaf, other) < 0.03, path


def distance(found, expected) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))


def products_of(jaxpr):
    """The shapes of both operands of every matrix product, those of inner programs too."""
    found = (each for each in tiny.equations(jaxpr) if each.primitive.name == "dot_general")
    return [tuple(operand.aval.shape for operand in each.invars) for each in found]


def test_memory_and_segment_are_projected_apart():
    """No product over all K rows: it would round otherwise, and compute a gradient of the memory,
    which has none.
    """
    n_query, n_slot = 7, 9  # Sizes that nothing else has, and neither has their sum.
    model = tiny.make()
    memory, variables = model.init_memory(batch_size=tiny.B, mem_len=n_slot), tiny.variables(model)
    gradient = jax.grad(
        lambda variables: model.apply(variables, tiny.text(n_query), memory)[0].sum()
    )
    sizes = [set(sum(shapes, ())) for shapes in products_of(jax.make_jaxpr(gradient)(variables))]
    projections = [each for each in sizes if {tiny.B, tiny.D, tiny.H, tiny.E} <= each]
    # Of the memory keys and values, and their gradients for the weights. Of the segment queries and
    # outputs too, and gradients for the states.
    rows = {n: sum(n in each for each in projections) for n in (n_slot, n_query, n_query + n_slot)}
    assert rows == {n_slot: 2 + 2, n_query: 4 + 4 + 4, n_query + n_slot: 0}


def test_layer_norm_takes_the_variance_of_centred_values():
    """In float32 E[x^2] - E[x]^2 of these is 0 or 8."""
    norm = layer_norm("norm", tiny.CONFIG)
    found, _ = norm.init_with_output(jax.random.key(0), jnp.asarray([9_999.0, 10_001.0]))
    np.testing.assert_allclose(found, [-1, 1], rtol=1e-4)


# The memory: segmentation and causality.

# Every segment length is a compilation.
T = 5
# Changes of the model, options, memory length. A window needs no more memory than its own width.
SPLITS = {
    "post": ({}, {}, T),
    "pre": ({"layer_norm": NormPlace.PRE}, {}, T),
    "clamp": ({}, {"clamp_len": 3}, T),
    "window": ({"untie_r": True}, {"same_length": True}, 3),
    "wider window": (
        {"compat__same_length_window": AttentionWindow.MEM_LEN_PLUS_ONE},
        {"same_length": True},
        3,
    ),
}


@pytest.mark.parametrize("name", nightly_but(["pre", "window"], SPLITS))
def test_any_segmentation_gives_the_same_states(name, x64):
    changes, options, mem_len = SPLITS[name]
    model = tiny.make(dtype="float64", **changes)
    variables, encode = tiny.variables(model), tiny.encoder(model, **options)
    memory = model.init_memory(batch_size=tiny.B, mem_len=mem_len)
    found = [
        tiny.stream(
            encode,
            variables,
            tiny.text(T),
            [b - a for a, b in itertools.pairwise([0, *cuts, T])],
            memory,
        )
        for count in range(T)
        for cuts in itertools.combinations(range(1, T), count)
    ]
    assert len(found) == 2 ** (T - 1)
    for states in found[1:]:
        np.testing.assert_allclose(states, found[0], rtol=0, atol=1e-12)


OPTIONS = [*itertools.product(Encoding, ({}, {"same_length": True}, {"clamp_len": 2}))]
QUICK = [*((encoding, {}) for encoding in Encoding), (Encoding.RELATIVE, {"same_length": True})]


@pytest.mark.parametrize(("encoding", "options"), nightly_but(QUICK, OPTIONS), ids=str)
def test_the_future_has_exactly_no_influence(options, encoding):
    model, tokens = tiny.make(encoding=encoding), tiny.text(T)
    variables, encode = tiny.variables(model), tiny.encoder(model, **options)
    _, memory = encode(
        variables, tiny.text(T, seed=1), model.init_memory(batch_size=tiny.B, mem_len=3)
    )
    hidden, _ = encode(variables, tokens, memory)
    for t in range(T):
        changed = tokens.copy()
        changed[:, t] = (changed[:, t] + 1) % tiny.V
        other, _ = encode(variables, changed, memory)
        np.testing.assert_array_equal(other[:, :t], hidden[:, :t])
        assert np.all(np.any(other[:, t] != hidden[:, t], axis=-1))
