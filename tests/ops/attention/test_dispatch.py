"""Tests of the entries to attention: arguments that do not match raise, and a device of a mesh
computes its part.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from support.attention_arrays import NAMES, draw
from txl_jax.config import MeshConfig
from txl_jax.ops.attention import (
    CachedVisibility,
    ProbabilityDropout,
    Visibility,
    attention,
    cached_attention,
)
from txl_jax.ops.attention.dispatch import Shards, shards_of
from txl_jax.sharding.mesh import abstract_mesh, use_mesh

B = 2
H = 3
L = 4
M = 6
E = 5
VISIBILITY = Visibility(jnp.asarray([M, 2]), segment_len=L, mem_len=M, window=7)
# All arrays but the position scores.
ARRAYS = NAMES[:6]


def replaced(arguments, changes):
    """Arguments of a call, some of them changed. A function changes the argument of the call."""
    result = dict(arguments)
    for name, new in changes.items():
        if callable(new):
            result[name] = new(arguments.get(name))
        else:
            result[name] = new
    return result


def sees(**changes):
    """Changes the visibility."""
    return lambda visibility: visibility.replace(**changes)


def as_type(dtype):
    """Changes the dtype of an array."""
    return lambda array: array.astype(dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"query": lambda array: array.tolist()}, "query.*list", id="a list"),
        pytest.param(
            {"query": lambda array: array[0]}, r"query.*\(3, 4, 5\)", id="a query of three axes"
        ),
        pytest.param(
            {"query": lambda array: array[:, :, :0], "visibility": sees(segment_len=0)},
            r"query.*\(2, 3, 0, 5\)",
            id="no queries",
        ),
        pytest.param(
            {"query": lambda array: array.swapaxes(1, 2)},
            r"query.*\[B, H, L, E\].*segment_len \(4\).*\(0, 2, 1, 3\)",
            id="queries before heads",
        ),
        pytest.param(
            {"key": lambda array: array[:, :, 1:]}, r"key.*\(2, 3, 9, 5\)", id="too few keys"
        ),
        pytest.param(
            {"position_key": lambda array: array.swapaxes(0, 1)},
            r"position_key.*\(10, 3, 5\)",
            id="position keys before heads",
        ),
        pytest.param(
            {"position_key": None},
            "content_bias and position_bias",
            id="biases without position keys",
        ),
        # Keys ahead of a query need L - 1 more position keys than the K of a causal call.
        pytest.param(
            {"visibility": sees(causal=False)},
            r"position_key.*\(3, 13, 5\)",
            id="too few position keys",
        ),
        pytest.param(
            {"content_bias": lambda array: array[0]},
            r"content_bias.*\(5,\)",
            id="a bias of one axis",
        ),
        pytest.param(
            {"position_score": np.zeros((H, M), np.float32)},
            r"position_score.*\(3, 6\)",
            id="too few position scores",
        ),
        pytest.param(
            {"query": as_type(int), "key": as_type(int), "value": as_type(int)},
            "query.*int32",
            id="integers",
        ),
        pytest.param({"value": as_type("bfloat16")}, "value.*bfloat16", id="another dtype"),
        pytest.param({"visibility": sees(window=0)}, "window .* got 0", id="window of 0"),
        pytest.param({"visibility": sees(valid=M)}, "valid .* got int", id="valid as a number"),
        pytest.param(
            {"visibility": sees(valid=np.zeros(B))}, "valid .* got float64", id="valid in float64"
        ),
        pytest.param(
            {"visibility": sees(lengths=np.ones(1, int))},
            r"lengths .* got int64 \[1\]",
            id="too few lengths",
        ),
        pytest.param(
            {"visibility": sees(document_start=np.zeros((1, 2), int))},
            "document_start .* got int64",
            id="too few document starts",
        ),
        pytest.param(
            {"key": lambda array: array[:, :, : L - 1], "visibility": sees(mem_len=-1)},
            "mem_len .* got -1",
            id="negative mem_len",
        ),
        pytest.param(
            {"dropout": ProbabilityDropout(0.5, jnp.uint32(7), H - 1)},
            "n_head .* got 2",
            id="dropout of fewer heads",
        ),
        pytest.param({"dropout": 0.5}, r"dropout .* got 0\.5", id="dropout as a number"),
        pytest.param(
            {"dropout": (np.float32(1), 7)}, r"dropout rate .* got 1\.0", id="dropout rate of 1"
        ),
        pytest.param(
            {"dropout": (-0.1, 7)}, r"dropout rate .* got -0\.1", id="negative dropout rate"
        ),
        pytest.param(
            {"dropout": (0.5, jax.random.PRNGKey(0))},
            "dropout seed .* got uint32",
            id="a key as seed",
        ),
    ],
)
def test_arguments_that_do_not_match_are_an_error(changes, words):
    """The error names the argument, with what it must have or what it got."""
    arguments = draw(VISIBILITY, H, E, names=ARRAYS) | {"visibility": VISIBILITY}

    with pytest.raises(ValueError, match=words):
        attention(**replaced(arguments, changes))


@pytest.mark.parametrize("implementation", ["reference", "tiled", "stored"])
def test_a_parameter_of_nnx_is_an_array(implementation):
    arguments = draw(VISIBILITY, H, E, names=ARRAYS) | {"visibility": VISIBILITY}
    arguments["implementation"] = implementation
    names = ("position_key", "content_bias", "position_bias")
    params = {name: nnx.Param(jnp.asarray(arguments[name])) for name in names}
    np.testing.assert_array_equal(attention(**{**arguments, **params}), attention(**arguments))


def arguments_over_a_cache(changes):
    """Arguments of `cached_attention`, some of them changed by their names.

    Arrays in the ring and in the positions have names here, so that each can be changed by itself.
    """
    segment = jnp.ones((B, H, L, E))
    arguments = dict.fromkeys(("query", "key", "value", "position_query"), segment)
    arguments["ring_key"] = jnp.ones((B, H, E, M))
    arguments["ring_value"] = jnp.ones((B, H, M, E))
    arguments["position_key"] = jnp.ones((H, E, M + L))
    arguments["position_score"] = jnp.ones((H, M + L))
    arguments["visibility"] = CachedVisibility(
        jnp.asarray([M, 2]), write_index=jnp.int32(0), segment_len=L, capacity=M, window=7
    )
    arguments = replaced(arguments, changes)

    # `cached_attention` has one argument for the ring, and one for the positions.
    ring = [arguments.pop(name) for name in ("ring_key", "ring_value")]
    position_names = ("position_query", "position_key", "position_score")
    position = [arguments.pop(name) for name in position_names]
    return {**arguments, "ring": tuple(ring), "position": tuple(position)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"query": lambda array: array[0]}, r"query.*\(3, 4, 5\)", id="a query of three axes"
        ),
        pytest.param(
            {"visibility": sees(segment_len=3)}, r"query.*segment_len \(3\)", id="too many queries"
        ),
        pytest.param(
            {"value": lambda array: array[..., 1:]}, r"value.*\(2, 3, 4, 4\)", id="narrow values"
        ),
        pytest.param(
            {"ring_key": lambda array: array.swapaxes(2, 3)},
            r"ring key.*\(2, 3, 6, 5\)",
            id="ring keys by rows",
        ),
        pytest.param(
            {"position_query": lambda array: array[:1]},
            r"position query.*\(1, 3, 4, 5\)",
            id="position queries of one row",
        ),
        pytest.param(
            {"position_score": lambda array: array[:, 1:]},
            r"position score.*\(3, 9\)",
            id="too few position scores",
        ),
        pytest.param(
            {"position_key": None, "position_score": None},
            "position must have keys",
            id="neither position keys nor scores",
        ),
        pytest.param(
            {"position_key": as_type("bfloat16")},
            "position key.*bfloat16",
            id="position keys of another dtype",
        ),
        pytest.param({"ring_value": as_type(int)}, "ring value.*int32", id="integers in the ring"),
        pytest.param(
            {"visibility": sees(valid=jnp.zeros(3, int))},
            r"valid .* got int32 \[3\]",
            id="valid of three rows",
        ),
        pytest.param(
            {"visibility": sees(write_index=0)},
            "write_index .* got int",
            id="write_index as a number",
        ),
        pytest.param({"visibility": sees(window=0)}, "window .* got 0", id="window of 0"),
    ],
)
def test_arguments_that_do_not_match_a_cache_are_an_error(changes, words):
    with pytest.raises(ValueError, match=words):
        cached_attention(**arguments_over_a_cache(changes))


# Meshes here are abstract and need no devices

# B, H, L and E of the arrays on all devices.
ON_ALL_DEVICES = (8, 4, 3, 2)


def plain_attention(query):
    """Attention of a segment to itself, without memory."""
    batch, _, segment_len, _ = query.shape
    visibility = Visibility(jnp.zeros(batch, jnp.int32), segment_len, 0)
    return attention(query, query, query, visibility=visibility)


def traced_shape(function):
    """The shape of a function of the queries, which is only traced."""
    return jax.eval_shape(function, jax.ShapeDtypeStruct(ON_ALL_DEVICES, jnp.float32)).shape


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param(
            {"data": 2, "fsdp": 2, "tensor": 2},
            Shards(rows=("data", "fsdp"), heads="tensor", batch=2, n_head=2),
            id="all axes",
        ),
        pytest.param(
            {"data": 8},
            Shards(rows=("data", "fsdp"), heads="tensor", batch=1, n_head=4),
            id="data",
        ),
        pytest.param(
            {"data": 3},
            Shards(rows=(), heads="tensor", batch=8, n_head=4),
            id="8 rows do not divide by 3",
        ),
        pytest.param(
            {"tensor": 8},
            Shards(rows=("data", "fsdp"), heads=None, batch=8, n_head=4),
            id="4 heads do not divide by 8",
        ),
    ],
)
def test_rows_and_heads_are_divided_where_they_divide(sizes, expected):
    # An axis that is not named has one device.
    config = MeshConfig(**{"data": 1} | sizes)

    with use_mesh(abstract_mesh(config, n_device=config.data * config.fsdp * config.tensor)):
        assert shards_of(8, 4) == expected
        assert traced_shape(plain_attention) == ON_ALL_DEVICES

    # Without a mesh nothing is divided.
    assert shards_of(8, 4) is None


# None of these meshes has all the axes of the project: data, fsdp and tensor.
@pytest.mark.parametrize("names", [("batch",), ("data",), ("data", "model")], ids=str)
def test_a_mesh_of_other_axes_is_left_to_the_caller(names):
    n_axis = len(names)
    mesh = AbstractMesh((2,) * n_axis, names, axis_types=(AxisType.Auto,) * n_axis)

    with use_mesh(mesh):
        assert shards_of(8, 4) is None
        assert traced_shape(plain_attention) == ON_ALL_DEVICES


def test_inside_a_shard_map_of_the_caller_arrays_are_those_of_one_device():
    """So attention does not divide them again."""
    shards = []

    def on_one_device(query):
        batch, n_head, _, _ = query.shape
        shards.append(shards_of(batch, n_head))
        return plain_attention(query)

    rows = PartitionSpec("data")
    with use_mesh(abstract_mesh(MeshConfig(), n_device=8)):
        mapped = jax.shard_map(on_one_device, in_specs=rows, out_specs=rows, check_vma=False)
        shape = traced_shape(jax.jit(mapped))

    assert shape == ON_ALL_DEVICES
    # The function may be traced more than once.
    assert shards
    assert set(shards) == {None}
