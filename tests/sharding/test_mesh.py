"""Tests the table from logical axes to the mesh, and that eight devices give one device's numbers."""

import json
import os
import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from support import tiny
from support.xla_flags import xla_flags
from txl_jax import sharding
from txl_jax.config import MeshConfig, NormPlace
from txl_jax.sharding import axes
from txl_jax.training.state import init_params

PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "eight_devices.py"
REPOSITORY = PROGRAM.parents[2]
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
    with pytest.raises(ValueError, match=r"'heds'.*\bheads\b"):
        sharding.spec("batch", "heds")


def test_shardings_of_parameters():
    found = sharding.param_shardings(sharding.make_mesh(MeshConfig()), boxed_params(**EVERYTHING))
    layer = found["stack"]["layers"]
    assert layer["attention"]["query"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert layer["attention"]["output"].spec == PartitionSpec(None, "tensor", None, "fsdp")
    assert layer["feed_forward"]["inner_kernel"].spec == PartitionSpec(None, "fsdp", "tensor")
    assert layer["feed_forward"]["outer_kernel"].spec == PartitionSpec(None, "tensor", "fsdp")
    assert found["embedding"]["table_0"].spec == PartitionSpec(("tensor",), ("fsdp",))
    assert found["embedding"]["projection_1"].spec == PartitionSpec(None, "fsdp")


def test_bare_arrays_are_replicated():
    mesh = sharding.make_mesh(MeshConfig())
    found = sharding.param_shardings(
        mesh, {"count": jax.ShapeDtypeStruct((), "int32"), "x": jax.ShapeDtypeStruct((2, 3), "int32")}
    )
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (MeshConfig(data=64), "64 x 1 x 1"),
        (MeshConfig(fsdp=32, tensor=5), "32 x 5"),
        (MeshConfig(data=3, fsdp=7, tensor=11), "3 x 7 x 11"),
    ],
)
def test_a_mesh_larger_than_the_devices_is_refused(config, numbers):
    with pytest.raises(ValueError, match=rf"\b{numbers}\b.*\b{len(jax.devices())}\b"):
        sharding.make_mesh(config)


def eight_devices(kind, **variables):
    """Runs `support.eight_devices`; returns its JSON."""
    environment = os.environ | {"XLA_FLAGS": xla_flags(devices=8), "JAX_PLATFORMS": "cpu"} | variables
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, PROGRAM, kind]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-5000:]
    assert (
        "full rematerialization" not in result.stderr
    )  # XLA found no way between two shardings but through all of it.
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def found():
    return eight_devices("exact", JAX_ENABLE_X64="1")


SIZES = {"data": [8, 1, 1], "mixed": [2, 2, 2], "fsdp": [1, 8, 1], "tensor": [1, 1, 8]}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("softmax", ["plain", "adaptive"])
def test_a_mesh_trains_as_one_device_does(found, softmax, name):
    """Twenty updates with dropout, past the end of an epoch. In float64, where a wrong factor has nowhere to hide."""
    one, many = found[f"{softmax}, one"], found[f"{softmax}, {name}"]
    assert list(one["mesh"].values()) == [1, 1, 1] and list(many["mesh"].values()) == SIZES[name]
    for numbers in ("losses", "grad_norms"):
        np.testing.assert_allclose(many[numbers], one[numbers], rtol=1e-10)
    np.testing.assert_allclose(many["params"], one["params"], rtol=0, atol=1e-10)
    assert len(set(one["losses"])) == 20


@pytest.mark.slow
def test_in_float32_too():
    """Adam's first updates are as large where a gradient is next to nothing, so that rounding is seen in parameters."""
    found = eight_devices("usual")
    for numbers, most in (("losses", 1e-5), ("params", 1e-6)):
        worst = {
            name: np.abs(np.subtract(many[numbers], found[f"{name.partition(',')[0]}, one"][numbers])).max().item()
            for name, many in found.items()
        }
        print(numbers, worst)
        assert len(worst) == 10 and max(worst.values()) <= most, worst


def test_parts_of_the_rows_on_a_mesh_are_the_whole_batch(found):
    one, chunks = found["microbatches, one"], found["microbatches, mixed"]
    np.testing.assert_allclose(chunks["losses"], one["losses"], rtol=1e-10)
    np.testing.assert_allclose(chunks["params"], one["params"], rtol=0, atol=1e-10)


def test_a_run_goes_on_from_its_checkpoint_on_other_devices(found):
    """Fully sharded over eight, then over four that share heads too, then one: the curve is that of one alone."""
    np.testing.assert_allclose(found["moved"], found["adaptive, one"]["losses"], rtol=1e-10)


def test_losses_vectors_and_gradients_of_the_adaptive_softmax(found):
    """Uneven clusters, tails in small chunks, most rows without a target in them; with and without joined entries."""
    assert len(found["differences"]) == 10
    for name, worst in found["differences"].items():
        assert worst < 1e-12, name


@pytest.mark.parametrize(
    ("softmax", "name"), [("plain", "mixed"), ("plain", "fsdp"), ("adaptive", "mixed"), ("adaptive", "tensor")]
)
def test_rows_are_scored_on_eight_devices(found, softmax, name):
    one, many = found[f"{softmax}, one"], found[f"{softmax}, {name}"]
    assert many["scored"] == one["scored"] == 49
    for score in ("score", "score_of_rows"):
        assert many[score] == pytest.approx(one[score], rel=1e-10)
    assert one["score"] != one["score_of_rows"]
    # int8 moves the score of a model that is hardly trained by some 1e-7 nats, so a mesh must agree more closely.
    assert 5e-8 < abs(one["score_in_int8"] - one["score_of_longer"]) < 1e-2
    assert many["score_in_int8"] == pytest.approx(one["score_in_int8"], rel=0, abs=5e-9)


def test_parameters_and_moments_are_spread(found):
    one = found["adaptive, one"]
    assert one["bytes_per_device"] == found["adaptive, data"]["bytes_per_device"] == one["bytes"]
    # Biases, norms and the smaller tables that do not divide are whole.
    for name, parts in (("mixed", 4), ("fsdp", 8), ("tensor", 8)):
        many = found[f"adaptive, {name}"]
        assert one["bytes"] / parts < many["bytes_per_device"] < 1.75 * one["bytes"] / parts, name
        assert many["moment_bytes_per_device"] == 2 * many["bytes_per_device"]
    assert {name: found[f"plain, {name}"]["query_per_device"] for name in SIZES} == {  # [N, D, H, E]
        "data": [3, 16, 8, 5],
        "mixed": [3, 8, 4, 5],
        "fsdp": [3, 2, 8, 5],
        "tensor": [3, 16, 1, 5],
    }
    assert {name: found[f"adaptive, {name}"]["tables_per_device"] for name in SIZES} == {
        "data": [[16, 16], [11, 8], [14, 4]],
        "mixed": [[8, 8], [11, 4], [7, 2]],
        "fsdp": [[16, 2], [11, 1], [14, 4]],  # 4 columns do not divide among 8, and 14 rows do not either.
        "tensor": [[2, 16], [11, 8], [14, 4]],
    }


def test_rows_of_the_memory_are_spread(found):
    for name, rows in (("one", 16), ("data", 2), ("mixed", 4), ("fsdp", 2), ("tensor", 16)):
        many = found[f"plain, {name}"]
        assert many["memory_per_device"] == [3, rows, 9, 16]
        assert many["memory_bytes_per_device"] * 16 == many["memory_bytes"] * rows


@pytest.mark.parametrize("softmax", ["plain", "adaptive"])
def test_what_is_gathered_is_one_layer_or_one_cluster_at_a_time(found, softmax):
    """Nothing of the memory, and each layer within the loop over layers, which is in the loop over segments."""
    for name in SIZES:
        many = found[f"{softmax}, {name}"]
        gathers = [one for one in many["collectives"] if one["kind"] == "all-gather"]
        padded = many["largest"]["cluster"] * 48 // 42
        assert all(one["largest"] <= max(many["largest"]["layer"], padded) for one in gathers), name
        in_layers = [one for one in gathers if "/stack/" in one["source"]]
        assert all(one["loops"] == 2 and one["times"] == 2 * 3 for one in in_layers), name
        # Matrices of a layer, forward and again backward; without fsdp none.
        assert len(in_layers) >= 12 if SIZES[name][1] > 1 else not in_layers, name
        assert not any(one["shape"].endswith("9,16]") for one in many["collectives"]), name


def test_sums_over_devices_are_those_that_must_be(found):
    def reduced(name, *, devices):
        return [
            one
            for one in found[f"plain, {name}"]["collectives"]
            if one["kind"] == "all-reduce" and one["devices"] == devices
        ]

    # Gradients, over the devices that share rows; within the loop over layers as soon as a layer has them.
    for name, devices in (("data", 8), ("fsdp", 8), ("mixed", 2)):
        assert any(one["loops"] == 2 and one["n_bytes"] > 9_000 for one in reduced(name, devices=devices)), name
    # Outputs of attention and feed-forward part, and gradients of their inputs: [B, L, D] each, over `tensor`.
    assert {one["shape"] for one in reduced("tensor", devices=8) if one["loops"] == 2} == {"f64[16,7,16]"}


def test_rows_and_heads_of_stored_keys_are_spread(found):
    shapes = {name: found[f"plain, {name}"]["keys_per_device"] for name in ("one", "mixed", "fsdp")}  # [B, H, E, R]
    assert {name: shape["one row"] for name, shape in shapes.items()} == {
        "one": [1, 8, 5, 12],
        "mixed": [1, 4, 5, 12],
        "fsdp": [1, 8, 5, 12],
    }
    assert {name: shape["sixteen rows"] for name, shape in shapes.items()} == {
        "one": [16, 8, 5, 12],
        "mixed": [4, 4, 5, 12],
        "fsdp": [2, 8, 5, 12],
    }


def test_each_device_computes_the_tails_of_its_own_rows(found):
    assert found["tail"] == {"positions": 16, "all_gathers": 0}


def test_a_vocabulary_that_does_not_divide_stays_whole(found):
    assert found["uneven"]["table_per_device"] == [13, 8] and found["uneven"]["table_spec"] == [None, "fsdp"]
    assert found["uneven"]["query_spec"][2] == "tensor"


def test_what_does_not_fit_eight_devices_is_refused_with_both_numbers(found):
    refusals = found["refusals"]
    for kind, numbers in {
        "batch": r"train\.batch_size\D*\b6\b.*\b4\b",
        "microbatches": r"\b8\b.*train\.grad_accum_steps\b.*\b32\b",
        "remainder": r"\b3 x 1\b.*\b8\b",
        "too many": r"\b3 x 2 x 2\b.*\b8\b",
        "heads": r"model\.n_head\D*\b2\b.*mesh\.tensor\D*\b4\b",
        "inner": r"model\.d_inner\D*\b12\b.*mesh\.tensor\D*\b8\b",
        "width": r"model\.d_model\D*\b18\b.*mesh\.fsdp\D*\b4\b",
    }.items():
        assert re.search(numbers, refusals[kind]), refusals[kind]


@pytest.mark.parametrize("name", ["lamb", "nvidia", "adafactor", "muon"])
def test_updates_by_whole_tensors_are_those_of_one_device(found, name):
    assert found["optimizers"][name]["error"] < 1e-9


# Of [2, 128, 8, 17] a device has a half of the width (fsdp) and of the heads (tensor); of [2, 128 x 136] Adafactor's
# v_row keeps the width and v_col the heads.
MOMENT, PLACEHOLDER = [2, 64, 4, 17], [2, 1]
STATE_OF_QUERY = {
    "lamb": {"mu": MOMENT, "nu": MOMENT},
    "nvidia": {"mu": MOMENT, "nu": MOMENT},
    "muon": {"mu": MOMENT},
    "adafactor": {"v_row": [2, 64], "v_col": [2, 68], "v": PLACEHOLDER},
}


@pytest.mark.parametrize("name", STATE_OF_QUERY)
def test_the_state_of_an_optimizer_is_sharded_as_its_parameter(found, name):
    of = found["optimizers"][name]
    assert of["query_per_device"] == STATE_OF_QUERY[name]
    assert of["bytes_per_device"] < (0.6 if name == "adafactor" else 0.4) * of["bytes"]  # Its columns of V are whole.
