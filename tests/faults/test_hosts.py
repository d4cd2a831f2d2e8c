"""Tests a run on two hosts whose workdir is on a server, each in a network namespace.

A host or the network fails once the run has saved a step. The remaining processes end in time with
an error that names the host, or they continue. The same command then ends with the numbers of an
undisturbed run, to the last bit.
"""

import shutil
import signal
import time

import pytest

from support import BUCKET, programs
from support.compiled_programs import cache_in
from support.faults import NIGHTLY, SAVED, assert_equal_runs, command_of_two
from support.hosts import PORT, SERVER, Hosts
from support.processes import finish, wait_for
from support.remote import Remote
from txl_jax.cli import other_hosts

pytestmark = NIGHTLY
# Seconds.
MOMENT = 15  # In this time, a process that knows of a loss ends.
OUTAGE = 60
PATIENCE = 900


@pytest.fixture(scope="module")
def hosts(storage, tmp_path_factory):
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        made.__enter__()
    except OSError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    made.let_in(storage)
    yield made
    made.__exit__()


@pytest.fixture(scope="module")
def start(hosts, storage, tmp_path_factory):
    """Starts a run, or resumes it, on both hosts."""
    folder = tmp_path_factory.mktemp("text")
    programs.write_words(folder, 2_000)
    url = f"http://{SERVER}:{PORT}"
    variables = storage.environment | cache_in(folder / "compiled")
    variables["STORAGE_EMULATOR_HOST"] = url
    variables["TENSORSTORE_GCS_HTTP_URL"] = url
    return lambda workdir: hosts.start(*command_of_two(folder, workdir), **variables)


def assert_end_well(started):
    """Asserts that both processes end with exit code 0."""
    ended = finish(started, seconds=PATIENCE)
    assert [code for code, _, _ in ended] == [0, 0], str(ended)


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    assert_end_well(start(workdir))
    return workdir


@pytest.fixture
def run(request, start, storage, undisturbed):
    """A run that has saved a step: its workdir and its two processes.

    At the end it has the undisturbed numbers.
    """
    # A run whose name has brackets does not resume.
    name = request.node.name.replace("[", "-").replace("]", "")
    workdir = Remote(f"gs://{BUCKET}/{name}")
    started = start(workdir)
    saved = f"{name}/checkpoints/latest/{SAVED}/digests.json"
    wait_for(lambda: saved in storage.names(), started, seconds=PATIENCE)
    yield workdir, started
    storage.calm()
    if any(process.returncode for process in started):
        assert_end_well(start(workdir))
    assert_equal_runs(workdir, undisturbed)


def assert_names(process, lost, began, seconds):
    """Asserts that a process ends in time, with an error that names the lost host, and code 75.

    It has these seconds and a moment, counted from `began`.
    """
    _, err = process.communicate(timeout=seconds + MOMENT)
    took = time.monotonic() - began
    last_line = err.splitlines()[-1]
    print(f"after {took:.1f} s: {last_line}", flush=True)
    assert process.returncode == other_hosts.LOST, err
    assert "error: " in last_line, err
    assert f"process {lost} on host-{lost}" in last_line, err
    assert took < seconds + MOMENT


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_is_killed(run, lost):
    """The other process ends with an error that names the killed one. Process 0 coordinates."""
    _, started = run
    began = time.monotonic()

    started[lost].kill()

    assert_names(started[1 - lost], lost, began, 0)
    started[lost].communicate()
    assert started[lost].returncode == -signal.SIGKILL


@pytest.mark.parametrize("lost", [0, 1])
def test_a_link_is_cut(run, hosts, lost):
    """Each process ends with an error that names the other."""
    _, started = run
    began = time.monotonic()
    hosts.cut(lost)
    try:
        for number in (0, 1):
            assert_names(started[number], 1 - number, began, other_hosts.LOSS_SECONDS)
    finally:
        hosts.mend(lost)


def test_a_link_is_cut_for_a_moment(run, hosts):
    """The run continues."""
    _, started = run

    hosts.cut(1)
    time.sleep(other_hosts.LOSS_SECONDS / 4)
    hosts.mend(1)

    assert_end_well(started)


@pytest.mark.skipif(
    not shutil.which("nft"), reason="nft (of nftables) is missing, which loses packets"
)
def test_packets_are_lost(run, hosts):
    """The run continues."""
    _, started = run
    with hosts.losing(percent=2):
        assert_end_well(started)


def test_storage_fails_for_a_minute(run, storage):
    """The run continues."""
    _, started = run

    storage.fail_every(1)
    time.sleep(OUTAGE)
    assert storage.errors > 0
    storage.calm()

    assert_end_well(started)
