"""A folder in place of Google Cloud, and files of sweeps."""

import subprocess

import numpy as np
import pytest

from support.fake_cloud import FAKES, HOST_COMMANDS

TINY = """
program = "text"
[base]
data.file = "WORK/words.txt"
cache_dir = "WORK/cache"
model = { n_layer = 1, d_model = 16, n_head = 2, d_head = 8, d_inner = 16 }
optimizer.warmup_steps = 10
train.batch_size = 4
train.segment_len = 16
train.mem_len = 16
train.segments_per_call = 2
train.steps = 1200
train.log_every = 10
train.eval_every = 100
train.checkpoint_every = 600
eval = { batch_size = 4, segment_len = 16, mem_len = 32 }
"""


@pytest.fixture
def write(tmp_path):
    """Writes the file of a sweep, on tiny runs unless given others; returns its path."""
    (tmp_path / "words.txt").write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three"], 12_000)))

    def make(text, base=TINY):
        (tmp_path / "sweep.toml").write_text(base.replace("WORK", str(tmp_path)) + text)
        return tmp_path / "sweep.toml"

    return make


@pytest.fixture
def cloud(tmp_path):
    """A folder in place of the cloud; its `program` is what the hosts run in place of python."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "gcloud").symlink_to(FAKES / "gcloud")
    for name in HOST_COMMANDS:
        (commands / name).symlink_to(FAKES / "host")
    clone = tmp_path / "clone"
    clone.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    (clone / "setup.cfg").write_text("[metadata]\n")
    (clone / ".gitignore").write_text("data/\n")
    (clone / "data").mkdir()
    (clone / "data" / "large").write_text("not to be sent")
    return tmp_path
