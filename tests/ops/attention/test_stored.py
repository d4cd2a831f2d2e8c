"""Tests of `stored` beyond the reference's numbers, which test_training has: narrow scores,
training, traffic.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import topologies
from experiments.bench.compiled.cost import cost_of
from ops.attention.tpu.test_compiled import no_compilation_cache  # noqa: F401 (a fixture)
from ops.attention.tpu.test_limits import TRAINING
from support import tiny_run
from txl_jax.ops.attention import AttentionCall, Implementation, Visibility, attention
from txl_jax.runs.attention_check import make_function, make_inputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_beyond_the_narrow_type_are_its_largest(dtype):
    """A query that meets one large score and others near 0 takes that key's value, and no nan."""
    n_keys, largest = 8, {"bfloat16": 1e7, "float16": 6e4}[dtype]
    rng = np.random.default_rng(0)
    query, *keys = (jnp.asarray(rng.normal(size=(2, 3, n, 4)), dtype) for n in (5, n_keys, n_keys))
    score = jnp.zeros((3, n_keys), dtype).at[:, 4].set(largest)
    query = query.at[0].multiply(100)  # Products of these reach 10^2 and more.
    visibility = Visibility(jnp.full(2, 3, jnp.int32), 5, 3)

    def sums(*arrays):
        return attention(
            *arrays, position_score=score, visibility=visibility, implementation="stored"
        )

    found, pull = jax.vjp(sums, query, *keys)
    exact = attention(
        *(array.astype(jnp.float32) for array in (query, *keys)),
        position_score=score.astype(jnp.float32),
        visibility=visibility,
        implementation="reference",
    )
    # All weight is on one key, whose value is narrow.
    np.testing.assert_array_equal(found.astype(np.float32), exact)
    assert all(
        np.isfinite(gradient.astype(np.float32)).all() for gradient in pull(jnp.ones_like(found))
    )


@pytest.mark.nightly(part="cases")
def test_200_updates_in_bfloat16_stay_beside_the_reference():
    """Losses fall from 3.8 to 3.0 nats; by rounding alone the reference in bfloat16 leaves float32
    by 0.028.
    """
    losses = {}
    for path, dtype in (
        ("stored", "bfloat16"),
        ("reference", "bfloat16"),
        ("reference", "float32"),
    ):
        changes = {"model__dtype": dtype, "model__attention": path, "model__d_model": 32}
        changes |= {
            "model__dropout__rate": 0.0,
            "model__dropout__attention": 0.1,
            "optimizer__learning_rate": 0.003,
        }
        metrics = tiny_run.train(200, **changes)[1]
        losses[path, dtype] = metrics.nats / metrics.tokens
    reference, exact = losses["reference", "bfloat16"], losses["reference", "float32"]
    assert exact[-20:].mean() < exact[0] - 0.5
    difference, rounding = losses["stored", "bfloat16"] - reference, reference - exact
    assert np.sqrt(np.mean(difference**2)) < np.sqrt(np.mean(rounding**2))  # 0.019 and 0.028 nats.
    assert abs(difference.mean()) < 0.01  # 0.004 nats.


def bytes_moved(program):
    """The bytes that a program's steps read and write."""
    return cost_of(program.as_text()).hbm_bytes


@functools.cache
def compiled(path, dropout):
    """The program of one layer of enwik8_24l with 8 rows, forward and backward."""
    [device] = topologies.devices("h200")
    n_head, segment_len, n_keys, width, n_positions = TRAINING["enwik8_24l"]
    sizes = 8, n_head, segment_len, n_keys, width, n_positions
    case = AttentionCall("gpu", "", "bfloat16", *sizes, dropout=dropout)
    placed = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.eval_shape(lambda: make_inputs(case, [n_keys - segment_len] * 8))
    inputs = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed) for name, a in shapes.items()
    }
    return jax.jit(make_function(Implementation(path), case)).lower(inputs).compile()


@pytest.mark.nightly(part="cuda")
@pytest.mark.parametrize("dropout", [False, True])
def test_it_moves_at_most_seven_tenths_of_the_references_bytes(dropout):
    """On an H200 they are 3.6 and 3.9 of 6.1 GB; the reference's own are counted as they are
    known.

    Scratch of one layer alone is 0.62 of 1.21 GB. It was 0.52 before the constants of the masks
    were tied to the layer, which makes a whole step's peak smaller (`test_compiled_steps`).
    """
    stored, reference = (compiled(path, dropout) for path in ("stored", "reference"))
    assert bytes_moved(reference) == pytest.approx(6.14e9, rel=0.1)
    assert bytes_moved(stored) <= 0.7 * bytes_moved(reference)
    scratch = [each.memory_analysis().temp_size_in_bytes for each in (stored, reference)]
    assert scratch[0] <= 0.52 * scratch[1]
