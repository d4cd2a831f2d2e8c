"""Tests two processes: broadcasts of results and errors, arrays that are sharded over both, and the
rows of each process.
"""

import json

import pytest

from support import processes

pytestmark = pytest.mark.full
SCRIPT = """
import dataclasses
import json
import os
import sys

import jax
import numpy as np

from support import tiny_run
from txl_jax.cli import other_hosts
from txl_jax.config import MeshConfig
from txl_jax.data.segments import training_segments
from txl_jax.runtime import distributed
from txl_jax.sharding.axes import named_sharding
from txl_jax.sharding.mesh import make_mesh

results = {}


def outcome(act):
    # The result, or the type of an error, its text, and whether all processes know of it.
    try:
        return act()
    except Exception as error:
        return [type(error).__name__, str(error), distributed.is_known_to_all(error)]


def fail_in(number):
    if jax.process_index() == number:
        raise OSError("no space")


def own_rows(data, tensor, batch_size, tiled):
    # Checks that this process's devices get their rows of a batch. Returns the rows' numbers.
    # Heads and units that can be split over up to eight devices.
    sizes = {"mesh__data": data, "mesh__tensor": tensor, "train__batch_size": batch_size}
    parts = tiny_run.parts(**sizes, model__n_head=8, model__d_inner=16)
    if tiled:  # A process's devices are not adjacent in the mesh.
        devices = np.array(jax.devices()).reshape(2, 4).T.reshape(parts.mesh.devices.shape)
        parts = dataclasses.replace(parts, mesh=jax.sharding.Mesh(devices, parts.mesh.axis_names))
    sizes = {"batch_size": batch_size, "segment_len": 7}
    rows = parts.own_rows(batch_size)
    whole = training_segments(np.arange(1000), **sizes, own=None).segments(3, 2)
    mine = training_segments(np.arange(1000), **sizes, own=rows).segments(3, 2)
    placed = parts.place(mine, batch_size=batch_size)
    for array, expected in zip(placed, whole):
        assert array.shape == expected.shape, (array.shape, expected.shape)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
    return rows.tolist()


other_hosts.join(other_hosts.announced(os.environ))
me = jax.process_index()
mine = {"loss": 0.1, "of": me, "none": None}
results["broadcast"] = distributed.broadcast_from_primary(lambda: mine)
results["primary fails"] = outcome(lambda: distributed.broadcast_from_primary(lambda: fail_in(0)))
results["all"] = outcome(lambda: distributed.run_on_all(lambda: me * 10))
results["second fails"] = outcome(lambda: distributed.run_on_all(lambda: fail_in(1)))
results["same"] = outcome(lambda: distributed.assert_same_on_all({"text": 0.1}, "mend it"))
differs = {"text": me, "same": None}
results["other"] = outcome(lambda: distributed.assert_same_on_all(differs, "mend it"))
error = "no network" if me else None
results["errors"] = [distributed.first_error(None), distributed.first_error(error)]
mesh = make_mesh(MeshConfig())
sharding_of_rows = named_sharding(mesh, "batch", None)
my_rows = np.arange(8.0).reshape(4, 2) + 8 * me
sharded = jax.make_array_from_process_local_data(sharding_of_rows, my_rows, (8, 2))
assert not sharded.is_fully_addressable
results["sharded"] = distributed.to_host(sharded).ravel().tolist()
results["primary"] = distributed.is_primary()
results["rows"] = [own_rows(*sizes) for sizes in json.loads(sys.argv[1])]
print("not for the terminal of the second")
print(json.dumps(results), file=sys.stderr if me else sys.stdout)
"""
# The sizes of the mesh's data and tensor axes, the batch size, and whether the mesh is tiled.
SIZES = [(8, 1, 16, True), (1, 8, 4, False), (8, 1, 1, False)]
ROWS_OF_FIRST = [
    # Each device has two rows, and every other device is one of the first process's.
    [0, 1, 4, 5, 8, 9, 12, 13],
    [0, 1, 2, 3],  # The devices of both processes have all rows.
    [0],  # One row cannot be spread.
]
ROWS_OF_SECOND = [[2, 3, 6, 7, 10, 11, 14, 15], [0, 1, 2, 3], [0]]


@pytest.fixture(scope="module")
def both():
    """The results of the script in two processes of four devices."""
    started = processes.start("-c", SCRIPT, json.dumps(SIZES))
    (code_0, out_0, err_0), (code_1, out_1, err_1) = processes.finish(started)
    assert code_0 == code_1 == 0, (err_0, err_1)
    assert out_0.splitlines()[0] == "not for the terminal of the second", "Gloo's lines are omitted"
    assert out_1 == ""
    return json.loads(out_0.splitlines()[-1]), json.loads(err_1.splitlines()[-1])


def test_what_one_finds_all_know_and_what_fails_in_one_fails_in_all(both):
    first, second = both
    for results in both:
        assert results["broadcast"] == {"loss": 0.1, "of": 0, "none": None}
        assert results["same"] is None
        assert results["other"] == [
            "UserError",
            "process 1: text must be 0, as in process 0, got 1. mend it",
            True,
        ]
        assert results["errors"] == [None, "process 1: no network"]
        assert results["sharded"] == list(range(16))
    assert first["all"] == 0
    assert second["all"] == 10
    assert first["primary fails"] == ["OSError", "no space", True]
    assert second["primary fails"] == ["RemoteProcessError", "process 0: no space", True]
    assert first["second fails"] == ["RemoteProcessError", "process 1: no space", True]
    assert second["second fails"] == ["OSError", "no space", True]
    assert first["primary"] is True
    assert second["primary"] is False


def test_every_device_gets_its_rows_of_the_global_batch(both):
    first, second = both
    assert first["rows"] == ROWS_OF_FIRST
    assert second["rows"] == ROWS_OF_SECOND
