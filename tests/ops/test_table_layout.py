"""Tests of the layout of embedding tables on TPUs, from programs lowered for a platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax import TransformerXL
from txl_jax.config import MeshConfig
from txl_jax.ops import adaptive_softmax, table_layout
from txl_jax.ops.adaptive_softmax import Cluster
from txl_jax.sharding.mesh import abstract_mesh, use_mesh

# The table of WikiText-103. A TPU would pad its 410 columns to 512.
SHAPE = (267_735, 410)


@pytest.mark.parametrize(
    ("shape", "by_columns"),
    [
        pytest.param(SHAPE, True, id="wt103_base"),
        pytest.param((20_000, 1024), False, id="wt103_large, a head without padding"),
        pytest.param((160_000, 64), True, id="wt103_large, a tail of 64 columns"),
        pytest.param((67_735, 16), False, id="wt103_large, a tail that is too small"),
        pytest.param((267_735, 128), False, id="128 columns, which fill each tile"),
        pytest.param((267_735, 136), True, id="136 columns, which fill some tiles"),
        pytest.param((205, 512), False, id="a vocabulary of bytes"),
    ],
)
def test_which_tables_a_tpu_stores_by_columns(shape, by_columns):
    """The rule follows the compiler: for wt103_base, a program of libtpu 0.0.42.1 has the parameter
    `f32[267735,410]{0,1}`, where {0,1} means by columns.
    """
    assert table_layout.is_stored_by_columns(shape) == by_columns


def test_a_sharded_table_is_left_to_the_partitioner():
    with use_mesh(abstract_mesh(MeshConfig(fsdp=2), 2)):
        assert not table_layout.is_stored_by_columns(SHAPE)


def lowered(platform: str, shape: tuple[int, int] = SHAPE) -> str:
    """The program for the gradient of a tied table, which is a lookup table and a factor."""

    def loss(table, tokens):
        table = table_layout.turn_gradient(table)
        vectors = adaptive_softmax.embed(
            tokens, [Cluster(table, None, None)], (), dtype=jnp.bfloat16
        )
        return (vectors @ table.astype(jnp.bfloat16).T).sum()

    traced = jax.jit(jax.grad(loss)).trace(
        jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((4, 5), jnp.int32)
    )
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_on_a_tpu_a_gradient_is_turned():
    """The constraint asks for the gradient by columns, where the table is stored by columns."""
    assert lowered("tpu").count("@LayoutConstraint(") == 1
    # 512 columns fill their tiles, so the table is stored by rows.
    assert "LayoutConstraint" not in lowered("tpu", (267_735, 512))
    for platform in ("cpu", "cuda"):
        assert "LayoutConstraint" not in lowered(platform)


def gathers(platform: str) -> list[str]:
    """The lines of `lowered` that look up rows."""
    lines = lowered(platform).splitlines()
    return [line for line in lines if '"stablehlo.gather"' in line]


def test_on_a_tpu_rows_are_looked_up_in_the_compute_dtype():
    (on_tpu,) = gathers("tpu")
    assert "tensor<267735x410xbf16>" in on_tpu

    (on_cpu,) = gathers("cpu")
    assert "tensor<267735x410xf32>" in on_cpu


@pytest.fixture
def all_tables(monkeypatch):
    """Applies the rule for large tables to small ones."""
    monkeypatch.setattr(table_layout, "_MIN_SIZE", 0)


def take_plainly(table, rows):
    return jnp.take(table, rows, axis=0).astype(jnp.bfloat16)


def take_by_layout(table, rows):
    return table_layout.take_rows(table, rows, jnp.dtype(jnp.bfloat16))


def on_a_tpu(*args, tpu, default):
    """Takes the branch for TPUs of `jax.lax.platform_dependent`."""
    del default
    return tpu(*args)


@pytest.mark.parametrize("look_up", ["as on a CPU", "as on a TPU"])
def test_no_bit_of_a_lookup_or_of_its_gradient_changes(look_up, all_tables, monkeypatch):
    """One token occurs 1,000 times: a bfloat16 sum of ones stops at 256."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(300, 5)).astype(np.float32))
    rows = jnp.asarray([[0, 299, *(7,) * 1000]])
    weights = rng.normal(size=(1, 1002, 5)).astype(np.float32)
    assert table_layout.is_stored_by_columns(table.shape)

    def total_and_gradient(take):
        def total(table):
            return jnp.sum(weights * take(table, rows).astype(jnp.float32))

        # Without `jit`, which would leave out roundings to bfloat16.
        return jax.value_and_grad(total)(table)

    expected_total, expected_gradient = total_and_gradient(take_plainly)
    if look_up == "as on a TPU":
        monkeypatch.setattr(jax.lax, "platform_dependent", on_a_tpu)
    found_total, found_gradient = total_and_gradient(take_by_layout)

    np.testing.assert_array_equal(found_total, expected_total)
    np.testing.assert_array_equal(found_gradient, expected_gradient)


def test_members_of_an_ensemble_keep_their_layouts(all_tables):
    """Under `vmap` a constraint has one more axis."""

    def gradient(table):
        return jax.grad(lambda table: jnp.sum(table_layout.turn_gradient(table) ** 2))(table)

    traced = jax.jit(jax.vmap(gradient)).trace(jax.ShapeDtypeStruct((2, 300, 5), jnp.float32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@LayoutConstraint(") == 1


def test_the_tables_of_a_model_keep_their_layouts(all_tables):
    """Two of three tables do: 300 rows of 16 columns, and 512 rows of 8 columns.

    A single tile holds the third one, of 8 rows and 4 columns. Each of the two counts twice, since
    two functions use it: the gradient of the lookup, and the gradient of the softmax.
    """
    config = tiny.model_config(
        n_layer=1,
        d_model=16,
        d_embed=None,
        cutoffs=(300, 812),
        div_val=2,
        tie_projs=(False, False, False),
    )
    model = TransformerXL(config, 820, None)
    params = tiny_run.params(model)
    tokens = jnp.zeros((2, 3), jnp.int32)

    def loss(params):
        memory = model.init_memory(batch_size=2, mem_len=4)
        hidden, _ = model.apply(
            {"params": params},
            tokens,
            memory,
            clamp_len=None,
            same_length=False,
            deterministic=True,
        )
        return jnp.sum(model.apply({"params": params}, hidden, tokens, method=model.nll))

    traced = jax.jit(jax.grad(loss)).trace(params)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@LayoutConstraint(") == 4


def test_a_large_table_has_a_forward_derivative_where_nothing_is_turned():
    """The TPU's functions have no forward derivative. On a CPU a large table is like any table."""
    table = jnp.asarray(np.ones((33_000, 200), np.float32))
    rows = jnp.asarray([3, 5])
    assert table_layout.is_stored_by_columns(table.shape)

    def total(table):
        vectors = table_layout.take_rows(table_layout.turn_gradient(table), rows, jnp.bfloat16)
        return jnp.sum(vectors.astype(jnp.float32) ** 2)

    value, tangent = jax.jit(lambda table: jax.jvp(total, (table,), (table,)))(table)

    # A sum of squares of two rows of 200 ones, and its derivative along the ones.
    assert value == 2 * 200
    assert tangent == 2 * 2 * 200
