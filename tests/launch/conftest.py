"""A folder in place of Google Cloud."""

import subprocess

import pytest

from support.fake_cloud import FAKES, HOST_COMMANDS


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
