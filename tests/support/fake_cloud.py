"""Runs launch/tpu.sh against a fake gcloud and fake hosts, which are scripts of tests/launch/fake."""

import itertools
import os
import subprocess
import sys
import time

import pytest

from support import ROOT

FAKES = ROOT / "tests" / "launch" / "fake"
SCRIPT = str(ROOT / "launch" / "tpu.sh")
RUN = ["--", "python", "-m", "experiments.enwik8", "--workdir=gs://mine/one", "--generate.prompt=it's"]
HOST_COMMANDS = ("sudo", "python3", "uv", "systemctl", "systemd-run", "journalctl", "curl")


def start(cloud, *words, **environment):
    own = {"PATH": f"{cloud / 'bin'}:{os.environ['PATH']}", "FAKE": str(cloud), "TMPDIR": str(cloud)}
    variables = os.environ | own | {"REAL_PYTHON": sys.executable} | environment
    return subprocess.Popen(
        [SCRIPT, *words], cwd=cloud / "clone", env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def call(cloud, *words, **environment):
    process = start(cloud, *words, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def program(cloud, text):
    (cloud / "program").write_text(f"#!/usr/bin/env bash\nset -eu\n{text}")
    (cloud / "program").chmod(0o755)


def wait_until(condition, process):
    """Returns when it holds; kills the process if that takes half a minute."""
    for _ in range(1500):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"it never came to that: {process.communicate()}")


def is_running(cloud):
    """Returns whether both hosts run the program, and have been asked about it since."""
    log = (cloud / "host.log").read_text() if (cloud / "host.log").exists() else ""
    _, started, since = log.rpartition("\nsystemd-run ")
    return started and since.count("ExecMainStatus") >= 2


def asked_of_gcloud(cloud):
    """Verbs of the requests that change something; an installation that is tried again counts once."""
    lines = (cloud / "gcloud.log").read_text().splitlines()
    commands = [line.split()[2:4] for line in lines]
    return [verb for verb, _ in itertools.groupby(verb for _, verb in commands if verb in ("create", "delete", "scp"))]
