"""Tests signals and notices: what they stop or save, in one process and in two, and that handlers
are restored.
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
    before = {}
    for number in SIGNALS:
        before[number] = signal.signal(number, lambda number, frame: seen.append(number))
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_acts_as_before(arrivals, first, second):
    with StopRequest() as request:
        assert not request
        assert request.signal_number == 0

        send(first)
        assert request
        assert request.signal_number == first
        assert arrivals == []

        send(second)
        assert arrivals == [second]
    assert request.signal_number == first


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
    with StopRequest() as request:
        send(first)
        assert request
        assert request.signal_number == first

        send(signal.SIGHUP)
        send(signal.SIGHUP)
        assert request.signal_number == first
        assert hangups == []
    send(signal.SIGHUP)
    assert hangups == [signal.SIGHUP]


def test_a_hangup_stays_ignored_as_nohup_wants_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            send(signal.SIGHUP)
            assert not request
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("arrivals")
def test_an_error_stream_that_is_gone_does_not_lose_the_request(monkeypatch):
    def fail(number, data):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(os, "write", fail)
    with StopRequest() as request:
        send(signal.SIGINT)
        assert request
        assert request.signal_number == signal.SIGINT


def test_in_another_thread_no_handler_is_replaced():
    inside = []

    def handlers():
        return [signal.getsignal(number) for number in SIGNALS]

    def enter():
        with StopRequest(only_defaults=True) as request:
            inside.append((bool(request), handlers()))

    before = handlers()
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [(False, before)]


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_notice_is_no_signal(arrivals, when, monkeypatch):
    """The SIGTERM of a machine that is shut down after the notice is the first one, and the next
    acts as before.
    """
    monkeypatch.setattr(stop, "_stop_requested", threading.Event())
    if when == "before":
        stop.request_stop("preempted=TRUE")
    with StopRequest() as request:
        if when == "within":
            assert not request
            stop.request_stop("preempted=TRUE")
        assert request
        # The exit code of a stop by a notice.
        assert request.signal_number == signal.SIGTERM

        send(signal.SIGTERM)
        assert request
        assert arrivals == []

        send(signal.SIGTERM)
        assert arrivals == [signal.SIGTERM]
    with StopRequest() as later_request:
        assert later_request, "for the rest of the process"


@pytest.mark.parametrize(
    ("environment", "product", "expected"),
    [
        pytest.param(
            {}, "Google Compute Engine\n", "metadata.google.internal", id="Google's product"
        ),
        pytest.param({}, "Standard PC (Q35 + ICH9, 2009)\n", None, id="another product"),
        pytest.param({}, None, None, id="no product"),
        pytest.param({"GCE_METADATA_HOST": "127.0.0.1:80"}, None, "127.0.0.1:80", id="a host"),
        pytest.param({"GCE_METADATA_IP": "127.0.0.2"}, None, "127.0.0.2", id="an address"),
        pytest.param(
            {"NO_GCE_CHECK": "True", "GCE_METADATA_HOST": "127.0.0.1:80"},
            "Google Compute Engine\n",
            None,
            id="not to be checked",
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
    """A function that watches a server, with short pauses, and returns a queue of the notices."""
    received: queue.Queue[str] = queue.Queue()
    # Set once this process watches. It must not stay set after the test.
    monkeypatch.setattr(stop, "_watching", threading.Event())
    monkeypatch.setattr(stop, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(stop, "_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(stop, "request_save", received.put)
    monkeypatch.setattr(stop, "request_stop", received.put)

    def watch(server):
        monkeypatch.setenv("GCE_METADATA_HOST", server.host)
        stop.act_on_notices()
        return received

    return watch


def change_and_wait(server, value):
    """Changes the maintenance event, and waits until it has been noticed."""
    before = len(server.asked)
    server.change("maintenance-event", value)
    wait_until(lambda: len(server.asked) > before)


def test_each_change_is_noticed_at_once_and_a_machine_that_migrates_goes_on(notices):
    with MetadataServer(**CALM) as server:
        received = notices(server)

        # Each key is asked for at once, and then again until it changes.
        wait_until(lambda: len(server.asked) == 4)
        asked = [(path, query["last_etag"]) for path, query in server.asked]
        assert sorted(asked) == [
            (ROOT + "maintenance-event", "0"),
            (ROOT + "maintenance-event", "etag-NONE"),
            (ROOT + "preempted", "0"),
            (ROOT + "preempted", "etag-FALSE"),
        ]
        for _, query in server.asked:
            assert query["wait_for_change"] == "true"

        for value in ("MIGRATE_ON_HOST_MAINTENANCE", TERMINATE, "NONE", TERMINATE):
            change_and_wait(server, value)
        server.change("preempted", "TRUE")
        # A migration and its end are no notices.
        arrived = [received.get(timeout=5) for _ in range(3)]
        assert sorted(arrived) == [
            f"maintenance-event={TERMINATE}",
            f"maintenance-event={TERMINATE}",
            "preempted=TRUE",
        ]
        assert received.empty()


def test_a_server_that_fails_for_a_while_is_asked_again_and_one_without_the_keys_is_left_alone(
    notices,
):
    with MetadataServer(failures=3, maintenance_event="NONE", preempted="TRUE") as server:
        assert notices(server).get(timeout=5) == "preempted=TRUE"
    earlier = set(threading.enumerate())
    with MetadataServer() as server:
        received = notices(server)
        # One thread per key, unless it has ended already.
        for thread in set(threading.enumerate()) - earlier:
            if thread.name.startswith("notice of"):
                thread.join(timeout=30)
                assert not thread.is_alive(), thread.name
        assert len(server.asked) == 2, "once for each key"
        assert received.empty()


SCRIPT = """
import os
import sys
import time

import numpy as np
from jax.experimental import multihost_utils

from txl_jax import cli
from txl_jax.runtime import stop as stop_lib


def work(plan, job):
    watched = stop_lib.is_watched_by_all()
    saved = []
    step = 0
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


def wait_for(word, started):
    """Waits until the second process has printed a word."""
    while word not in (line := started[1].stderr.readline()):
        assert line, processes.finish(started)


def last_line(errors):
    """The script's last line. A notice that reaches a process late may be printed after it."""
    lines = [line for line in errors.splitlines() if line[:1].isdigit()]
    assert lines, errors
    return lines[-1]


def finish(started):
    """Waits for both processes. Returns their errors and the line that both printed last.

    The line is the same: the step at which they stopped, and what they had saved before. Several
    processes agree on a stop, not on its signal, so all of them end as by SIGTERM.
    """
    (code_0, _, errors_0), (code_1, _, errors_1) = processes.finish(started)
    assert code_0 == code_1 == 128 + signal.SIGTERM, (errors_0, errors_1)
    assert last_line(errors_0) == last_line(errors_1)
    return errors_0, errors_1, last_line(errors_0)


def start_watching(server, *checks):
    """Starts both processes, each with its NO_GCE_CHECK. With "true" it does not watch."""
    return processes.start(
        "-c",
        SCRIPT,
        devices=1,
        of_process=lambda number: (checks[number],),
        GCE_METADATA_HOST=server.host,
    )


@pytest.mark.full
def test_a_notice_to_one_of_two_processes_stops_both_at_the_same_step():
    """They cannot save before maintenance, which only one of them would notice."""
    with MetadataServer(**CALM) as server:
        started = start_watching(server, "true", "false")
        wait_for("ready", started)
        server.change("preempted", "TRUE")
        _, errors_1, line = finish(started)
    assert "preempted=TRUE: saving and stopping" in errors_1
    step, watched, saved = line.split(" ", 2)
    assert int(step) >= 3, "the step at which a process is ready"
    assert watched == "False"
    assert saved == "[]"


@pytest.mark.full
def test_notices_reach_both_processes_at_the_same_step():
    """Before maintenance both save and continue. A preemption stops both."""
    with MetadataServer(**CALM) as server:
        started = start_watching(server, "false", "false")
        wait_for("ready", started)
        server.change("maintenance-event", TERMINATE)
        wait_for("saved", started)
        server.change("preempted", "TRUE")
        errors_0, errors_1, line = finish(started)
    # `wait_for` has taken this line from process 1 already.
    assert f"maintenance-event={TERMINATE}: saving and continuing" in errors_0
    assert "preempted=TRUE: saving and stopping" in errors_1
    step, watched, saved = line.split(" ", 2)
    assert int(step) >= 3, "the step at which a process is ready"
    assert watched == "True"
    assert saved != "[]"


@pytest.mark.full
def test_a_terminal_that_one_of_two_processes_loses_stops_both_at_the_same_step():
    with processes.that_notice_hangups():
        # Neither process watches a metadata server.
        started = processes.start("-c", SCRIPT, "true", devices=1)
    wait_for("ready", started)
    # A second hangup changes nothing: it is not a second request to stop.
    started[1].send_signal(signal.SIGHUP)
    started[1].send_signal(signal.SIGHUP)
    finish(started)
