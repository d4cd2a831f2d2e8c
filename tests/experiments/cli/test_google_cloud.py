"""Tests where notices of Google Cloud are waited for, and that one ends a program as SIGTERM does."""

import os
import subprocess
import sys

import pytest

from experiments.cli import google_cloud
from support import ROOT
from support.metadata_server import MetadataServer

PROGRAM = """
import time
from experiments.cli import runner
from txl_jax.runtime.preemption import StopRequest

def job():
    with StopRequest() as stop:
        while not stop:
            time.sleep(0.01)
    return runner.exit_code_of(stop)

raise SystemExit(runner.guarded(job, begin=lambda: print("ready", flush=True)))
"""


@pytest.mark.parametrize(
    ("environment", "product", "expected"),
    [
        ({}, "Google Compute Engine\n", "metadata.google.internal"),
        ({}, "Standard PC (Q35 + ICH9, 2009)\n", None),
        ({}, None, None),
        ({"GCE_METADATA_HOST": "127.0.0.1:80"}, None, "127.0.0.1:80"),
        ({"NO_GCE_CHECK": "True", "GCE_METADATA_HOST": "127.0.0.1:80"}, "Google Compute Engine\n", None),
    ],
)
def test_only_a_machine_of_google_cloud_has_a_server(tmp_path, environment, product, expected):
    if product is not None:
        (tmp_path / "product_name").write_text(product)
    assert google_cloud.metadata_server(environment, tmp_path / "product_name") == expected


def test_a_notice_ends_a_program_with_the_exit_code_of_sigterm():
    with MetadataServer(maintenance_event="NONE", preempted="FALSE") as server:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=os.environ | {"GCE_METADATA_HOST": server.host},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout.readline() == "ready\n"
        server.change("preempted", "TRUE")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and err.startswith("preempted=TRUE: "), err
