"""Tests that weights of wt103_large's full size are converted in less memory than twice the file."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from support import ROOT
from txl_jax.config import EvalConfig, ModelConfig
from txl_jax.interop import huggingface, original, safetensors
from txl_jax.interop.leaves import Leaf
from txl_jax.interop.original import Format

SIZES = {"n_layer": 18, "d_model": 1024, "n_head": 16, "d_head": 64, "d_inner": 4096}
CONFIG = ModelConfig(**SIZES, cutoffs=(20000, 40000, 200000), div_val=4, tie_projs=(False, True, True, True))
V = 267_735
# Prints the peak of this process once the program has ended.
MAIN = """
import atexit, resource, runpy, sys
atexit.register(lambda: print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
sys.argv[0] = "convert"
runpy.run_module("experiments.convert", run_name="__main__")
"""


def drawn(name, shape):
    """A tensor that is drawn when it is read."""

    def part(_):
        if name.endswith("layer_norm.weight"):
            return np.ones(shape, np.float32)
        seed = int.from_bytes(name.encode()[-16:], "little")
        return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(0.02)

    return Leaf(shape, np.dtype(np.float32), part)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as Hugging Face's, of 285,170,506 random weights."""
    made = tmp_path_factory.mktemp("large") / "huggingface"
    made.mkdir()
    pieces = original._pieces(CONFIG, V, Format.HUGGINGFACE)
    tensors = {theirs.name: drawn(theirs.name, theirs.shape) for theirs, _ in pieces}
    safetensors.write(made / "model.safetensors", tensors, metadata={"format": "pt"})
    arguments = huggingface.config_of(CONFIG, EvalConfig(mem_len=1600, clamp_len=1000), vocab_size=V)
    (made / "config.json").write_text(json.dumps(arguments))
    return made


@pytest.mark.nightly(part="long")
def test_weights_of_full_size_need_less_than_twice_the_file(folder, tmp_path):
    size = (folder / "model.safetensors").stat().st_size
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    native, back = tmp_path / "native", tmp_path / "back"
    for source, target, to_format in ((folder, native, "native"), (native, back, "huggingface")):
        command = [sys.executable, "-c", MAIN, f"--from={source}", f"--to={target}", f"--to_format={to_format}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "285,170,506 parameters" in done.stdout
        peak = int(re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)[1]) * 1024
        assert peak < 2 * size, done.stdout
