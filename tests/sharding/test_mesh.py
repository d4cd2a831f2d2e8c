"""Tests the table from logical axes to the mesh, that eight devices give one device's numbers, and
meshes over slices.

A mesh over several slices of TPUs crosses them along its outermost axis only. The ambient mesh
constrains a layer's activations to where rows, heads and inner width belong.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import math
from typing import Any, NamedTuple

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

FULL = pytest.mark.full
EVERY_CASE = pytest.mark.nightly(part="cases")


@pytest.mark.parametrize(
    ("mesh", "changes", "numbers"),
    [
        pytest.param(
            {"fsdp": 2, "tensor": 2},
            {"train__batch_size": 6},
            r"train\.batch_size\D*\b4\b.*\b6\b",
            id="batch size",
        ),
        pytest.param(
            {"fsdp": 2, "tensor": 2},
            {"train__grad_accum_steps": 8},
            r"\b32\b.*\b8\b.*train\.grad_accum_steps\b",
            id="microbatches",
        ),
        pytest.param({"fsdp": 3}, {}, r"\b8\b.*\b3 x 1\b", id="remainder of devices"),
        pytest.param(
            {"data": 3, "fsdp": 2, "tensor": 2}, {}, r"\b8\b.*\b3 x 2 x 2\b", id="devices"
        ),
        pytest.param(
            {"tensor": 4},
            {"model__n_head": 2},
            r"model\.n_head\D*mesh\.tensor\D*\b4\b\D*\b2\b",
            id="heads",
        ),
        pytest.param(
            {"tensor": 8},
            {"model__d_inner": 12},
            r"model\.d_inner\D*mesh\.tensor\D*\b8\b\D*\b12\b",
            id="inner size",
        ),
        pytest.param(
            {"fsdp": 4},
            {"model__d_model": 18},
            r"model\.d_model\D*mesh\.fsdp\D*\b4\b\D*\b18\b",
            id="model size",
        ),
    ],
)
def test_sizes_that_do_not_fit_eight_devices_are_refused(mesh, changes, numbers):
    """Unchanged, the sizes of `support.eight_devices` fit each mesh that divides eight devices."""
    config = eight_devices.config(MeshConfig(**mesh), **changes)

    with pytest.raises(UserError, match=numbers):
        build(config, vocab_size=42, mesh=abstract_mesh(config.mesh, 8)).check_batch_size()


@pytest.fixture(scope="module")
def computed(on_eight_devices):
    """Returns the function from a kind of `support.eight_devices` to its results in float64."""
    return lambda kind: on_eight_devices("-m", "support.eight_devices", kind, JAX_ENABLE_X64="1")


class Pair(NamedTuple):
    """The results of a run on one device and of the same run on a mesh."""

    mesh: str
    on_one: dict[str, Any]
    on_mesh: dict[str, Any]

    @property
    def has_clusters(self) -> bool:
        """Whether its softmax is the adaptive one."""
        return len(self.on_one["tables_per_device"]) > 1


def pairs_of(runs: dict[str, Any]) -> list[Pair]:
    """Pairs each run on a mesh with the run on one device that has the same softmax."""
    pairs = []
    for name, results in runs.items():
        softmax, mesh = name.split(", ")
        if mesh != "one":
            pairs.append(Pair(mesh, on_one=runs[f"{softmax}, one"], on_mesh=results))
    return pairs


@functools.cache
def run_on_one_device() -> dict[str, Any]:
    """The run with the adaptive softmax on one device, in this process."""
    with tiny.enable_x64(True):
        return eight_devices.runs("adaptive, one", scored=False)


@pytest.fixture(scope="module", params=["mixed", "data", pytest.param("exact", marks=EVERY_CASE)])
def pairs(request, computed) -> list[Pair]:
    """The mixed mesh, or the mesh of `data`, with the adaptive softmax. Nightly all four meshes,
    each with the full softmax too.

    The mixed mesh attends by tiles, except nightly. One device attends by the reference.
    """
    if request.param == "exact":
        pairs = pairs_of(computed("exact")["runs"])
        assert len(pairs) == 8
        return pairs
    on_mesh = computed(request.param)["runs"]
    pairs = pairs_of(run_on_one_device() | on_mesh)
    assert [pair.mesh for pair in pairs] == [request.param]
    return pairs


# The devices along data, fsdp and tensor.
SIZES = {"data": [8, 1, 1], "mixed": [2, 2, 2], "fsdp": [1, 8, 1], "tensor": [1, 1, 8]}


def test_each_update_on_one_device_has_a_loss_of_its_own():
    """In the run with which meshes are compared, so no update can be missing or be made twice."""
    (results,) = run_on_one_device().values()

    assert len(set(results["losses"])) == eight_devices.STEPS


def test_a_mesh_trains_as_one_device_does(pairs):
    """Twenty updates with dropout, past the end of an epoch.

    In float64, where a wrong factor has nowhere to hide.
    """
    for mesh, on_one, on_mesh in pairs:
        assert list(on_one["mesh"].values()) == [1, 1, 1]
        assert list(on_mesh["mesh"].values()) == SIZES[mesh]
        assert len(set(on_one["losses"])) == eight_devices.STEPS
        for name in ("losses", "grad_norms"):
            np.testing.assert_allclose(
                on_mesh[name], on_one[name], rtol=1e-10, err_msg=f"{name}, {mesh}"
            )
        np.testing.assert_allclose(
            on_mesh["params"], on_one["params"], rtol=0, atol=1e-10, err_msg=mesh
        )


@pytest.mark.full
def test_a_run_goes_on_from_its_checkpoint_on_other_devices_or_in_parts_of_its_rows(computed):
    """Fully sharded over eight, then over four that share heads too, then one: the curve is that of
    one device.
    """
    results = computed("rest")
    on_one = results["runs"]["adaptive, one"]
    np.testing.assert_allclose(results["moved"], on_one["losses"], rtol=1e-10)

    whole, in_microbatches = results["microbatches"]
    np.testing.assert_allclose(in_microbatches["losses"], whole["losses"], rtol=1e-10)
    np.testing.assert_allclose(in_microbatches["params"], whole["params"], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "n_scored"),
    [
        pytest.param("rest", 1, marks=FULL, id="rest"),
        pytest.param("exact", 4, marks=EVERY_CASE, id="exact"),
    ],
)
def test_rows_are_scored_on_eight_devices(computed, kind, n_scored):
    pairs = [pair for pair in pairs_of(computed(kind)["runs"]) if "score" in pair.on_mesh]
    assert len(pairs) == n_scored
    for mesh, on_one, on_mesh in pairs:
        # What a device has of 16 rows, which data and fsdp divide, and of 8 heads, which tensor
        # divides. One row is on all devices.
        rows, heads = {"mixed": (4, 4), "fsdp": (2, 8), "tensor": (16, 1)}[mesh]
        # [B, H, E, R]. The memory of 11 tokens takes 12 slots, three segments of 4.
        shapes = {"one row": [1, heads, 6, 12], "sixteen rows": [rows, heads, 6, 12]}
        assert on_mesh["keys_per_device"] == shapes, mesh
        assert on_mesh["scored"] == on_one["scored"] == 49, mesh
        for score in ("score", "score_of_rows"):
            assert on_mesh[score] == pytest.approx(on_one[score], rel=1e-10), mesh
        assert on_one["score"] != on_one["score_of_rows"], "each row begins without a memory"
        # int8 moves the score of a model that is hardly trained by some 1e-7 nats, so a mesh must
        # agree more closely.
        moved = abs(on_one["score_in_int8"] - on_one["score_of_longer"])
        assert 5e-8 < moved < 1e-2, mesh
        in_int8 = pytest.approx(on_one["score_in_int8"], rel=0, abs=5e-9)
        assert on_mesh["score_in_int8"] == in_int8, mesh


@FULL
@pytest.mark.parametrize(("rows", "n_segment"), [(1, 38), (16, 3)], ids=["1", "16"])
@pytest.mark.parametrize("mesh", ["mixed", "fsdp"])
def test_a_mesh_learns_while_it_scores_as_one_device_does(computed, mesh, rows, n_segment):
    """One row is the published case, in which devices of `data` compute the same.

    The text has 149 targets, which are read in segments of 4: 38 of one row, and 3 of 16 rows with
    10 or fewer targets each.
    """
    results = computed("dynamic")
    on_one = results[f"one, {rows}"]
    on_mesh = results[f"{mesh}, {rows}"]
    assert len(on_one["nats"]) == n_segment
    np.testing.assert_allclose(on_mesh["nats"], on_one["nats"], rtol=1e-9)
    np.testing.assert_allclose(on_mesh["params"], on_one["params"], rtol=0, atol=1e-9)


# What a device has of the queries [N, D, H, E].
QUERIES = {
    "data": [3, 16, 8, 6],
    "mixed": [3, 8, 4, 6],
    "fsdp": [3, 2, 8, 6],
    "tensor": [3, 16, 1, 6],
}
# What it has of the tables of the clusters [V, D].
TABLES = {
    "data": [[16, 16], [11, 8], [14, 4]],
    "mixed": [[8, 8], [11, 4], [7, 2]],
    # 4 columns do not divide among 8, and 14 rows do not either.
    "fsdp": [[16, 2], [11, 1], [14, 4]],
    "tensor": [[2, 16], [11, 8], [14, 4]],
}
# What it has of the memory [N, B, M, D].
MEMORIES = {
    "data": [3, 2, 9, 16],
    "mixed": [3, 4, 9, 16],
    "fsdp": [3, 2, 9, 16],
    "tensor": [3, 16, 9, 16],
}
# Devices over which a mesh spreads the parameters.
N_SHARD = {"mixed": 4, "fsdp": 8, "tensor": 8}


def test_parameters_moments_and_memory_are_spread(pairs):
    for pair in pairs:
        mesh, on_one, on_mesh = pair
        assert on_mesh["query_per_device"] == QUERIES[mesh], mesh
        assert on_mesh["memory_per_device"] == MEMORIES[mesh], mesh
        # Adam has two moments of each parameter.
        assert on_mesh["moment_bytes_per_device"] == 2 * on_mesh["bytes_per_device"], mesh
        if not pair.has_clusters:
            continue

        assert on_mesh["tables_per_device"] == TABLES[mesh], mesh
        if mesh == "data":
            assert on_mesh["bytes_per_device"] == on_one["bytes"] == on_one["bytes_per_device"]
        else:
            # Biases, norms and the smaller tables that do not divide are whole, so a device has
            # more than its share.
            share = on_one["bytes"] / N_SHARD[mesh]
            assert share < on_mesh["bytes_per_device"] < 1.75 * share, mesh


def test_the_embedding_gathers_tokens_and_no_table(pairs):
    """Each device looks up the tokens of all with which it shares a table.

    It gathers projections too. So arrays of numbers in the embedding must have the shape of one.
    """
    # From the size of each cluster's table to D.
    projections = [[16, 16], [8, 16], [4, 16]]
    # Devices share columns of tables with one other in the mixed mesh, and with all by fsdp. They
    # look up the tokens of 2 * 4 rows and of 8 * 2 rows, in segments of 7.
    rows_of_tokens = {"mixed": 8, "fsdp": 16}
    for pair in pairs:
        mesh = pair.mesh
        if not pair.has_clusters:
            continue
        tokens = []
        for array in pair.on_mesh["gathered"]:
            if not array["in_embedding"]:
                continue
            # Token ids are integers.
            if array["dtype"] == "s32":
                tokens.append(array["shape"])
            else:
                assert array["shape"] in projections, mesh

        if mesh in rows_of_tokens:
            assert tokens, mesh
            assert all(shape == [rows_of_tokens[mesh], 7] for shape in tokens), (mesh, tokens)
        else:
            assert not tokens, (mesh, tokens)


def test_what_is_gathered_is_one_matrix_of_a_layer_or_one_cluster_at_a_time(pairs):
    """The smallest matrix of a layer is 16 x 24, of the feed-forward network. Such matrices of all
    three layers, gathered outside of their loop, would have 3 * 384 numbers.
    """
    for mesh, _, on_mesh in pairs:
        in_layers = 0
        for array in on_mesh["gathered"]:
            # A matrix of a layer has at most 16 * 48 numbers, with 48 for 8 heads of size 6. The
            # table of 42 tokens is padded to 48 rows of 16.
            assert math.prod(array["shape"]) <= 48 * 16, (mesh, array)
            # The memory [..., M, D] is not gathered.
            assert array["shape"][-2:] != [9, 16], (mesh, array)
            in_layers += array["in_stack"]

        has_fsdp = SIZES[mesh][1] > 1
        if has_fsdp:
            # Six matrices or more, of attention and the feed-forward network, forward and again
            # backward.
            assert in_layers >= 2 * 6, mesh
        else:
            assert in_layers == 0, mesh


def test_fsdp_sums_a_kernels_gradient_once_and_gathers_position_keys(computed):
    """A device has half of the heads. Kernels and position keys have as many numbers there."""
    sent = computed("mixed")["runs"]["adaptive, mixed"]["sent"]
    # D * 4 heads * E, or for position keys L + M, which is 16 too, instead of D.
    n_number = 16 * 4 * 6
    summed = [shape for shape in sent["all-reduce"] if math.prod(shape) == n_number]
    # The gradients of the kernels of queries, keys, values and the output, over fsdp.
    assert len(summed) == 4
    # These kernels, forward and backward, and the position keys, which the backward pass keeps.
    gathered = [shape for shape in sent["all-gather"] if math.prod(shape) == n_number]
    assert len(gathered) == 2 * 4 + 1
    # Columns of the position kernel, and the gradients of columns of it and of the keys. Each is
    # sent as two arrays, one to each device along fsdp.
    assert len(sent["all-to-all"]) == 3 * 2


@pytest.mark.nightly(part="long")
def test_host_time_of_an_update_grows_with_the_devices_as_documented(on_eight_devices):
    """docs/scaling.md says: by less than 0.4 ms for each further device, of which there are 7."""
    milliseconds = on_eight_devices("-m", "support.eight_devices", "host time")
    print(milliseconds)  # For the report of a failure.
    assert max(milliseconds.values()) - milliseconds["one"] < 7 * 0.4


def test_tails_of_the_softmax_on_eight_devices(computed):
    """Each device computes the tails of its own rows, which are 16 positions in each chunk, and
    gathers nothing.
    """
    assert computed("programs")["tail"] == {"positions": 16, "all_gathers": 0}


def test_masks_on_eight_devices_match_one_device(computed):
    """Bit for bit, of activations, heads and words, on three meshes."""
    masks = computed("programs")["masks"]
    assert len(masks) == 3 * 3
    for name, mask in masks.items():
        # Each device has another part.
        assert mask["parts"] == 8, name
        assert mask["zeros"] > 100, name
        assert mask["different"] == 0, name


@pytest.mark.parametrize("mesh", ["one", "mixed", "tensor"])
def test_ignored_targets_and_targets_beyond_the_vocabulary_on_eight_devices(computed, mesh):
    """Of 41 tokens: -1 and -100 are ignored; 41, 47 (a padded row) and 1000 are nan, which the
    program writes as -1.
    """
    losses = computed("programs")["odd"]
    np.testing.assert_allclose(losses[mesh], losses["one"], rtol=1e-12)

    ignored, first, last, beyond, also_ignored, middle, padded, far = losses[mesh]
    assert (ignored, also_ignored) == (0, 0)
    assert (beyond, padded, far) == (-1, -1, -1)
    assert min(first, middle, last) > 0


@pytest.mark.full
def test_updates_by_whole_tensors_match_one_device_and_moments_are_sharded(computed):
    results = computed("rest")["optimizers"]
    assert len(results) == 4
    for name, result in results.items():
        assert result["error"] < 1e-9, name
        # The mixed mesh spreads matrices over 4 devices, and other arrays are small. Adafactor's
        # moments are only rows and columns.
        if name != "adafactor":
            assert result["bytes_per_device"] < 0.4 * result["bytes"], name


# Names of meshes and implementations of `support.attention_on_meshes`. Each pair is compared in
# training and in inference.
FEW_PATHS = ("mixed", "reference", "tiled", "stored", "tpu")
ALL_PATHS = ("data", "mixed", "tensor", "reference", "tiled", "stored", "tpu")


@pytest.mark.parametrize(
    ("words", "n_pair"),
    [(FEW_PATHS, 1 * 4 * 2), pytest.param(ALL_PATHS, 3 * 4 * 2, marks=EVERY_CASE)],
    ids=["few", "all"],
)
def test_a_mesh_attends_as_one_device_does(words, n_pair, on_eight_devices):
    """In training values and six gradients, with the dropout mask of the whole batch. In inference
    values. Kernels are interpreted.
    """
    results = on_eight_devices("-m", "support.attention_on_meshes", *words)
    assert len(results) == n_pair
    for name, differences in results.items():
        n_array = 1
        if name.startswith("training"):
            n_array = 7
        assert len(differences) == n_array, name
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
    """Chips of slices of 4 x 4 chips, in an order that mixes the slices."""
    mixed = []
    for index in reversed(range(16)):
        coords = (index % 4, index // 4, 0)
        for number in range(num_slices):
            mixed.append(Chip(16 * number + index, number, coords))
    return mixed


def grid(devices, **sizes):
    """The devices of a mesh of these sizes, as an array [data, fsdp, tensor]."""
    slices = mesh_module._slices(devices)
    shape = mesh_module._shape(MeshConfig(**sizes), len(devices), num_slices=len(slices))
    return mesh_module._device_grid(slices, shape)


def coords_of(devices):
    return [chip.coords for chip in devices.flat]


def slices_of(devices):
    return [chip.slice_index for chip in devices.flat]


def test_within_a_slice_the_mesh_is_as_for_one_slice():
    in_order = sorted(chips(1), key=lambda chip: chip.id)
    of_one_slice = mesh_utils.create_device_mesh(
        (2, 8, 1), in_order, allow_split_physical_axes=True
    )

    of_two_slices = grid(sorted(chips(2), key=lambda chip: chip.id), fsdp=8)

    assert of_two_slices.shape == (4, 8, 1)
    assert coords_of(of_two_slices[:2]) == coords_of(of_one_slice)
    assert coords_of(of_two_slices[2:]) == coords_of(of_one_slice)
    assert slices_of(of_two_slices) == [0] * 16 + [1] * 16


def test_as_many_chips_of_each_slice_stay_idle():
    devices = grid(chips(2), data=7)

    assert devices.shape == (14, 1, 1)
    assert slices_of(devices) == [0] * 7 + [1] * 7
    assert len({chip.id for chip in devices.flat}) == 14


def test_sizes_that_do_not_fit_the_slices_are_refused():
    """One slice lacks a chip, or a slice's part of the mesh has 32 devices for its 16 chips."""
    with pytest.raises(UserError, match=r"\b2 TPU slices\b.*\b31 devices\b"):
        grid(chips(2)[1:])
    with pytest.raises(UserError, match=r"\b16\b.*\b2 x 16 x 1\b"):
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
    specs = collections.Counter()
    for equation in tiny.equations(jax.make_jaxpr(function)(*arguments)):
        if equation.primitive.name == "sharding_constraint":
            specs[tuple(equation.params["sharding"].spec)] += 1
    return specs


def expected_constraints(rows, *, outputs=1, heads=4, inner=1):
    """Outputs [B, L, D]; queries, keys, values and what is attended [B, H, L, E]; inner states [B,
    L, F].
    """
    return {
        (rows, None, None): outputs,
        (rows, "tensor", None, None): heads,
        (rows, None, "tensor"): inner,
    }


@pytest.mark.parametrize(("batch_size", "rows"), [(8, ("data", "fsdp")), (6, None)], ids=str)
def test_layers_of_training_and_of_inference(batch_size, rows):
    """Rows that do not divide, as the one row of a published evaluation, are replicated."""
    model = tiny.make()
    variables = jax.eval_shape(lambda: tiny.variables(model))
    tokens = jax.ShapeDtypeStruct((batch_size, 2), "int32")

    def init_memory():
        return model.init_memory(batch_size=batch_size, mem_len=4)

    def train(variables, tokens, memory):
        return model.apply(variables, tokens, memory, **FLAGS)

    def prepare(variables):
        weights = prepare_params(variables["params"], model, segment_len=2, mem_len=4, clamp_len=0)
        cache = forward.init_cache(weights, batch_size=batch_size, mem_len=4, segment_len=2)
        return weights, cache

    with use_mesh(MESH):
        memory = jax.eval_shape(init_memory)
        of_training = constrained(train, variables, tokens, memory)

        weights, cache = jax.eval_shape(prepare, variables)
        of_inference = constrained(forward.forward, weights, tokens, cache)

    # In training the layers are a loop, whose body is counted once. In inference they are not, and
    # only queries, keys and values are constrained.
    assert of_training == expected_constraints(rows)
    assert of_inference == expected_constraints(
        rows, outputs=tiny.N, heads=3 * tiny.N, inner=tiny.N
    )


@pytest.mark.parametrize("mesh", [None, MESH], ids=["no mesh", "mesh"])
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


def shards():
    return num_batch_shards(), num_vocab_shards()


def test_a_thread_has_no_mesh_of_another_thread():
    x = np.arange(8.0)
    with use_mesh(MESH):
        assert shards() == (4, 2)
        assert vocab_axis() == "tensor"

        assert on_thread(ambient_mesh) is None
        assert on_thread(shards) == (1, 1)
        assert on_thread(lambda: constrain(x, axes.BATCH)) is x  # The array itself.


@pytest.mark.parametrize("call", ["__call__", "lower", "eval_shape"])
def test_a_bound_function_has_its_mesh_on_any_thread(call):
    def function():
        return shards()

    # A jitted function has these methods, which must have the mesh too.
    function.lower = shards
    function.eval_shape = shards
    bound = bind_mesh(MESH, function)

    assert on_thread(getattr(bound, call)) == (4, 2)
