"""Tests that two processes put the same global batch on the devices that one would, whatever the mesh."""

import pytest

from support import processes
from support.cases import nightly_but

SCRIPT = """
import dataclasses
import os
import sys

import jax
import numpy as np

from txl_jax.cli import other_hosts
from support import tiny_run
from txl_jax.data.segments import training_segments

data, fsdp, tensor, batch_size, tiled = map(int, sys.argv[1:])
other_hosts.join(other_hosts.announced(os.environ))
sizes = {"mesh__data": data, "mesh__fsdp": fsdp, "mesh__tensor": tensor, "train__batch_size": batch_size}
parts = tiny_run.parts(**sizes, model__n_head=8, model__d_inner=16)
if tiled:  # A process's devices are no stretch of the mesh.
    devices = np.array(jax.devices()).reshape(2, 4).T.reshape(parts.mesh.devices.shape)
    parts = dataclasses.replace(parts, mesh=jax.sharding.Mesh(devices, parts.mesh.axis_names))
tokens = np.arange(1000)
whole = training_segments(tokens, batch_size=batch_size, segment_len=7).segments(3, 2)
rows = parts.own_rows(batch_size)
own = training_segments(tokens, batch_size=batch_size, segment_len=7, own=rows).segments(3, 2)
placed = parts.place(own, batch_size=batch_size)
for found, expected in zip(placed, whole):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
print(rows.tolist(), file=sys.stderr)
"""


CASES = [
    ((8, 1, 1, 16), True, ["[0, 1, 4, 5, 8, 9, 12, 13]", "[2, 3, 6, 7, 10, 11, 14, 15]"]),
    ((1, 1, 8, 4), False, ["[0, 1, 2, 3]"] * 2),  # Both processes' devices hold all rows.
    ((8, 1, 1, 1), False, ["[0]"] * 2),  # One row cannot be spread.
]


@pytest.mark.parametrize(
    ("sizes", "tiled", "rows"), [pytest.param(*CASES[0], marks=pytest.mark.full), *nightly_but([], CASES[1:])]
)
def test_every_device_gets_its_rows(sizes, tiled, rows):
    ended = processes.finish(processes.start("-c", SCRIPT, *sizes, int(tiled)))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [errors.splitlines()[-1] for _, _, errors in ended] == rows
