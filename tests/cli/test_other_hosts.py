"""Tests how a program finds out that it is one of several processes, and what each is answered if they do not fit."""

import contextlib
import os
import queue
import re
import socket
import time

import pytest
from absl import flags

from support import processes, programs
from support.metadata_server import MetadataServer
from txl_jax.cli import other_hosts
from txl_jax.errors import UserError

SALLOC_SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-2]"}
SBATCH_SCRIPT = SALLOC_SHELL | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
INTERACTIVE_STEP = SBATCH_SCRIPT | {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": "1"}
SRUN = SBATCH_SCRIPT | {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "4"}
ONE_A_NODE = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture(autouse=True)
def has_tpu(request, monkeypatch):
    """Whether there is a TPU: in tests of TPU slices."""
    monkeypatch.setattr(other_hosts, "_has_tpu", lambda: "tpu" in request.node.name)


@pytest.mark.parametrize(
    ("environment", "count", "all_devices"),
    [
        *((alone, None, False) for alone in ({}, SALLOC_SHELL, SBATCH_SCRIPT, INTERACTIVE_STEP)),
        (BY_HAND | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c"}, None, False),  # Without a TPU.
        (SRUN, 4, False),  # Two a node share its GPUs: jax gives each its own.
        (ONE_A_NODE, 2, True),
        (SRUN | {"CUDA_VISIBLE_DEVICES": "3"}, 4, True),
        (ONE_A_NODE | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, 2, False),  # The environment names them.
    ],
)
def test_the_tasks_of_a_slurm_step_are_counted_and_keep_their_devices(environment, count, all_devices):
    """A process by itself waits for nobody."""
    found = other_hosts.announced(environment)
    assert (found and found.num_processes) == (found and found.arguments["num_processes"]) == count
    assert bool(found and "local_device_ids" in found.arguments) == all_devices


def test_flags_come_before_the_environment_and_both_before_slurm(monkeypatch):
    monkeypatch.setattr(os, "environ", SRUN | BY_HAND)
    with programs.own_flags():
        other_hosts.define_flags()
        assert flags.FLAGS(["program", "--process_id=0"]) == ["program"]
        found = other_hosts.announced(other_hosts.environment())
    given = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}
    assert found.num_processes == 2 and found.arguments == given | {"cluster_detection_method": "deactivate"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "--coordinator .*JAX_COORDINATOR_ADDRESS.*--process_id"),
        (BY_HAND | {"JAX_PROCESS_ID": "2"}, "process_id .*num_processes - 1.*process_id 2 .*num_processes 2"),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "a"}, "HOST:PORT.*'a'"),
        (BY_HAND | {"JAX_NUM_PROCESSES": "two"}, "num_processes two"),
    ],
)
def test_half_an_announcement_is_refused(environment, expected):
    with pytest.raises(UserError, match=expected):
        other_hosts.announced(environment)


@pytest.mark.parametrize(
    ("attributes", "count"),
    [
        ({}, None),  # No Cloud TPU.
        ({"worker-network-endpoints": "unknown:unknown:10.0.0.1", "tpu-env": "ACCELERATOR_TYPE: 'v5e-8'"}, None),
        ({"worker-network-endpoints": "a:b:10.0.0.1,a:b:10.0.0.2"}, 2),
        ({"worker-network-endpoints": "10.0.0.1,10.0.0.2", "tpu-env": "X: 'y'\nMEGASCALE_NUM_SLICES: '3'\n"}, 6),
        ({"worker-network-endpoints": "10.0.0.1", "tpu-env": "MEGASCALE_NUM_SLICES: '2'\n"}, 2),
    ],
)
def test_the_hosts_of_a_tpu_slice_are_asked_of_its_metadata(attributes, count):
    with MetadataServer() as server:
        server.values |= {f"attributes/{name}": value for name, value in attributes.items()}
        environment = {"GCE_METADATA_IP": server.host}
        found = other_hosts.announced(environment)
        assert found == (None if count is None else other_hosts.Several(count, "the TPU slice", {}))
        for other in ({"JAX_PLATFORMS": "cpu"}, {"TPU_SKIP_MDS_QUERY": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"}):
            assert other_hosts.announced(environment | other) is None
    assert other_hosts.announced({"TPU_WORKER_HOSTNAMES": "a,b,c"}).num_processes == 3


def test_a_tpu_whose_metadata_server_does_not_answer_is_an_error_and_a_proxy_is_not_asked(monkeypatch):
    monkeypatch.setattr(other_hosts, "_METADATA_TRIES", 2)
    with MetadataServer() as server:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        assert other_hosts.announced({"GCE_METADATA_IP": server.host}) is None
        assert len(server.asked) == 2
    with MetadataServer(failures=2) as server, pytest.raises(UserError, match=r"HTTP 503.*TPU_WORKER_HOSTNAMES"):
        other_hosts.announced({"GCE_METADATA_IP": server.host})
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 .*TPU_WORKER_HOSTNAMES"):
        other_hosts.announced({"GCE_METADATA_IP": "127.0.0.1:9"})


def test_process_0_names_a_lost_process_to_the_others_and_listens_to_no_stranger(monkeypatch, capsys):
    ended, found = queue.Queue(), []
    monkeypatch.setattr(other_hosts.os, "_exit", ended.put)
    monkeypatch.setattr(other_hosts.atexit, "register", lambda act: None)
    monkeypatch.setattr(
        other_hosts.distributed, "broadcast_from_primary", lambda find: found.append(find()) or found[0]
    )
    other_hosts._watch([f"process {number} on host-{number}" for number in range(3)], "localhost")
    [(port, key)] = found

    def connect(words):
        connection = socket.create_connection(("localhost", port), timeout=30)
        connection.sendall(words.encode())
        return connection

    with connect("1") as stranger, connect(f"{key}1") as lost, connect(f"{key}2") as other:
        assert stranger.recv(100) == b"" and ended.empty()
        time.sleep(0.2)  # So that the others are known, too.
        lost.close()
        assert ended.get(timeout=30) == other_hosts.LOST
        assert other.recv(100) == b"process 1 on host-1 has ended"
    assert capsys.readouterr().err.startswith("error: process 1 on host-1 has ended. ")
    with contextlib.suppress(ConnectionRefusedError):
        connect("").close()  # It may wait for one more.


FULL, NIGHTLY = pytest.mark.full, pytest.mark.nightly(part="long")
TINY = [*programs.TINY, *programs.steps(2, every=2), "--train.batch_size=8"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("one two three four " * 400)
    return path


DIFFERENCES = [
    ("--model.n_layer=3", r"process 1: .*model\.n_layer\D*\b3\b\D*\b2\b.*process 0"),
    ("--data.file=OTHER", r"process 1: .*\bother\.txt\b"),
    ("--data.file=NONE", "process 1: "),
    ("--workdir=ELSEWHERE", r"\belsewhere\b.*--workdir\b"),
]


@pytest.mark.parametrize(
    ("of_second", "first_prints"),
    [pytest.param(*case, marks=FULL if "OTHER" in case[0] else NIGHTLY) for case in DIFFERENCES],
)
def test_hosts_that_differ_are_refused_by_name_and_none_hangs(text_file, tmp_path, of_second, first_prints):
    other = tmp_path / "other.txt"
    other.write_text("four three two one " * 400)
    places = {"OTHER": other, "NONE": tmp_path / "none", "ELSEWHERE": tmp_path / "elsewhere"}
    flag, _, value = of_second.partition("=")
    changed = [f"{flag}={places.get(value, value)}"]
    script = (
        "from experiments import text; from txl_jax import cli; from txl_jax.runs import run; "
        "run._SECONDS_TO_APPEAR = 0.5; cli.train_main(text.DEFAULTS)"
    )
    flags = [f"--data.file={text_file}", f"--cache_dir={text_file.parent}", f"--workdir={tmp_path / 'run'}"]
    started = processes.start("-c", script, *TINY, *flags, of_process=[[], changed].__getitem__)
    began = time.monotonic()
    (code_0, _, err_0), (code_1, _, err_1) = processes.finish(started)
    assert (code_0, code_1) == (1, 1), (err_0, err_1)
    assert time.monotonic() - began < 60
    assert re.search(first_prints, err_0) and len(err_0.splitlines()) == 1, err_0
    assert err_1.startswith("process 1: error: ") and len(err_1.splitlines()) == 1, err_1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@NIGHTLY
def test_one_process_that_is_left_alone_reports_it():
    script = (
        "from txl_jax import cli; from txl_jax.cli import other_hosts; other_hosts.START_SECONDS = 2; "
        "other_hosts._SILENT_SECONDS = 0.2; cli.main(print, cli.Plan, hosts='join')"
    )
    environment = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    [(code, _, err)] = processes.finish(processes.start("-c", script, processes=1, **environment))
    assert code != 0
    assert re.match(r".*\b2\b.*--num_processes\b.*\bJAX_NUM_PROCESSES\b", err), err
