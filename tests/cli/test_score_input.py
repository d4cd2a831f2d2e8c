"""Tests --mode=score --input as a user starts it: standard input with a mistake, and Ctrl-C."""

import json
import os
import signal
import subprocess

import pytest

from support import ROOT, drawn_run, programs

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run with drawn parameters on characters."""
    folder = tmp_path_factory.mktemp("run")
    config, corpus = drawn_run.on_text(folder, b"the cat sat\n" * 100, data__tokenizer__kind="char")
    drawn_run.make(folder / "run", config, corpus)
    return folder / "run"


def start(*flags, **pipes):
    command = programs.command("experiments.text", "--mode=score", *flags)
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    pipes |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Without a buffer, from which `communicate` would not take what `readline` had read ahead.
    return subprocess.Popen(command, cwd=ROOT, env=environment, bufsize=0, **pipes)


def test_ctrl_c_ends_a_job_after_a_complete_record(workdir, tmp_path):
    (tmp_path / "book.txt").write_text("the cat\n" * 200_000)
    with start(f"--workdir={workdir}", f"--input={tmp_path / 'book.txt'}", "--per_token") as process:
        assert json.loads(process.stdout.readline())["token"] == "h"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT and b"stopped" in err
    assert len([json.loads(line) for line in out.splitlines()]) + 1 < 6 * 200_000
