"""Tests the table from logical axes to the mesh, and that eight devices give one device's numbers."""

import json
import os
import pathlib
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec

from txl_jax import axes, sharding
from txl_jax.config import MeshConfig, NormPlace
from txl_jax.training.state import init_params

PROGRAM = pathlib.Path(__file__).parent / "eight_devices.py"
REPOSITORY = PROGRAM.parents[1]
EVERYTHING = {
    "layer_norm": NormPlace.PRE,
    "untie_r": True,
    "tie_weight": False,
    "cutoffs": (4, 11),
    "d_embed": 16,
    "div_val": 2,
}


def boxed_params(**changes):
    model = tiny.make(**changes)
    return jax.eval_shape(lambda: init_params(model, jax.random.key(0)))


@pytest.mark.parametrize("changes", [{}, EVERYTHING], ids=["default", "all options"])
def test_every_axis_of_a_parameter_has_a_row(changes):
    boxes = jax.tree.leaves(boxed_params(**changes), is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
    assert len(boxes) > 10
    for box in boxes:
        assert len(sharding.spec(*box.names)) == box.value.ndim


def test_every_axis_name_has_a_row():
    names = [value for name, value in vars(axes).items() if name.isupper()]
    assert len(names) == len(set(names)) > 10
    assert len(sharding.spec(*names)) == len(names)


def test_an_unknown_axis_name_is_refused():
    with pytest.raises(ValueError, match=r"'heds' has no row .*known: .*heads"):
        sharding.spec("batch", "heds")


def test_shardings_of_parameters():
    found = sharding.of_boxed(sharding.make_mesh(MeshConfig()), boxed_params(**EVERYTHING))
    layer = found["stack"]["layers"]
    assert layer["attention"]["query"].spec == PartitionSpec(None, "fsdp", "model", None)
    assert layer["attention"]["output"].spec == PartitionSpec(None, "model", None, "fsdp")
    assert layer["feed_forward"]["inner_kernel"].spec == PartitionSpec(None, "fsdp", "model")
    assert layer["feed_forward"]["outer_kernel"].spec == PartitionSpec(None, "model", "fsdp")
    assert found["embedding"]["table_0"].spec == PartitionSpec("model", None)
    assert found["embedding"]["projection_1"].spec == PartitionSpec(None, "fsdp")


def test_bare_arrays_are_replicated():
    mesh = sharding.make_mesh(MeshConfig())
    found = sharding.of_boxed(
        mesh, {"count": jax.ShapeDtypeStruct((), "int32"), "x": jax.ShapeDtypeStruct((2, 3), "int32")}
    )
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (MeshConfig(data=64), "64 x 1 x 1"),
        (MeshConfig(fsdp=32, model=5), "all x 32 x 5"),
        (MeshConfig(data=3, fsdp=7, model=11), "3 x 7 x 11"),
    ],
)
def test_a_mesh_larger_than_the_devices_is_refused(config, numbers):
    with pytest.raises(ValueError, match=f"{numbers} and there are {len(jax.devices())} devices"):
        sharding.make_mesh(config)


@pytest.fixture(scope="module")
def found():
    """What `eight_devices` prints."""
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"  # Half the time to compile.
    # float64: in float32 Adam's first updates blow rounding up, since they are as large where the gradient is tiny.
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    result = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout)


MESHES = {"data": [8, 1, 1], "mixed": [2, 2, 2], "fsdp": [1, 8, 1]}


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_trains_and_scores_as_one_device_does(found, name):
    one, many = found["one"], found[name]
    assert list(one["mesh"].values()) == [1, 1, 1] and list(many["mesh"].values()) == MESHES[name]
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-10)
    np.testing.assert_allclose(many["grad_norms"], one["grad_norms"], rtol=1e-10)
    assert len(set(one["losses"])) == 6  # Dropout and updates make all differ.


def test_an_adaptive_softmax_trains_and_scores_as_on_one_device(found):
    one, many = found["adaptive, one"], found["adaptive, mixed"]
    assert list(many["mesh"].values()) == MESHES["mixed"]
    for name in ("losses", "grad_norms", "score"):
        np.testing.assert_allclose(many[name], one[name], rtol=1e-10)
    assert one["losses"] != found["one"]["losses"]


@pytest.mark.parametrize("name", MESHES)
def test_rows_are_scored_on_eight_devices(found, name):
    assert found[name]["scored"] == found["one"]["scored"] == 49
    for score in ("score", "score_of_rows"):
        assert found[name][score] == pytest.approx(found["one"][score], rel=1e-10)
    assert found["one"]["score"] != found["one"]["score_of_rows"]


def test_parameters_and_moments_are_spread(found):
    assert found["one"]["bytes_per_device"] == found["data"]["bytes_per_device"] == found["one"]["bytes"]
    assert found["data"]["query_per_device"] == [3, 16, 2, 5]  # [N, D, H, E]
    assert found["mixed"]["query_per_device"] == [3, 8, 1, 5]
    assert found["fsdp"]["query_per_device"] == [3, 2, 2, 5]
    for name in ("mixed", "fsdp"):
        # Biases and norms are too small to be worth spreading.
        assert found[name]["bytes_per_device"] < found["one"]["bytes"] / 3
        assert found[name]["moment_bytes_per_device"] == 2 * found[name]["bytes_per_device"]


def test_rows_of_the_memory_are_spread(found):
    shapes = {name: found[name]["memory_per_device"] for name in ("one", *MESHES)}
    assert shapes == {"one": [3, 8, 9, 16], "data": [3, 1, 9, 16], "mixed": [3, 2, 9, 16], "fsdp": [3, 1, 9, 16]}


def test_rows_and_heads_of_stored_keys_are_spread(found):
    shapes = {name: found[name]["keys_per_device"] for name in ("one", *MESHES)}  # [B, H, E, R]
    assert {name: shape["one row"] for name, shape in shapes.items()} == {
        "one": [1, 2, 5, 12],
        "data": [1, 2, 5, 12],
        "mixed": [1, 1, 5, 12],
        "fsdp": [1, 2, 5, 12],
    }
    assert {name: shape["eight rows"] for name, shape in shapes.items()} == {
        "one": [8, 2, 5, 12],
        "data": [1, 2, 5, 12],
        "mixed": [2, 1, 5, 12],
        "fsdp": [1, 2, 5, 12],
    }


def test_each_device_computes_the_tails_of_its_own_rows(found):
    assert found["tail"] == {"positions": 16, "all_gathers": 0}
    assert [found[name]["row_groups"] for name in ("one", "data", "mixed", "fsdp")] == [1, 8, 4, 8]


def test_a_vocabulary_that_does_not_divide_stays_whole(found):
    assert found["uneven"]["table_per_device"] == [13, 16]
    assert found["uneven"]["table_spec"] == [None, None] and found["uneven"]["query_spec"][2] == "model"


def test_what_does_not_fit_eight_devices_is_refused_with_both_numbers(found):
    refusals = found["refusals"]
    assert "train.batch_size is 6 and the rows are spread over 4 devices" in refusals["batch"]
    assert "all x 3 x 1 and there are 8 devices" in refusals["remainder"]
    assert "3 x 2 x 2 and there are 8 devices" in refusals["too many"]
    assert "model.n_head is 2 and mesh.model is 4" in refusals["heads"]
    assert "model.d_inner is 12 and mesh.model is 8" in refusals["inner"]
    assert "model.d_model is 18 and mesh.fsdp is 4" in refusals["width"]
