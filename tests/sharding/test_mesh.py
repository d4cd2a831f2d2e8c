"""Tests the table from logical axes to the mesh, that eight devices give one device's numbers, and
meshes over slices.

A mesh over several slices of TPUs crosses them along its outermost axis only. The ambient mesh
constrains a layer's activations to where rows, heads and inner width belong.
"""

import collections
import concurrent.futures
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils

from support import eight_devices, tiny
from txl_jax.config import MeshConfig
from txl_jax.errors import UserError
from txl_jax.inference import forward
from txl_jax.inference.prepare import prepare_params
from txl_jax.runs.build import build
from txl_jax.sharding import axes
from txl_jax.sharding import mesh as mesh_module
from txl_jax.sharding.activations import constrain
from txl_jax.sharding.axes import num_batch_shards, num_vocab_shards, vocab_axis
from txl_jax.sharding.mesh import (
    abstract_mesh,
    ambient_mesh,
    bind_mesh,
    make_mesh,
    num_slices,
    use_mesh,
)


@pytest.mark.parametrize(
    ("mesh", "changes", "numbers"),
    [
        ({"fsdp": 2, "tensor": 2}, {"train__batch_size": 6}, r"train\.batch_size\D*\b4\b.*\b6\b"),
        (
            {"fsdp": 2, "tensor": 2},
            {"train__grad_accum_steps": 8},
            r"\b32\b.*\b8\b.*train\.grad_accum_steps\b",
        ),
        ({"fsdp": 3}, {}, r"\b3 x 1\b.*\b8\b"),
        ({"data": 3, "fsdp": 2, "tensor": 2}, {}, r"\b3 x 2 x 2\b.*\b8\b"),
        ({"tensor": 4}, {"model__n_head": 2}, r"model\.n_head\D*mesh\.tensor\D*\b4\b\D*\b2\b"),
        ({"tensor": 8}, {"model__d_inner": 12}, r"model\.d_inner\D*mesh\.tensor\D*\b8\b\D*\b12\b"),
        ({"fsdp": 4}, {"model__d_model": 18}, r"model\.d_model\D*mesh\.fsdp\D*\b4\b\D*\b18\b"),
    ],
)
def test_sizes_that_do_not_fit_eight_devices_are_refused(mesh, changes, numbers):
    config = eight_devices.config(MeshConfig(**mesh), **changes)
    with pytest.raises(UserError, match=numbers):
        build(config, vocab_size=42, mesh=abstract_mesh(config.mesh, 8)).check_batch_size()


FULL, EVERY_CASE = pytest.mark.full, pytest.mark.nightly(part="cases")


@pytest.fixture(scope="module")
def computed(on_eight_devices):
    """Returns the function from a kind of `support.eight_devices` to what it finds in float64."""
    return lambda kind: on_eight_devices("-m", "support.eight_devices", kind, JAX_ENABLE_X64="1")


@pytest.fixture(scope="module", params=["few", pytest.param("exact", marks=EVERY_CASE)])
def pairs(request, computed):
    """Two meshes with the adaptive softmax; nightly four, with the full one too.

    Each with the run on one device.
    """
    return named_pairs(computed(request.param)["runs"])


def named_pairs(runs):
    """(name of the mesh, the run on one device, the run on the mesh) of all runs on several
    devices.
    """
    split = {name: name.split(", ") for name in runs}
    return [
        (mesh, runs[f"{kind}, one"], runs[name])
        for name, (kind, mesh) in split.items()
        if mesh != "one"
    ]


SIZES = {"data": [8, 1, 1], "mixed": [2, 2, 2], "fsdp": [1, 8, 1], "tensor": [1, 1, 8]}


def test_a_mesh_trains_as_one_device_does(pairs):
    """Twenty updates with dropout, past the end of an epoch.

    In float64, where a wrong factor has nowhere to hide.
    """
    assert len(pairs) in (2, 8)
    for name, one, many in pairs:
        assert (
            list(one["mesh"].values()) == [1, 1, 1] and list(many["mesh"].values()) == SIZES[name]
        )
        for numbers in ("losses", "grad_norms"):
            np.testing.assert_allclose(many[numbers], one[numbers], rtol=1e-10, err_msg=name)
        np.testing.assert_allclose(many["params"], one["params"], rtol=0, atol=1e-10, err_msg=name)
        assert len(set(one["losses"])) == 20


@pytest.mark.full
def test_a_run_goes_on_from_its_checkpoint_on_other_devices_or_in_parts_of_its_rows(computed):
    """Fully sharded over eight, then over four that share heads too, then one: the curve is that of
    one alone.
    """
    found = computed("rest")
    np.testing.assert_allclose(found["moved"], found["runs"]["adaptive, one"]["losses"], rtol=1e-10)
    one, chunks = found["microbatches"]
    np.testing.assert_allclose(chunks["losses"], one["losses"], rtol=1e-10)
    np.testing.assert_allclose(chunks["params"], one["params"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "kind", [pytest.param("rest", marks=FULL), pytest.param("exact", marks=EVERY_CASE)]
)
def test_rows_are_scored_on_eight_devices(computed, kind):
    found = [each for each in named_pairs(computed(kind)["runs"]) if "score" in each[2]]
    assert len(found) == {"rest": 1, "exact": 4}[kind]
    for name, one, many in found:
        rows, heads = {"mixed": (4, 4), "fsdp": (2, 8), "tensor": (16, 1)}[name]
        # [B, H, E, R]
        shapes = {"one row": [1, heads, 6, 12], "sixteen rows": [rows, heads, 6, 12]}
        assert many["keys_per_device"] == shapes
        assert many["scored"] == one["scored"] == 49
        for score in ("score", "score_of_rows"):
            assert many[score] == pytest.approx(one[score], rel=1e-10)
        assert one["score"] != one["score_of_rows"]
        # int8 moves the score of a model that is hardly trained by some 1e-7 nats, so a mesh must
        # agree more closely.
        assert 5e-8 < abs(one["score_in_int8"] - one["score_of_longer"]) < 1e-2
        assert many["score_in_int8"] == pytest.approx(one["score_in_int8"], rel=0, abs=5e-9)


@FULL
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("mesh", ["mixed", "fsdp"])
def test_a_mesh_learns_while_it_scores_as_one_device_does(computed, mesh, rows):
    """One row is the published case, in which devices of `data` compute the same."""
    found = computed("dynamic")
    one = found[f"one, {rows}"]
    many = found[f"{mesh}, {rows}"]
    assert len(one["nats"]) == {1: 38, 16: 3}[rows]
    np.testing.assert_allclose(many["nats"], one["nats"], rtol=1e-9)
    np.testing.assert_allclose(many["params"], one["params"], rtol=0, atol=1e-9)


# What a device has of the queries [N, D, H, E], the tables of the clusters [V, D], and the memory
# [N, B, M, D].
PARTS = {
    "one": ([3, 16, 8, 6], [[16, 16], [11, 8], [14, 4]], [3, 16, 9, 16]),
    "data": ([3, 16, 8, 6], [[16, 16], [11, 8], [14, 4]], [3, 2, 9, 16]),
    "mixed": ([3, 8, 4, 6], [[8, 8], [11, 4], [7, 2]], [3, 4, 9, 16]),
    # 4 columns do not divide among 8, and 14 rows do not either.
    "fsdp": ([3, 2, 8, 6], [[16, 2], [11, 1], [14, 4]], [3, 2, 9, 16]),
    "tensor": ([3, 16, 1, 6], [[2, 16], [11, 8], [14, 4]], [3, 16, 9, 16]),
}


def test_parameters_moments_and_memory_are_spread(pairs):
    for name, one, many in pairs:
        query, tables, memory = PARTS[name]
        assert (many["query_per_device"], many["memory_per_device"]) == (query, memory)
        assert many["moment_bytes_per_device"] == 2 * many["bytes_per_device"]
        if len(one["tables_per_device"]) == 1:
            continue
        assert many["tables_per_device"] == tables
        if name == "data":
            assert many["bytes_per_device"] == one["bytes"] == one["bytes_per_device"]
        else:  # Biases, norms and the smaller tables that do not divide are whole.
            share = one["bytes"] / (4 if name == "mixed" else 8)
            assert share < many["bytes_per_device"] < 1.75 * share, name


def test_the_embedding_gathers_tokens_and_no_table(pairs):
    """Each device looks up the tokens of all with which it shares a table.

    It gathers projections too, of which some have the shape of the table's part: [8, 16].
    """
    projections = [[16, 16], [8, 16], [4, 16]]
    for name, one, many in pairs:
        if len(one["tables_per_device"]) == 1:
            continue
        in_embedding = [each for each in many["gathered"] if each["in_embedding"]]
        tokens = [each["shape"] for each in in_embedding if each["dtype"] == "s32"]
        floats = [each["shape"] for each in in_embedding if each["dtype"] != "s32"]
        assert all(shape in projections for shape in floats), (name, floats)

        # Devices share columns of tables with one other in the mixed mesh, and with all by fsdp.
        n_row = {"mixed": 8, "fsdp": 16}.get(name)
        assert all(shape == [n_row, 7] for shape in tokens), (name, tokens)
        assert bool(tokens) == (name in ("mixed", "fsdp")), name


def test_what_is_gathered_is_one_matrix_of_a_layer_or_one_cluster_at_a_time(pairs):
    """Matrices of all three layers, gathered outside of their loop, would have 3 * 384 numbers and
    more.
    """
    for name, _, many in pairs:
        # A matrix of a layer has at most 16 * 48, the table of 42 tokens is padded to 48 rows of
        # 16.
        assert all(math.prod(each["shape"]) <= 48 * 16 for each in many["gathered"]), name
        in_layers = [each for each in many["gathered"] if each["in_stack"]]
        # Forward and again backward; without fsdp none.
        assert len(in_layers) >= 12 if SIZES[name][1] > 1 else not in_layers, name
        assert not any(each["shape"][-2:] == [9, 16] for each in many["gathered"]), (
            f"{name}: the memory"
        )


def test_fsdp_sums_a_kernels_gradient_once_and_gathers_position_keys(computed):
    """A device has half of the heads. Kernels and position keys have as many numbers there."""
    sent = computed("few")["sent"]
    n_number = 16 * 4 * 6
    summed = [shape for shape in sent["all-reduce"] if math.prod(shape) == n_number]
    # The gradients of the kernels of queries, keys, values and the output, over fsdp.
    assert len(summed) == 4
    # These kernels, forward and backward, and the position keys, which the backward pass keeps.
    gathered = [shape for shape in sent["all-gather"] if math.prod(shape) == n_number]
    assert len(gathered) == 2 * 4 + 1
    # Columns of the position kernel, and the gradients of columns of it and of the keys.
    assert len(sent["all-to-all"]) == 3 * 2


@pytest.mark.nightly(part="long")
def test_host_time_of_an_update_grows_with_the_devices_as_documented(on_eight_devices):
    """In docs/scaling.md: in milliseconds for each further device."""
    found = on_eight_devices("-m", "support.eight_devices", "host time")
    print(found)
    assert max(found.values()) - found["one"] < 7 * 0.4


def test_tails_of_the_softmax_on_eight_devices(computed):
    """Each device computes the tails of its own rows."""
    assert computed("few")["tail"] == {"positions": 16, "all_gathers": 0}


def test_masks_on_eight_devices_are_those_of_one(computed):
    """Bit for bit, of activations, heads and words."""
    found = computed("few")["masks"]
    assert len(found) == 9
    for name, mask in found.items():
        assert mask["parts"] == 8 and mask["zeros"] > 100 and mask["different"] == 0, (name, mask)


def test_ignored_targets_and_targets_beyond_the_vocabulary_on_eight_devices(computed):
    """Of 41 tokens: -1 and -100 are ignored; 41, 47 (a padded row) and 1000 are nan, which the
    program writes as -1.
    """
    found = computed("few")["odd"]
    for mesh in ("one", "mixed", "tensor"):
        np.testing.assert_allclose(found[mesh], found["one"], rtol=1e-12, err_msg=mesh)
        ignored, first, last, beyond, also_ignored, middle, padded, far = found[mesh]
        assert (ignored, also_ignored) == (0, 0)
        assert (beyond, padded, far) == (-1, -1, -1)
        assert min(first, middle, last) > 0


@pytest.mark.full
def test_updates_by_whole_tensors_are_those_of_one_device_and_moments_are_sharded(computed):
    found = computed("rest")["optimizers"]
    assert len(found) == 4
    for name, of in found.items():
        assert of["error"] < 1e-9, name
        assert of["bytes_per_device"] < 0.4 * of["bytes"] or name == "adafactor", name


FEW_PATHS = ("mixed", "reference", "tiled", "stored", "tpu")
ALL_PATHS = ("data", "mixed", "tensor", "reference", "tiled", "stored", "tpu")


@pytest.mark.parametrize(
    "parts", [FEW_PATHS, pytest.param(ALL_PATHS, marks=EVERY_CASE)], ids=["few", "all"]
)
def test_a_mesh_attends_as_one_device_does(parts, on_eight_devices):
    """Values and six gradients, with the dropout mask of the whole batch; kernels are
    interpreted.
    """
    found = on_eight_devices("-m", "support.attention_on_meshes", *parts)
    assert len(found) == {FEW_PATHS: 8, ALL_PATHS: 24}[parts]
    for name, differences in found.items():
        assert len(differences) == (7 if name.startswith("training") else 1)
        assert max(differences) < 2e-5, name


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU, as far as jax needs one to make a mesh."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    process_index: int = 0


def chips(num_slices):
    """Chips of 4 x 4 slices, with those of different slices mixed."""
    places = [(index, (index % 4, index // 4, 0)) for index in reversed(range(16))]
    return [
        Chip(16 * number + index, number, place)
        for index, place in places
        for number in range(num_slices)
    ]


def grid(devices, **sizes):
    slices = mesh_module._slices(devices)
    shape = mesh_module._shape(MeshConfig(**sizes), len(devices), num_slices=len(slices))
    return mesh_module._device_grid(slices, shape)


def test_within_a_slice_the_mesh_is_that_of_one_slice():
    of_one, of_two = (sorted(chips(n), key=lambda chip: chip.id) for n in (1, 2))
    one = mesh_utils.create_device_mesh((2, 8, 1), of_one, allow_split_physical_axes=True)
    two = grid(of_two, fsdp=8)
    places = np.vectorize(lambda chip: chip.coords[:2], otypes=[object])
    for index, part in enumerate((two[:2], two[2:])):
        assert (places(part) == places(one)).all() and {chip.slice_index for chip in part.flat} == {
            index
        }


def test_chips_that_are_left_idle_and_are_no_box_are_those_of_each_slice():
    found = grid(chips(2), data=7)
    assert found.shape == (14, 1, 1)
    assert [chip.slice_index for chip in found.flat] == [0] * 7 + [1] * 7
    assert len({chip.id for chip in found.flat}) == 14


def test_sizes_that_do_not_fit_the_slices_are_refused():
    with pytest.raises(UserError, match=r"\b31 devices\b.*\b2 slices\b"):
        grid(chips(2)[1:])
    with pytest.raises(UserError, match=r"\b2 x 16 x 1\b.*\b16 devices\b"):
        grid(chips(2), data=2, fsdp=16)


def test_a_mesh_without_devices_may_be_over_slices_too():
    assert tuple(abstract_mesh(MeshConfig(fsdp=4), 8, num_slices=2).shape.values()) == (2, 4, 1)
    assert num_slices(make_mesh(MeshConfig())) == 1


MESH = abstract_mesh(MeshConfig(data=2, fsdp=2, tensor=2), 8)
FLAGS = {"clamp_len": None, "same_length": False, "deterministic": True}


def constrained(function, *arguments):
    """The mesh axes that a traced program constrains arrays to, loops included, and how many
    arrays.
    """
    found = tiny.equations(jax.make_jaxpr(function)(*arguments))
    specs = (
        each.params["sharding"].spec
        for each in found
        if each.primitive.name == "sharding_constraint"
    )
    return collections.Counter(map(tuple, specs))


def expected(rows, *, outputs=1, heads=4, inner=1):
    """Outputs [B, L, D]; queries, keys, values and what is attended [B, H, L, E]; inner states [B,
    L, F].
    """
    return {
        (rows, None, None): outputs,
        (rows, "tensor", None, None): heads,
        (rows, None, "tensor"): inner,
    }


@pytest.mark.parametrize(("batch_size", "rows"), [(8, ("data", "fsdp")), (6, None)])
def test_layers_of_training_and_of_inference(batch_size, rows):
    """Rows that do not divide, as the one row of a published evaluation, are replicated."""
    model, tokens = tiny.make(), jnp.zeros((batch_size, 2), jnp.int32)
    with use_mesh(MESH):
        variables, memory = (
            tiny.variables(model),
            model.init_memory(batch_size=batch_size, mem_len=4),
        )
        found = constrained(lambda *both: model.apply(variables, *both, **FLAGS), tokens, memory)
        assert found == expected(rows)  # In the loop over layers.
        weights = prepare_params(variables["params"], model, segment_len=2, mem_len=4, clamp_len=0)
        ring = forward.init_cache(weights, batch_size=batch_size, mem_len=4, segment_len=2)
        found = constrained(lambda *both: forward.forward(weights, *both), tokens, ring)
    assert found == expected(rows, outputs=tiny.N, heads=3 * tiny.N, inner=tiny.N)


@pytest.mark.parametrize("mesh", [None, MESH])
def test_names_are_checked_with_and_without_a_mesh(mesh):
    x = jnp.zeros((4, 2))
    with use_mesh(mesh):
        with pytest.raises(ValueError, match="'bach'"):
            jax.eval_shape(lambda x: constrain(x, "bach", None), x)
        with pytest.raises(ValueError, match="one logical name per axis"):
            jax.eval_shape(lambda x: constrain(x, axes.BATCH), x)


def on_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_one_device_is_left_alone():
    mesh = make_mesh(MeshConfig(data=1))
    jitted = jax.jit(lambda x: x + 1)
    assert bind_mesh(mesh, jitted) is jitted
    with use_mesh(mesh):
        assert ambient_mesh() is None


def test_a_thread_has_a_mesh_in_bound_functions_only():
    def shards():
        return num_batch_shards(), num_vocab_shards()

    shards.lower = shards.eval_shape = shards
    bound, x = bind_mesh(MESH, shards), np.arange(8.0)
    with use_mesh(MESH):
        assert shards() == (4, 2) and vocab_axis() == "tensor"
        assert on_thread(ambient_mesh) is None and on_thread(shards) == (1, 1)
        assert on_thread(lambda: constrain(x, axes.BATCH)) is x  # The array itself.
    assert on_thread(lambda: (bound(), bound.lower(), bound.eval_shape())) == ((4, 2),) * 3
