"""Tests a run on two hosts, each in a network namespace, whose workdir is on a server in a third
one.

A host or the network fails once the run has saved a step. The processes that are left end with a
sentence that names the host, within a time, or go on; the same command then ends with the numbers
of an undisturbed run, to the last bit.
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
MOMENT = 15  # Seconds in which a process that knows of a loss has ended.
OUTAGE, PATIENCE = 60, 900  # Seconds.


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
    variables = storage.environment | {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
    }
    variables |= cache_in(folder / "compiled")
    return lambda workdir: hosts.start(*command_of_two(folder, workdir), **variables)


def assert_end_well(started):
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
    # With brackets no run resumes.
    name = request.node.name.translate({ord("["): "-", ord("]"): None})
    started = start(workdir := Remote(f"gs://{BUCKET}/{name}"))
    saved = f"{name}/checkpoints/latest/{SAVED}/digests.json"
    wait_for(lambda: saved in storage.names(), started, seconds=PATIENCE)
    yield workdir, started
    storage.calm()
    if any(process.returncode for process in started):
        assert_end_well(start(workdir))
    assert_equal_runs(workdir, undisturbed)


def assert_names(process, lost, began, seconds):
    """A process ends within some seconds after `began`, with a sentence that names the other host,
    and code 75.
    """
    _, err = process.communicate(timeout=seconds + MOMENT)
    took = time.monotonic() - began
    print(f"after {took:.1f} s: {err.splitlines()[-1]}", flush=True)
    assert process.returncode == other_hosts.LOST, err
    assert (
        "error: " in err.splitlines()[-1]
        and f"process {lost} on host-{lost}" in err.splitlines()[-1]
    ), err
    assert took < seconds + MOMENT


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_is_killed(run, lost):
    """Process 0 coordinates."""
    _, started = run
    began = time.monotonic()
    started[lost].kill()
    assert_names(started[1 - lost], lost, began, 0)
    started[lost].communicate()
    assert started[lost].returncode == -signal.SIGKILL


@pytest.mark.parametrize("lost", [0, 1])
def test_a_link_is_cut(run, hosts, lost):
    """Each process takes the other for lost."""
    _, started = run
    began = time.monotonic()
    hosts.cut(lost)
    try:
        for number in (0, 1):
            assert_names(started[number], 1 - number, began, other_hosts.LOSS_SECONDS)
    finally:
        hosts.mend(lost)


def test_a_link_is_cut_for_a_moment(run, hosts):
    hosts.cut(1)
    time.sleep(other_hosts.LOSS_SECONDS / 4)
    hosts.mend(1)
    assert_end_well(run[1])


@pytest.mark.skipif(
    not shutil.which("nft"), reason="nft (of nftables) is missing, which loses packets"
)
def test_packets_are_lost(run, hosts):
    with hosts.losing(percent=2):
        assert_end_well(run[1])


def test_storage_fails_for_a_minute(run, storage):
    storage.fail_every(1)
    time.sleep(OUTAGE)
    assert storage.errors > 0
    storage.calm()
    assert_end_well(run[1])
