"""Tests the serve command: what its flags change, and its process, from start to SIGTERM."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import resource
import signal
import socket
import time
import types

import pytest
import uvicorn

from experiments import serve
from support import calls, drawn_run, programs, tiny_run
from support.compiled_programs import cache_in
from support.http_server import Program, ask, complete, metrics
from support.serving import SECONDS
from support.waiting import wait_until
from txl_jax import trained_model
from txl_jax.cli import app as cli_app
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.serving import app, connections, engine, rows, sessions
from txl_jax.serving.middleware import LOOPBACK

TEXT = b"the cat sat on the mat and the dog ran\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a run that can be served."""
    directory = tmp_path_factory.mktemp("run")
    config, corpus = drawn_run.on_text(directory, TEXT * 50)
    drawn_run.make(directory / "mine", config, corpus)
    return directory / "mine"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return cache_in(tmp_path_factory.mktemp("compiled"))


def written(port, **body):
    """The text that the server writes."""
    status, answer = complete(port, temperature=0, **body)
    assert status == 200, answer
    return answer["choices"][0]["text"]


# What becomes of each flag


class Server:
    """Takes the place of uvicorn's server: gets SIGTERM and ends."""

    passed: dict

    def __init__(self, config):
        self.started = True

    async def serve(self, sockets):
        assert sockets[0].getsockname()[0] == "127.0.0.1"
        # The functions that are called later, each after its seconds.
        later = []

        def call_later(seconds, function, *arguments):
            later.append((seconds, function))

        asyncio.get_running_loop().call_later = call_later
        self.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0)  # The handler schedules its call from the loop.
        [(self.passed["drain"], cut_off)] = later
        cut_off()  # Schedules the end of all connections.
        self.passed["leave"] = later[1]


# What the parts of the command return to it. Where a word stands for an object, the command only
# passes it on, and the tests see to whom.
USUAL = "--model=/runs/mine"
FREE_PORT = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]
MODEL = types.SimpleNamespace(
    config=tiny_run.CONFIG,
    components="components",
    params="params",
    vocabulary="vocabulary",
    step=1,
)
ROWS = types.SimpleNamespace(row_bytes=lambda params: 1 << 20)  # A session takes 1 MiB.
ENGINE = types.SimpleNamespace(refuse=lambda message: None, cut_off=lambda: None, failed=False)
APP = types.SimpleNamespace(state=types.SimpleNamespace(count="count"))
CONNECTIONS = types.SimpleNamespace(make="make", abort="abort")


@pytest.fixture
def served(monkeypatch):
    """Returns every argument that the command with these flags passes to its parts, by name."""

    def served(*flags):
        passed = {}
        # Whatever the address is, a free port of this machine is bound.
        calls.keep(monkeypatch, passed, socket, "getaddrinfo", FREE_PORT)
        calls.keep(monkeypatch, passed, trained_model, "load", MODEL)
        calls.keep(monkeypatch, passed, engine, "Engine", ENGINE)
        calls.keep(monkeypatch, passed, sessions, "SessionStore", "store")
        calls.keep(monkeypatch, passed, rows, "Step", ROWS)
        calls.keep(monkeypatch, passed, app, "make_app", APP)
        calls.keep(monkeypatch, passed, connections, "most_connections", 99)
        calls.keep(monkeypatch, passed, connections, "Connections", CONNECTIONS)
        calls.keep(monkeypatch, passed, cli_app, "keep_compiled")
        # The real one would close the streams of other loggers.
        calls.keep(monkeypatch, passed, uvicorn, "Config")
        monkeypatch.setattr(Server, "passed", passed, raising=False)
        monkeypatch.setattr(uvicorn, "Server", Server)
        loop = asyncio.new_event_loop()  # The program leaves its own to the end of its process.
        with monkeypatch.context() as patch, contextlib.closing(loop):
            patch.setattr(asyncio, "new_event_loop", lambda: loop)
            code, _, errors = programs.run("experiments.serve", *flags)
        assert code == 0, errors
        limits = dataclasses.asdict(passed.pop("Engine.limits"))
        return passed | {f"limits.{name}": value for name, value in limits.items()}

    monkeypatch.delenv("TXL_API_KEYS", raising=False)
    on_interrupt = signal.getsignal(signal.SIGINT)
    yield served
    signal.signal(signal.SIGINT, on_interrupt)  # The program changes it.


# A second value of each flag, and everything that it changes. `served` takes the engine's limits
# apart.
EFFECTS = {
    "--compilation_cache=off": {"keep_compiled.named": "off"},
    "--weight_dtype=int8": {"load.weight_dtype": "int8"},
    "--cache_dtype=bfloat16": {"load.cache_dtype": "bfloat16"},
    "--model=/runs/other": {"load.path": "/runs/other", "make_app.model": "other"},
    "--ensemble_member=seed=2": {"load.member": "seed=2"},
    "--port=8123": {"getaddrinfo.port": 8123},
    # Each choice in a row or waiting (512 by default) has a connection.
    "--rows=3": {"Step.batch_size": 3, "most_connections.num_choices": 3 + 512},
    # 2 s for clients to take their last answers, rounded up to 7 s in all, and 3 s for uvicorn.
    "--drain_seconds=4.5": {"drain": 4.5, "Config.timeout_graceful_shutdown": 7 + 3},
}
EFFECTS_ON_HOSTS = {
    "--host=localhost": {
        "getaddrinfo.host": "localhost",
        "make_app.hosts": (*LOOPBACK, "localhost"),
    },
    "--allowed_hosts=a.example,b": {
        "make_app.hosts": (*LOOPBACK, "127.0.0.1", "a.example", "b"),
    },
}
EFFECTS_ON_LIMITS = {
    # A body has up to 12 bytes per token.
    "--max_request_tokens=1048576": {"limits.tokens": 1 << 20, "limits.body_bytes": 12 << 20},
    "--max_new_tokens=77": {"limits.new_tokens": 77},
    "--max_waiting=5": {"limits.waiting": 5, "most_connections.num_choices": 8 + 5},
    "--request_seconds=2.5": {"limits.seconds": 2.5},
    "--max_sessions=9": {"SessionStore.limit": 9, "SessionStore.limit_per_owner": 9},
    # 8 MiB.
    "--max_session_gib=0.0078125": {"SessionStore.limit": 8, "SessionStore.limit_per_owner": 8},
    "--session_seconds=7.5": {"SessionStore.seconds": 7.5},
}
ALL_EFFECTS = EFFECTS | EFFECTS_ON_HOSTS | EFFECTS_ON_LIMITS


def test_every_flag_has_its_effects():
    """A new flag needs a row in one of the tables."""
    names = [flag.removeprefix("--").partition("=")[0] for flag in ALL_EFFECTS]
    assert sorted(names) == sorted(leaf.name for leaf in config_tree.leaves(serve.Plan))


@pytest.mark.parametrize(("flag", "effect"), ALL_EFFECTS.items(), ids=ALL_EFFECTS)
def test_each_flag_changes_what_it_says_and_nothing_else(served, flag, effect):
    before = served(USUAL)
    after = served(USUAL, flag)
    assert after == before | effect
    for part, value in effect.items():
        assert before[part] != value, part


def test_the_usual_server_has_the_documented_limits(served):
    passed = served(USUAL)
    assert passed["getaddrinfo.host"] == "127.0.0.1"
    assert passed["getaddrinfo.port"] == 8000
    assert passed["make_app.hosts"] == (*LOOPBACK, "127.0.0.1")
    assert passed["make_app.keys"] == []
    assert passed["drain"] == 30.0
    assert passed["leave"] == (2.0, "abort"), "clients have 2 s to take their last answers"
    assert passed["Connections.most"] == 99
    assert passed["Connections.count"] == "count"
    assert passed["Connections.header_seconds"] == 10
    assert passed["Connections.stalled_seconds"] == 30
    assert passed["Config.http"] == "make"
    assert passed["Config.ws"] == "none"
    assert passed["Config.timeout_keep_alive"] == 30
    assert passed["limits.seconds"] == 600
    assert passed["limits.waiting"] == 512
    assert passed["limits.new_tokens"] == 4096
    assert passed["limits.tokens"] == 200_000
    assert passed["limits.body_bytes"] == 12 * 200_000
    assert passed["limits.body_seconds"] == 30
    assert passed["limits.choices"] == 128
    assert passed["limits.stop_strings"] == 16
    assert passed["limits.stop_length"] == 256
    assert passed["SessionStore.limit"] == 16
    assert passed["SessionStore.seconds"] == 3600


def test_keys_come_from_the_environment_and_share_the_sessions(served, monkeypatch):
    monkeypatch.setenv("TXL_API_KEYS", "two, one,,")
    passed = served(USUAL, "--max_sessions=9")
    assert passed["make_app.keys"] == ["one", "two"]
    assert passed["SessionStore.limit"] == 9
    assert passed["SessionStore.limit_per_owner"] == 9 // 2


@pytest.mark.parametrize(
    ("flags", "hosts"),
    [
        pytest.param(["--host=0.0.0.0"], (), id="all addresses"),
        pytest.param(
            ["--host=0.0.0.0", "--allowed_hosts=a"],
            (*LOOPBACK, "0.0.0.0", "a"),
            id="all addresses, one name",
        ),
        pytest.param(["--host=localhost"], (*LOOPBACK, "localhost"), id="this machine"),
    ],
)
def test_any_host_is_accepted_only_by_a_server_at_all_addresses(served, monkeypatch, flags, hosts):
    monkeypatch.setenv("TXL_API_KEYS", "one")
    assert served(USUAL, *flags)["make_app.hosts"] == hosts


@pytest.mark.parametrize("keys", ["", ",", " , "])
def test_keys_of_which_there_are_none_are_an_error(monkeypatch, keys):
    """Such a variable looks as if the server needed a key."""
    monkeypatch.setenv("TXL_API_KEYS", keys)
    code, _, errors = programs.run("experiments.serve", USUAL)
    assert code == 1
    assert errors.count("\n") == 1
    assert "TXL_API_KEYS" in errors
    assert repr(keys) in errors


async def no_delay_of_a_connection():
    """Returns TCP_NODELAY of a connection that the serve command's socket accepts."""
    accepted = asyncio.get_running_loop().create_future()
    with serve._bind("127.0.0.1", 0) as bound:
        listening = await asyncio.start_server(
            lambda _, writer: accepted.set_result(writer), sock=bound
        )
        _, client = await asyncio.open_connection(*bound.getsockname())
        writer = await accepted
        connection = writer.get_extra_info("socket")
        option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close()
        writer.close()
        listening.close()
    return option


def test_small_parts_of_answers_are_sent_at_once():
    """Otherwise each answer on a kept connection waits 40 ms for the client's delayed
    acknowledgement.
    """
    assert asyncio.run(no_delay_of_a_connection()) == 1


# 58 files are left to the rest: the 10 that are open here, and 48 spare ones. At most there are as
# many connections as choices (520), and 512 more.
@pytest.mark.parametrize(
    ("files", "most"), [(96, 38), (1024, 966), (1 << 20, 1032), (resource.RLIM_INFINITY, 1032)]
)
def test_connections_leave_files_for_the_rest(monkeypatch, files, most):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (files, files))
    monkeypatch.setattr(connections.os, "listdir", lambda path: ["0"] * 10)
    assert connections.most_connections(520) == most


def test_a_limit_of_files_that_leaves_no_connection_is_an_error(monkeypatch):
    # Fewer than the spare files alone.
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 40))
    with pytest.raises(UserError, match="ulimit -n"):
        connections.most_connections(520)


# As a process


@pytest.mark.full
def test_sigterm_lets_requests_end(run, compiled):
    server = Program(run, **compiled)
    assert ask(server.port, "/v1/models")[1]["data"][0]["id"] == "mine"
    assert ask(server.port, "/v1/models", headers={"Host": "evil.example"})[0] == 421
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
    # A text that does not end before it is cut off.
    server = Program(
        run,
        "--drain_seconds=0.5",
        "--max_new_tokens=100000000",
        "--max_request_tokens=200000000",
        **compiled,
    )
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        request = pool.submit(complete, server.port, prompt="the", max_tokens=100_000_000)
        wait_until(lambda: metrics(server.port)["txl_rows_busy"])
        assert server.end(signal.SIGTERM)[0] == 0
    status, answer = request.result()
    assert status == 503, answer
    assert answer["error"]["code"] == "unavailable"


@pytest.mark.full
def test_an_answer_that_is_written_is_cut_off(run, compiled):
    """Its choices have ended, so that the engine has nothing to end.

    Its client takes nothing of another answer.
    """
    # The request has more tokens than are allowed by default, and each piece takes 0.1 s.
    flags = ("--drain_seconds=0.5", "--max_request_tokens=100000000")
    change = """
import time
from txl_jax.serving.protocol import ChoiceWriter

json_of = ChoiceWriter.json_of

def slow_json_of(*arguments):
    time.sleep(0.1)
    return json_of(*arguments)

ChoiceWriter.json_of = slow_json_of
"""
    server = Program(run, *flags, change=change, **compiled)
    body = {"prompt": "the cat " * 100, "n": 100, "max_tokens": 0, "echo": True, "logprobs": 5}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, stalled_client(server.port):
        request = pool.submit(ask, server.port, "/v1/completions", body)
        wait_until(
            lambda: metrics(server.port).get('txl_choices_ended_total{reason="length"}') == 100
        )
        began = time.monotonic()
        assert server.end(signal.SIGTERM)[0] == 0
        seconds = time.monotonic() - began
    status, answer = request.result()
    assert status == 503, answer
    assert answer["error"]["code"] == "unavailable"
    # To write the whole answer takes 100 s, and the other client never leaves. A busy machine may
    # need more than the 0.5 s, and the 2 s for clients to take their last answers.
    assert seconds < 15


@contextlib.contextmanager
def stalled_client(port):
    """A client that asks for the page again and again, and reads nothing."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(1)
        with contextlib.suppress(TimeoutError):
            while True:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        yield


@pytest.fixture
def used_port():
    with socket.create_server(("127.0.0.1", 0)) as used:
        yield used.getsockname()[1]


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        pytest.param("--host=0.0.0.0", "API_KEYS", id="all addresses without keys"),
        pytest.param("--port={used_port}", "--port", id="a port in use"),
        pytest.param("--rows=999999999", "KV cache", id="too many rows"),
        pytest.param("--max_session_gib=1e-9", "--max_session_gib", id="no room for sessions"),
    ],
)
def test_what_cannot_be_served_is_refused(run, used_port, flag, words):
    flag = flag.format(used_port=used_port)
    code, _, errors = programs.run("experiments.serve", f"--model={run}", flag)
    assert code == 1, errors
    assert errors.count("\n") == 1, errors
    assert words in errors


@pytest.mark.full
def test_a_dead_engine_ends_the_program(run, compiled):
    """The exit code makes a supervisor start it again, and clients that wait get an answer."""
    change = """
from txl_jax.serving.rows import Step

write = Step.write

def broken_write(step, weights, rings, rows):
    if rows.steps.any():  # Not in the call that only compiles.
        1 / 0
    return write(step, weights, rings, rows)

Step.write = broken_write
"""
    server = Program(run, change=change, **compiled)
    assert complete(server.port, prompt="the")[0] == 503
    output, errors = server.process.communicate(timeout=SECONDS)
    assert server.process.returncode == 1
    assert "ZeroDivisionError" in errors
    assert output.splitlines()[-1] == "stopped"
