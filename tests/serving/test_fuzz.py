"""Fuzzes the HTTP surface: no answer of 500, nothing left in rows, no memory and no file left."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.http_server import check_as_before, in_its_own_process, resources, wait_idle
from txl_jax.serving.engine import Limits


@pytest.mark.nightly(part="long")
def test_requests_made_from_its_schema(tmp_path):
    """By schemathesis. Data that the schema allows may be refused: an id that the vocabulary lacks, too many tokens."""
    checks = "not_a_server_error,content_type_conformance,negative_data_rejection"
    program = Path(sys.executable).with_name("schemathesis")
    limits = Limits(body_bytes=5000, tokens=100, new_tokens=20, choices=6)
    with in_its_own_process(num_sessions=3, limits=limits) as (port, process):
        command = [program, "run", f"http://127.0.0.1:{port}/openapi.json", "--workers=4", f"--checks={checks}"]

        def send(examples):
            run = [*command, f"--max-examples={examples}"]
            found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
            assert found.returncode == 0, found.stdout + found.stderr
            wait_idle(port)
            return found.stdout

        send(50)
        before = resources(process)
        print(re.findall("[0-9,]+ generated", send(500)), end=" ")
        check_as_before(process, before)
