"""Tests signals and notices: what they stop or save, in one process and in two, and that handlers
come back.
"""

import os
import queue
import signal
import threading

import pytest

from support import processes
from support.metadata_server import ROOT, MetadataServer
from support.waiting import wait_until
from txl_jax.runtime import stop
from txl_jax.runtime.stop import StopRequest

TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
CALM = {"maintenance_event": "NONE", "preempted": "FALSE"}
SIGNALS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def arrivals():
    """The signals that reach the handlers from before the request, instead of ending the tests."""
    seen: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: seen.append(number))
        for number in SIGNALS
    }
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_acts_as_before(arrivals, first, second):
    with StopRequest() as stop:
        assert not stop and stop.signal_number == 0
        send(first)
        assert stop and stop.signal_number == first
        assert arrivals == []
        send(second)
        assert arrivals == [second]
    assert stop.signal_number == first


@pytest.fixture
def hangups():
    """The hangups that reach the handler from before the request."""
    seen: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("arrivals")
@pytest.mark.parametrize("first", [*SIGNALS, signal.SIGHUP])
def test_a_closed_terminal_stops_once_and_never_ends_a_run_that_saves(hangups, first):
    """The shell and the system both send SIGHUP, and service managers send it right after
    SIGTERM.
    """
    with StopRequest() as stop:
        send(first)
        assert stop and stop.signal_number == first
        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert stop.signal_number == first and hangups == []
    send(signal.SIGHUP)
    assert hangups == [signal.SIGHUP]


def test_a_hangup_stays_ignored_as_nohup_wants_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            send(signal.SIGHUP)
            assert not stop
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("arrivals")
def test_an_error_stream_that_is_gone_does_not_lose_the_request(monkeypatch):
    def gone(number, data):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(os, "write", gone)
    with StopRequest() as stop:
        send(signal.SIGINT)
        assert stop and stop.signal_number == signal.SIGINT


def test_in_another_thread_no_handler_is_replaced():
    def enter():
        with StopRequest(only_defaults=True) as stop:
            found.append((bool(stop), [signal.getsignal(number) for number in SIGNALS]))

    found, before = [], [signal.getsignal(number) for number in SIGNALS]
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(False, before)]


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_notice_is_no_signal(arrivals, when, monkeypatch):
    """The SIGTERM of a machine that is shut down after the notice is the first one, and the next
    acts as before.
    """
    monkeypatch.setattr(stop, "_stop_requested", threading.Event())
    if when == "before":
        stop.request_stop("preempted=TRUE")
    with StopRequest() as asked:
        if when == "within":
            assert not asked
            stop.request_stop("preempted=TRUE")
        assert asked and asked.signal_number == signal.SIGTERM
        send(signal.SIGTERM)
        assert asked and arrivals == []
        send(signal.SIGTERM)
        assert arrivals == [signal.SIGTERM]
    with StopRequest() as asked:
        assert asked, "for the rest of the process"


@pytest.mark.parametrize(
    ("environment", "product", "expected"),
    [
        ({}, "Google Compute Engine\n", "metadata.google.internal"),
        ({}, "Standard PC (Q35 + ICH9, 2009)\n", None),
        ({}, None, None),
        ({"GCE_METADATA_HOST": "127.0.0.1:80"}, None, "127.0.0.1:80"),
        ({"GCE_METADATA_IP": "127.0.0.2"}, None, "127.0.0.2"),
        (
            {"NO_GCE_CHECK": "True", "GCE_METADATA_HOST": "127.0.0.1:80"},
            "Google Compute Engine\n",
            None,
        ),
    ],
)
def test_only_a_machine_of_google_cloud_has_a_server(
    tmp_path, monkeypatch, environment, product, expected
):
    monkeypatch.setattr(stop, "_PRODUCT", tmp_path / "product_name")
    for name in ("NO_GCE_CHECK", "GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, environment.get(name, ""))
    if product is not None:
        stop._PRODUCT.write_text(product)
    assert stop.metadata_server() == expected


@pytest.fixture
def notices(monkeypatch):
    """Watches a server, with short pauses; returns a queue of the notices."""
    found: queue.Queue[str] = queue.Queue()
    changes = {"_watching": threading.Event(), "_RETRY_SECONDS": 0.02, "_PAUSE_SECONDS": 0.02}
    changes |= dict.fromkeys(("request_save", "request_stop"), found.put)
    for name, value in changes.items():
        monkeypatch.setattr(stop, name, value)

    def watch(server):
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        stop.act_on_notices()
        return found

    return watch


def test_each_change_is_noticed_at_once_and_a_machine_that_migrates_goes_on(notices):
    with MetadataServer(**CALM) as server:
        found = notices(server)
        wait_until(lambda: len(server.asked) == 4)
        assert {path for path, _ in server.asked} == {
            ROOT + "maintenance-event",
            ROOT + "preempted",
        }
        assert all(query["wait_for_change"] == "true" for _, query in server.asked)
        assert {query["last_etag"] for _, query in server.asked} == {"0", "etag-NONE", "etag-FALSE"}
        for value in ("MIGRATE_ON_HOST_MAINTENANCE", TERMINATE, "NONE", TERMINATE):
            before = len(server.asked)
            server.change("maintenance-event", value)
            wait_until(lambda: len(server.asked) > before)  # noqa: B023
        server.change("preempted", "TRUE")
        expected = sorted([*[f"maintenance-event={TERMINATE}"] * 2, "preempted=TRUE"])
        assert sorted(found.get(timeout=5) for _ in range(3)) == expected and found.empty()


def test_a_server_that_fails_for_a_while_is_asked_again_and_one_without_the_keys_is_left_alone(
    notices,
):
    with MetadataServer(failures=3, maintenance_event="NONE", preempted="TRUE") as server:
        assert notices(server).get(timeout=5) == "preempted=TRUE"
    earlier = set(threading.enumerate())
    with MetadataServer() as server:
        found = notices(server)
        own = [
            one for one in set(threading.enumerate()) - earlier if one.name.startswith("notice of")
        ]
        wait_until(lambda: not any(one.is_alive() for one in own))
        assert len(server.asked) == 2 and found.empty()


SCRIPT = """
import os
import sys
import time

import numpy as np
from jax.experimental import multihost_utils

from txl_jax import cli
from txl_jax.runtime import stop as stop_lib


def work(plan, job):
    watched, saved, step = stop_lib.is_watched_by_all(), [], 0
    with job.stop as stop:
        while not stop:
            step += 1
            multihost_utils.process_allgather(np.zeros(1))
            if step % 5 == 0 and stop_lib.save_requested():
                saved.append(step)
                print("saved", file=sys.stderr, flush=True)
            if step == 3:
                print("ready", file=sys.stderr, flush=True)
            time.sleep(0.01)
    print(step, watched, saved, file=sys.stderr)
    return 128 + stop.signal_number


os.environ["NO_GCE_CHECK"] = sys.argv.pop()
cli.main(work, cli.Plan, hosts="join")
"""


@pytest.mark.full
@pytest.mark.parametrize("watching", [{1}, {0, 1}], ids=["one", "both"])
def test_notices_reach_both_processes_at_the_same_step(watching):
    """A preemption of one stops both.

    Before maintenance, which both must wait for, both save and go on.
    """
    with MetadataServer(**CALM) as server:
        words = [("false",) if number in watching else ("true",) for number in range(2)]
        started = processes.start(
            "-c", SCRIPT, devices=1, of_process=words.__getitem__, GCE_METADATA_HOST=server.host
        )

        def wait_for(word):
            while word not in (line := started[1].stderr.readline()):
                assert line, processes.finish(started)

        wait_for("ready")
        if len(watching) == 2:
            server.change("maintenance-event", TERMINATE)
            wait_for("saved")
        server.change("preempted", "TRUE")
        ended = processes.finish(started)
    assert [code for code, _, _ in ended] == [143, 143], ended
    assert "preempted=TRUE: saving and stopping" in ended[1][2]
    if len(watching) == 2:
        assert f"maintenance-event={TERMINATE}: saving and continuing" in ended[0][2]
    # The script's own line: a notice that reaches the other process late may be printed after it.
    last = [
        next(line for line in reversed(err.splitlines()) if line[:1].isdigit())
        for _, _, err in ended
    ]
    step, watched, saved = last[0].split(" ", 2)
    assert last[0] == last[1] and int(step) >= 3, ended
    assert (watched, saved != "[]") == (
        ("True", True) if len(watching) == 2 else ("False", False)
    ), ended


@pytest.mark.full
def test_a_terminal_that_one_of_two_processes_loses_stops_both_at_the_same_step():
    with processes.that_notice_hangups():
        started = processes.start("-c", SCRIPT, "true", devices=1)
    while "ready" not in (line := started[1].stderr.readline()):
        assert line, processes.finish(started)
    started[1].send_signal(signal.SIGHUP)
    started[1].send_signal(signal.SIGHUP)
    ended = processes.finish(started)
    assert [code for code, _, _ in ended] == [143, 143], ended
    last = [
        next(line for line in reversed(err.splitlines()) if line[:1].isdigit())
        for _, _, err in ended
    ]
    assert last[0] == last[1], ended
