"""Tests where notices of Google Cloud are waited for, and that one ends a program as SIGTERM does."""

import threading
import time

import pytest

from support.metadata_server import MetadataServer
from txl_jax.cli import runner
from txl_jax.runtime import stop


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
    assert stop.metadata_server(environment, tmp_path / "product_name") == expected


def test_a_notice_ends_a_program_with_the_exit_code_of_sigterm(monkeypatch, capfd):
    def job():
        server.change("preempted", "TRUE")
        until = time.monotonic() + 30
        with stop.StopRequest() as requested:
            while not requested and time.monotonic() < until:
                time.sleep(0.01)
        return runner.exit_code_of(requested)

    with MetadataServer(maintenance_event="NONE", preempted="FALSE") as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        monkeypatch.setattr(stop, "_requested", threading.Event())  # Else it stays set for this process.
        assert runner.guarded(job) == 143
    assert "preempted=TRUE: " in capfd.readouterr().err
