"""Tests of the model's parts in place: tied positions, remat, types, products, norms.

Values and gradients are compared with the original's in tests/test_golden.py.
"""

import collections

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny
from support.cases import nightly_but
from txl_jax.config import DType, Remat
from txl_jax.modules.block import layer_norm
from txl_jax.modules.transformer_xl import TransformerXL
from txl_jax.ops.attention import positions

L, M = 3, 8


def some_memory(model: TransformerXL):
    """A memory with a different number of filled slots in each row."""
    memory = model.init_memory(batch_size=tiny.B, mem_len=M)
    states = np.random.default_rng(2).normal(size=memory.hidden.shape).astype(memory.hidden.dtype)
    return memory.replace(hidden=jnp.asarray(states), valid=jnp.asarray([0, 5, M], jnp.int32))


def loss_of(model: TransformerXL, *, deterministic: bool = True):
    """(variables, rngs) -> (summed nll, (hidden, nll, memory))."""

    @jax.jit
    def loss(variables, rngs=None):
        encode = tiny.encoder(model, deterministic=deterministic)
        hidden, memory = encode(variables, tiny.text(L), some_memory(model), rngs)
        nll = model.apply(variables, hidden, tiny.text(L, seed=1), method=model.nll)
        return nll.sum(), (hidden, nll, memory)

    return loss


def test_tied_positions_are_the_keys_matrix_and_the_query_of_distance_zero(x64):
    """Against a model with matrices of their own, filled in by hand."""
    tied, own = (tiny.make(dtype=DType.FLOAT64, tie_positions=tie, untie_r=not tie) for tie in (True, False))
    params = tiny.variables(tied)["params"]
    layers = params["stack"]["layers"]
    assert set(layers["attention"]) == {"query", "key", "value", "output"} and "biases" not in params["stack"]
    code = positions.sinusoids(jnp.zeros(1, int), tiny.D, jnp.float64)[0]
    query = jnp.einsum("d,ndhe->nhe", code, layers["attention"]["query"])
    filled = {
        **layers,
        "attention": {**layers["attention"], "position_key": layers["attention"]["key"]},
        "biases": {"content": query, "position": query},
    }
    same = {"params": {**params, "stack": {"layers": filled}}}
    memory = own.init_memory(batch_size=tiny.B, mem_len=5)
    found, expected = (
        tiny.stream(tiny.encoder(model), of, tiny.text(11), [4, 4, 3], memory)
        for model, of in ((tied, {"params": params}), (own, same))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("remat", nightly_but([Remat.FULL], [Remat.DOTS, Remat.FULL]))
def test_remat_changes_neither_values_nor_gradients(remat, x64):
    traced, products, rngs = {}, {}, {"dropout": jax.random.key(3, impl="rbg")}  # Which compiles faster.
    variables = tiny.variables(tiny.make(dtype=DType.FLOAT64))
    for of in Remat:
        model = tiny.make(dtype=DType.FLOAT64, remat=of, dropout__rate=0.3, dropout__attention=0.2)
        step = jax.value_and_grad(loss_of(model, deterministic=False), has_aux=True)
        traced[of] = jax.jit(step).trace(variables, rngs)
        products[of] = len(list(products_of(traced[of].jaxpr.jaxpr)))
    found, expected = (traced[of].lower().compile()(variables, rngs) for of in (remat, Remat.NONE))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11)
    # The number of matrix products in the backward pass shows what is rematerialised.
    assert products[Remat.NONE] < products[Remat.DOTS] < products[Remat.FULL]


def test_bfloat16_computes_close_to_float32():
    exact, fast = tiny.make(), tiny.make(dtype=DType.BFLOAT16)
    variables = tiny.variables(fast)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    (_, (hidden, nll, _)), gradients = jax.jit(jax.value_and_grad(loss_of(exact), has_aux=True))(variables)
    (_, (fast_hidden, fast_nll, memory)), fast_gradients = jax.jit(jax.value_and_grad(loss_of(fast), has_aux=True))(
        variables
    )
    assert (fast_hidden.dtype, memory.hidden.dtype, fast_nll.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    # The distance of two bfloat16 numbers near 1 is 2**-7; some tens of roundings follow each other.
    assert 0 < distance(fast_hidden, hidden) < 0.01
    assert 0 < distance(fast_nll, nll) < 0.005
    paths = flax.traverse_util.flatten_dict(gradients, sep="/")
    for path, found in flax.traverse_util.flatten_dict(fast_gradients, sep="/").items():
        assert found.dtype == jnp.float32
        assert distance(found, paths[path]) < 0.03, path


def distance(found, expected) -> float:
    """Root mean square of the difference, relative to that of the expected values."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))


def products_of(jaxpr):
    """Yields the shapes of both operands of every matrix product, those of inner programs too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(operand.aval.shape for operand in equation.invars)
        for value in jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products_of(inner)


def test_memory_and_segment_are_projected_apart():
    """No product over all K rows: it would round otherwise, and compute a gradient of the memory, which has none."""
    n_query, n_slot = 7, 9  # Sizes that nothing else has, and neither has their sum.
    model = tiny.make()
    memory, variables = model.init_memory(batch_size=tiny.B, mem_len=n_slot), tiny.variables(model)

    def loss(variables):
        return model.apply(variables, tiny.text(n_query), memory)[0].sum()

    def count(function):
        """Counts products with a projection [D, H, E], by the rows of each row of the batch."""
        rows = [
            size
            for shapes in products_of(jax.make_jaxpr(function)(variables).jaxpr)
            if {tiny.B, tiny.D, tiny.H, tiny.E} <= (sizes := set(sum(shapes, ())))
            for size in sizes & {n_query, n_slot, n_query + n_slot}
        ]
        return dict(collections.Counter(rows))

    # Forward those for queries, keys, values and outputs. Backward their gradients for the weights, and of the segment
    # for the states.
    assert count(loss) == {n_query: 4, n_slot: 2}
    assert count(jax.grad(loss)) == {n_query: 4 + 4 + 4, n_slot: 2 + 2}


def test_layer_norm_takes_the_variance_of_centred_values():
    """In float32 E[x^2] - E[x]^2 of these is 0 or 8."""
    norm = layer_norm("norm", tiny.CONFIG)
    found, _ = norm.init_with_output(jax.random.key(0), jnp.asarray([9_999.0, 10_001.0]))
    np.testing.assert_allclose(found, [-1, 1], rtol=1e-4)
