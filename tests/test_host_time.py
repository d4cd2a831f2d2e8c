"""Tests that the host time of a step grows with the devices no more than docs/scaling.md states.

As a program, `PYTHONPATH=. python tests/test_host_time.py`, it prints the time of the thread that runs the loop, for
meshes of made-up CPU devices. It cuts segments, puts them on the devices, starts the step and fetches the metrics of
the one before, as the loop does. Rows grow with the devices. Other threads' time, such as the devices', does not count.
"""

import json
import os
import statistics
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from support import ROOT
from txl_jax.config import ExperimentConfig, MeshConfig, ModelConfig, TrainConfig
from txl_jax.data.segments import training_segments
from txl_jax.runs.build import build

ROWS, L, STEPS, WARMUP = 4, 32, 60, 10  # Rows per device.
COUNTS = ("steps", "log_every", "eval_every", "checkpoint_every")
MESHES = {str(count): MeshConfig(data=count) for count in (1, 2, 4, 8)}
MESHES |= {"8, fsdp": MeshConfig(fsdp=8), "8, 2 x 2 x 2": MeshConfig(data=2, fsdp=2, tensor=2)}


def milliseconds_per_step(mesh: MeshConfig) -> float:
    rows = ROWS * (mesh.data or 1) * mesh.fsdp * mesh.tensor
    config = ExperimentConfig(
        model=ModelConfig(n_layer=2, d_model=32, n_head=2, d_head=16, d_inner=64),
        train=TrainConfig(batch_size=rows, segment_len=L, mem_len=L, **dict.fromkeys(COUNTS, STEPS)),
        mesh=mesh,
    )
    parts = build(config, vocab_size=64)
    step = parts.compile_step().program
    state, before, times = parts.init_state(), None, []
    reader = training_segments(np.arange(rows * L * 20) % 64, batch_size=rows, segment_len=L)
    for number in range(STEPS):
        began = time.thread_time()
        state, metrics = step(state, parts.place(reader.segments(number, 1)))
        if before is not None:
            jax.device_get(before)
        before = metrics
        times.append(1e3 * (time.thread_time() - began))
    return statistics.median(times[WARMUP:])


@pytest.mark.nightly(part="long")
def test_a_step_costs_the_host_little_more_on_more_devices():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    found = json.loads(subprocess.check_output([sys.executable, __file__], env=environment, text=True))
    for name in ("8", "8, fsdp", "8, 2 x 2 x 2"):
        assert found[name] - found["1"] < 7 * 0.4, name  # Milliseconds per further device.


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    print(json.dumps({name: round(milliseconds_per_step(mesh), 2) for name, mesh in MESHES.items()}))
