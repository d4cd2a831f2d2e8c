"""Tests the program as a process: start, requests, SIGTERM, refusals."""

import concurrent.futures
import signal
import socket

import pytest

from support import drawn_run, programs
from support.compiled_programs import cache_in
from support.http_server import Program, ask, complete, metrics
from support.serving import SECONDS
from support.waiting import wait_until

TEXT = b"the cat sat on the mat and the dog ran\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    drawn_run.make(folder / "mine", *drawn_run.on_text(folder, TEXT * 50))
    return folder / "mine"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return cache_in(tmp_path_factory.mktemp("compiled"))


def written(port, **body):
    return complete(port, temperature=0, **body)[1]["choices"][0]["text"]


@pytest.mark.full
def test_sigterm_lets_requests_end(run, compiled):
    server = Program(run, TXL_API_KEYS="", **compiled)
    assert ask(server.port, "/v1/models")[1]["data"][0]["id"] == "mine"
    name = ask(server.port, "/v1/sessions", {})[1]["id"]
    first = written(server.port, session=name, max_tokens=10, prompt="the cat ")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        second = pool.submit(written, server.port, session=name, max_tokens=2000, prompt="")
        wait_until(lambda: metrics(server.port)["txl_rows_busy"])
        assert server.end(signal.SIGTERM) == (0, "")
    assert [line.split()[0] for line in server.last_lines.splitlines()] == ["stopping", "stopped"]
    server = Program(run, **compiled)
    assert written(server.port, prompt="the cat ", max_tokens=2010) == first + second.result()
    assert server.end(signal.SIGINT)[0] == 0


@pytest.mark.full
def test_what_takes_too_long_is_cut_off(run, compiled):
    server = Program(run, "--drain_seconds=0.5", "--max_request_tokens=200000000", **compiled)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(complete, server.port, prompt="the", max_tokens=100_000_000)
        wait_until(lambda: metrics(server.port)["txl_rows_busy"])
        assert server.end(signal.SIGTERM)[0] == 0
    status, answer = found.result()
    assert status == 503 and answer["error"]["code"] == "unavailable"


def test_what_cannot_be_served_is_refused(run):
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = f"--port={used.getsockname()[1]}"
        few = ("--max_session_gib=1e-9", "--max_session_gib")
        for flag, named in (("--host=0.0.0.0", "API_KEYS"), (port, "--port"), ("--rows=999999999", "KV cache"), few):
            code, _, errors = programs.run("experiments.serve", f"--model={run}", flag)
            assert code == 1 and named in errors and errors.count("\n") == 1


@pytest.mark.full
def test_a_dead_engine_ends_the_program(run, compiled):
    """With an exit code that makes a supervisor start it again, and an answer for who waits."""
    broken = "lambda step, *given: 1 / 0 if given[-1].steps.any() else write(step, *given)"
    change = f"from txl_jax.serving.rows import Step; write = Step.write; Step.write = {broken}"
    server = Program(run, change=change, **compiled)
    assert complete(server.port, prompt="the")[0] == 503
    output, errors = server.process.communicate(timeout=SECONDS)
    assert server.process.returncode == 1 and "ZeroDivisionError" in errors and output.splitlines()[-1] == "stopped"
