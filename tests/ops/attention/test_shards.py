"""Tests of the part of attention that a device of a mesh computes; meshes here are abstract and need no devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from txl_jax import sharding
from txl_jax.config import MeshConfig
from txl_jax.ops.attention import Visibility, attention
from txl_jax.ops.attention.dispatch import Shards, shards_of

ROWS = ("data", "fsdp")


def shape_of_attention(batch):
    """The shape of what `attention` returns for H = 4, L = 3, E = 2, by tracing alone."""
    arrays = [jax.ShapeDtypeStruct((batch, 4, 3, 2), jnp.float32)] * 3
    visibility = Visibility(jnp.zeros(batch, jnp.int32), 3, 0)
    return jax.eval_shape(lambda *given: attention(*given, visibility=visibility), *arrays).shape


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, Shards(ROWS, "tensor", 2, 2)),
        ({"data": 8}, Shards(ROWS, "tensor", 1, 4)),
        ({"data": 3}, Shards((), "tensor", 8, 4)),  # 8 rows do not divide.
        ({"tensor": 8}, Shards(ROWS, None, 8, 4)),  # 4 heads do not.
    ],
)
def test_rows_and_heads_are_divided_where_they_divide(sizes, expected):
    config = MeshConfig(**{"data": 1} | sizes)
    with sharding.use_mesh(sharding.abstract_mesh(config, n_device=config.data * config.fsdp * config.tensor)):
        assert shards_of(8, 4) == expected
        assert shape_of_attention(8) == (8, 4, 3, 2)
    assert shards_of(8, 4) is None


def test_a_mesh_of_other_axes_is_left_to_the_caller():
    for names in (("batch",), ("data",), ("data", "model")):
        with sharding.use_mesh(AbstractMesh((2,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))):
            assert shards_of(8, 4) is None and shape_of_attention(8) == (8, 4, 3, 2)


def test_inside_a_shard_map_of_the_caller_arrays_are_those_of_one_device():
    seen = []

    def on_one(query):
        seen.append(shards_of(*query.shape[:2]))
        visibility = Visibility(jnp.zeros(query.shape[0], jnp.int32), 3, 0)
        return attention(query, query, query, visibility=visibility)

    with sharding.use_mesh(sharding.abstract_mesh(MeshConfig(), n_device=8)):
        mapped = jax.shard_map(on_one, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False)
        found = jax.eval_shape(jax.jit(mapped), jax.ShapeDtypeStruct((8, 4, 3, 2), jnp.float32))
    assert seen and set(seen) == {None} and found.shape == (8, 4, 3, 2)
