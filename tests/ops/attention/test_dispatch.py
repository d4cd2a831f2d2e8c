"""Tests of the entries to attention: what does not fit is refused, and a device of a mesh computes
its part.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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

B, H, L, M, E = 2, 3, 4, 6, 5
VISIBILITY = Visibility(jnp.asarray([M, 2]), L, M, 7)


def changed(**changes):
    """Arguments of a call, some of them changed; a function changes the argument that is there."""
    return replaced(draw(VISIBILITY, H, E, names=NAMES[:6]) | {"visibility": VISIBILITY}, changes)


def replaced(given, changes):
    return given | {
        name: new(given.get(name)) if callable(new) else new for name, new in changes.items()
    }


def sees(**changes):
    return lambda old: old.replace(**changes)


def as_type(dtype):
    return lambda old: old.astype(dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": lambda old: old.tolist()}, "query.*list"),
        ({"query": lambda old: old[0]}, r"query.*\(3, 4, 5\)"),
        (
            {"query": lambda old: old[:, :, :0], "visibility": sees(segment_len=0)},
            r"query.*\(2, 3, 0, 5\)",
        ),
        ({"query": lambda old: old.swapaxes(1, 2)}, r"query.*segment_len \(4\)"),
        ({"key": lambda old: old[:, :, 1:]}, r"key.*\(2, 3, 9, 5\)"),
        ({"position_key": lambda old: old.swapaxes(0, 1)}, r"position_key.*\(10, 3, 5\)"),
        ({"position_key": None}, "content_bias and position_bias"),
        ({"visibility": sees(causal=False)}, r"position_key.*\(3, 13, 5\)"),
        ({"content_bias": lambda old: old[0]}, r"content_bias.*\(5,\)"),
        ({"position_score": np.zeros((H, M), np.float32)}, r"position_score.*\(3, 6\)"),
        ({name: as_type(int) for name in ("query", "key", "value")}, "query.*int32"),
        ({"value": as_type("bfloat16")}, "value.*bfloat16"),
        ({"visibility": sees(window=0)}, "window .* got 0"),
        ({"visibility": sees(valid=M)}, "valid .* got int"),
        ({"visibility": sees(valid=np.zeros(B))}, "valid .* got float64"),
        ({"visibility": sees(lengths=np.ones(1, int))}, r"lengths .* got int64 \[1\]"),
        ({"visibility": sees(document_start=np.zeros((1, 2), int))}, "document_start .* got int64"),
        (
            {"key": lambda old: old[:, :, : L - 1], "visibility": sees(mem_len=-1)},
            "mem_len .* got -1",
        ),
        ({"dropout": ProbabilityDropout(0.5, jnp.uint32(7), H - 1)}, "n_head .* got 2"),
        ({"dropout": 0.5}, r"dropout .* got 0\.5"),
        ({"dropout": (np.float32(1), 7)}, r"dropout rate .* got 1\.0"),
        ({"dropout": (-0.1, 7)}, r"dropout rate .* got -0\.1"),
        ({"dropout": (0.5, jax.random.PRNGKey(0))}, "dropout seed .* got uint32"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        attention(**changed(**changes))


def cached(**changes):
    names = (
        "query",
        "key",
        "value",
        "ring_key",
        "ring_value",
        "position_query",
        "position_key",
        "position_score",
    )
    shapes = [(B, H, L, E)] * 3 + [
        (B, H, E, M),
        (B, H, M, E),
        (B, H, L, E),
        (H, E, M + L),
        (H, M + L),
    ]
    given = {name: jnp.ones(shape) for name, shape in zip(names, shapes, strict=True)}
    given = replaced(
        given | {"visibility": CachedVisibility(jnp.asarray([M, 2]), jnp.int32(0), L, M, 7)},
        changes,
    )
    heads, ring, position = (
        [given[name] for name in names[a:b]] for a, b in ((0, 3), (3, 5), (5, 8))
    )
    return (*heads, tuple(ring), tuple(position), given["visibility"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"query": lambda old: old[0]}, r"query.*\(3, 4, 5\)"),
        ({"visibility": sees(segment_len=3)}, r"query.*segment_len \(3\)"),
        ({"value": lambda old: old[..., 1:]}, r"value.*\(2, 3, 4, 4\)"),
        ({"ring_key": lambda old: old.swapaxes(2, 3)}, r"ring key.*\(2, 3, 6, 5\)"),
        ({"position_query": lambda old: old[:1]}, r"position query.*\(1, 3, 4, 5\)"),
        ({"position_score": lambda old: old[:, 1:]}, r"position score.*\(3, 9\)"),
        ({"position_key": None, "position_score": None}, "position must have keys"),
        ({"position_key": as_type("bfloat16")}, "position key.*bfloat16"),
        ({"ring_value": as_type(int)}, "ring value.*int32"),
        ({"visibility": sees(valid=jnp.zeros(3, int))}, r"valid .* got int32 \[3\]"),
        ({"visibility": sees(write_index=0)}, "write_index .* got int"),
        ({"visibility": sees(window=0)}, "window .* got 0"),
    ],
)
def test_what_does_not_fit_a_cache_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        cached_attention(*cached(**changes))


# Meshes here are abstract and need no devices


def shape_of_attention(batch):
    """The shape of what `attention` returns for H = 4, L = 3, E = 2, by tracing alone."""
    arrays = [jax.ShapeDtypeStruct((batch, 4, 3, 2), jnp.float32)] * 3
    visibility = Visibility(jnp.zeros(batch, jnp.int32), 3, 0)
    return jax.eval_shape(lambda *given: attention(*given, visibility=visibility), *arrays).shape


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, Shards(("data", "fsdp"), "tensor", 2, 2)),
        ({"data": 8}, Shards(("data", "fsdp"), "tensor", 1, 4)),
        ({"data": 3}, Shards((), "tensor", 8, 4)),  # 8 rows do not divide.
        ({"tensor": 8}, Shards(("data", "fsdp"), None, 8, 4)),  # 4 heads do not.
    ],
)
def test_rows_and_heads_are_divided_where_they_divide(sizes, expected):
    config = MeshConfig(**{"data": 1} | sizes)
    with use_mesh(abstract_mesh(config, n_device=config.data * config.fsdp * config.tensor)):
        assert shards_of(8, 4) == expected
        assert shape_of_attention(8) == (8, 4, 3, 2)
    assert shards_of(8, 4) is None


def test_a_mesh_of_other_axes_is_left_to_the_caller():
    for names in (("batch",), ("data",), ("data", "model")):
        with use_mesh(
            AbstractMesh((2,) * len(names), names, axis_types=(AxisType.Auto,) * len(names))
        ):
            assert shards_of(8, 4) is None and shape_of_attention(8) == (8, 4, 3, 2)


def test_inside_a_shard_map_of_the_caller_arrays_are_those_of_one_device():
    seen = []

    def on_one(query):
        seen.append(shards_of(*query.shape[:2]))
        visibility = Visibility(jnp.zeros(query.shape[0], jnp.int32), 3, 0)
        return attention(query, query, query, visibility=visibility)

    with use_mesh(abstract_mesh(MeshConfig(), n_device=8)):
        mapped = jax.shard_map(
            on_one, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False
        )
        found = jax.eval_shape(jax.jit(mapped), jax.ShapeDtypeStruct((8, 4, 3, 2), jnp.float32))
    assert seen and set(seen) == {None} and found.shape == (8, 4, 3, 2)
