"""Tests the program as a process: start, requests, SIGTERM, refusals."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from support import ROOT, drawn_run, programs
from support.compiled_programs import cache_in
from support.http_server import ask
from support.waiting import wait_until

TEXT = b"the cat sat on the mat and the dog ran\n"
SECONDS = 300


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run with drawn weights."""
    folder = tmp_path_factory.mktemp("run")
    drawn_run.make(folder / "mine", *drawn_run.on_text(folder, TEXT * 50))
    return folder / "mine"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Environment of the processes, which compile once."""
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return os.environ | path | cache_in(tmp_path_factory.mktemp("compiled"))


class Program:
    def __init__(self, run, environment, *flags, **variables):
        command = [sys.executable, "-m", "experiments.serve", f"--model={run}", "--port=0", "--rows=2", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment | variables, **pipes)
        lines = iter(self.process.stdout.readline, "")
        address = next((line for line in lines if line.startswith("listening")), None)
        assert address, self.process.stderr.read()
        self.port = int(address.rpartition(":")[2])
        wait_until(lambda: ask(self.port, "/readyz")[0] == 200, SECONDS)

    def end(self, number):
        """The exit code and what it has printed on the error stream, after a signal."""
        self.process.send_signal(number)
        self.last_lines, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors


def complete(port, session, *, tokens, prompt=""):
    body = {"prompt": prompt, "session": session, "max_tokens": tokens, "temperature": 0}
    return ask(port, "/v1/completions", body)[1]["choices"][0]["text"]


@pytest.mark.full
def test_sigterm_lets_requests_end(run, compiled):
    server = Program(run, compiled, TXL_API_KEYS="")
    assert ask(server.port, "/v1/models")[1]["data"][0]["id"] == "mine"
    name = ask(server.port, "/v1/sessions", {})[1]["id"]
    texts = [complete(server.port, name, tokens=10, prompt="the cat ")]
    running = threading.Thread(target=lambda: texts.append(complete(server.port, name, tokens=2000)))
    running.start()
    wait_until(lambda: "txl_rows_busy 1.0" in ask(server.port, "/metrics")[1])
    code, errors = server.end(signal.SIGTERM)
    running.join()
    assert (code, errors) == (0, "")
    assert [line.split()[0] for line in server.last_lines.splitlines()] == ["stopping", "stopped"]
    server = Program(run, compiled)
    body = {"prompt": "the cat ", "max_tokens": 2010, "temperature": 0}
    assert ask(server.port, "/v1/completions", body)[1]["choices"][0]["text"] == "".join(texts)
    assert server.end(signal.SIGINT)[0] == 0


@pytest.mark.full
def test_what_takes_too_long_is_cut_off(run, compiled):
    server = Program(run, compiled, "--drain_seconds=0.5", "--max_new_tokens=100000000")
    found = []
    body = {"prompt": "the", "max_tokens": 100_000_000}
    running = threading.Thread(target=lambda: found.append(ask(server.port, "/v1/completions", body)))
    running.start()
    wait_until(lambda: "txl_rows_busy 1.0" in ask(server.port, "/metrics")[1])
    assert server.end(signal.SIGTERM)[0] == 0
    running.join()
    assert found[0][0] == 503 and found[0][1]["error"]["code"] == "unavailable"


def test_what_cannot_be_served_is_refused(run):
    with socket.create_server(("127.0.0.1", 0)) as used:
        for flag, named in (("--host=0.0.0.0", "TXL_API_KEYS"), (f"--port={used.getsockname()[1]}", "--port")):
            code, _, errors = programs.run("experiments.serve", f"--model={run}", flag)
            assert code == 1 and named in errors and errors.count("\n") == 1
