"""Tests what a run records about where it comes from."""

import shlex
import subprocess
import sys

from support import ROOT
from txl_jax.runtime import environment


def test_the_command_line_has_no_secrets_and_git_may_be_missing(monkeypatch):
    secrets = ["--api_key=a b", "--data.hf_token=a b", "-password=a\nb"]
    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-m", "program", *secrets, "--file=a b", "--data.tokenizer.kind=word"]
    )
    command, versions = environment.origin()
    shown = ["--api_key=...", "--data.hf_token=...", "-password=...", "--file=a b", "--data.tokenizer.kind=word"]
    assert shlex.split(command)[1:] == ["python", "-m", "program", *shown]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert not commit or versions.endswith(f", commit {commit}")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "commit" not in environment.origin()[1] and f"txl_jax {environment.__version__}" in environment.origin()[1]
