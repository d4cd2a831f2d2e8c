"""Tests that two processes put the same global batch on the devices that one would, whatever the mesh."""

import os
import socket
import subprocess
import sys

import pytest

from support import ROOT
from support.xla_flags import xla_flags

SCRIPT = """
import dataclasses
import sys

import jax
import numpy as np

port, process, data, fsdp, tensor, batch_size, tiled = map(int, sys.argv[1:])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

from support import tiny_run
from txl_jax.data.batches.segment_reader import training_segments

parts = tiny_run.parts(
    mesh__data=data,
    mesh__fsdp=fsdp,
    mesh__tensor=tensor,
    train__batch_size=batch_size,
    model__n_head=8,
    model__d_inner=16,
)
if tiled:  # A process's devices are no stretch of the mesh.
    devices = np.array(jax.devices()).reshape(2, 4).T.reshape(parts.mesh.devices.shape)
    parts = dataclasses.replace(parts, mesh=jax.sharding.Mesh(devices, parts.mesh.axis_names))
tokens = np.arange(1000)
whole = training_segments(tokens, batch_size=batch_size, segment_len=7).segments(3, 2)
rows = parts.placement.own_rows(batch_size)
own = training_segments(tokens, batch_size=batch_size, segment_len=7, own=rows).segments(3, 2)
placed = parts.placement.place(own, batch_size=batch_size)
for found, expected in zip(placed, whole):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index])
print("rows", *rows)
"""


def two_processes(*arguments):
    """The last lines printed by two processes with four devices each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices=4),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    command = [sys.executable, "-c", SCRIPT, str(port)]
    started = [
        subprocess.Popen(
            [*command, str(process), *map(str, arguments)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for process in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    return [out.splitlines()[-1] for out, _ in ended]


@pytest.mark.parametrize(
    ("mesh", "batch_size", "tiled", "rows"),
    [
        ((8, 1, 1), 8, False, ["rows 0 1 2 3", "rows 4 5 6 7"]),
        ((8, 1, 1), 16, True, ["rows 0 1 4 5 8 9 12 13", "rows 2 3 6 7 10 11 14 15"]),
        ((4, 1, 2), 8, False, ["rows 0 1 2 3", "rows 4 5 6 7"]),
        ((1, 1, 8), 4, False, ["rows 0 1 2 3", "rows 0 1 2 3"]),  # Both processes' devices hold all rows.
        ((8, 1, 1), 1, False, ["rows 0", "rows 0"]),  # One row cannot be spread.
    ],
)
def test_every_device_gets_its_rows(mesh, batch_size, tiled, rows):
    assert two_processes(*mesh, batch_size, int(tiled)) == rows
