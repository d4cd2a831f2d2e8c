"""Tests runs of two processes with four devices each: they do what one process with eight devices
does when it trains, stops, resumes, scores and writes.

They compute in float64, because sums over devices are made in another order. Nothing else may
differ. Also tests how a program finds out that it is one of multiple processes, and the errors if
the processes do not match.
"""

import contextlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import time

import numpy as np
import pytest
from absl import flags

from support import processes, programs
from support.faults import arrays
from support.metadata_server import MetadataServer
from txl_jax.cli import other_hosts
from txl_jax.errors import UserError
from txl_jax.runtime.log import read_metrics
from txl_jax.runtime.sinks import MEASURED

STEPS = 16
TINY = [
    *programs.TINY,
    *programs.steps(STEPS, every=2),
    "--train.eval_every=4",
    "--train.checkpoint_every=4",
    "--train.keep_checkpoints=4",
    "--train.sample_every=4",
    "--model.dtype=float64",
    "--train.batch_size=8",
    "--eval.batch_size=8",
    "--generate.length=20",
    "--generate.samples=2",
]
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    return programs.write_words(tmp_path_factory.mktemp("text"), 2_000)


@pytest.fixture(scope="module")
def start(text_file):
    """Starts a run, or another mode of it, in processes that have eight devices together."""

    def start(n_process, workdir, *flags):
        command = ["-m", "experiments.text"]
        # Other modes than training take the settings of the recorded run.
        if not any(flag.startswith("--mode") for flag in flags):
            command += [*TINY, f"--data.file={text_file}", f"--cache_dir={text_file.parent}"]
        return processes.start(
            *command,
            *flags,
            f"--workdir={workdir}",
            processes=n_process,
            devices=8 // n_process,
            JAX_ENABLE_X64="1",
        )

    return start


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    [(code, _, err)] = processes.finish(start(1, workdir))
    assert code == 0, err
    return workdir


def read_json(path):
    return json.loads(path.read_text())


def assert_same_run(workdir, expected_workdir):
    """Compares metrics, results, samples and arrays of two finished runs."""
    for record, expected in zip(read_metrics(workdir), read_metrics(expected_workdir), strict=True):
        place = (expected["kind"], expected["step"])
        assert (record["kind"], record["step"]) == place
        for name in record.keys() - {"kind", "time", *MEASURED}:
            assert record[name] == pytest.approx(expected[name], rel=TOLERANCE), (*place, name)

    results = read_json(workdir / "results.json")
    expected_results = read_json(expected_workdir / "results.json")
    for name in ("best_valid", "test"):
        assert results[name] == pytest.approx(expected_results[name], rel=TOLERANCE), name

    for name in ("step-4.txt", f"step-{STEPS}.txt"):
        sample = (workdir / "samples" / name).read_bytes()
        assert sample == (expected_workdir / "samples" / name).read_bytes(), name

    step, tensors = arrays(workdir / "checkpoints" / "latest")
    expected_step, expected_tensors = arrays(expected_workdir / "checkpoints" / "latest")
    assert step == expected_step == STEPS
    assert tensors.keys() == expected_tensors.keys()
    assert len(tensors) > 10
    for name, tensor in tensors.items():
        np.testing.assert_allclose(
            tensor, expected_tensors[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


@pytest.mark.full
def test_what_two_processes_began_one_ends_with_the_numbers_of_an_undisturbed_run(
    undisturbed, start, tmp_path
):
    """A signal to the second process saves the same step in both; one process goes on from it."""
    latest = tmp_path / "checkpoints" / "latest"
    started = start(2, tmp_path)
    processes.wait_for((tmp_path / "samples" / "step-4.txt").exists, started)
    started[1].send_signal(signal.SIGTERM)
    (code_0, out_0, err_0), (code_1, out_1, err_1) = processes.finish(started)

    # 128 + SIGTERM, in both processes, though only the second got it.
    assert code_0 == 143, err_0
    assert code_1 == 143, err_1
    assert out_1 == ""
    assert "Traceback" not in err_0 + err_1, err_0 + err_1
    step = int(re.search(r"(?m)^stopped\D*(\d+)", out_0)[1])
    assert 4 <= step < STEPS
    # All eight devices are on one mesh axis, in two processes.
    assert re.search(r"\bdata 8\b.*\bfsdp 1\b.*\btensor 1\b.*\b2\b", out_0)
    assert max(int(path.name) for path in latest.iterdir()) == step
    assert (latest / str(step) / "digests.json").exists()

    [(code, out, err)] = processes.finish(start(1, tmp_path))
    assert code == 0, err
    assert re.search(r"resum\w+\D*\d", out)
    assert_same_run(tmp_path, undisturbed)


def losses_of(workdir):
    """Returns the losses of all scored tokens in both splits."""
    losses = []
    for split in ("valid", "test"):
        for line in (workdir / f"scores-{split}.tsv").read_text().splitlines():
            if not line.startswith("index"):
                losses.append(float(line.split("\t")[2]))
    return losses


@pytest.mark.nightly(part="long")
@pytest.mark.parametrize("flags", [[], ["--mesh.fsdp=2", "--mesh.tensor=2"]], ids=" ".join)
def test_two_processes_score_evaluate_and_write_as_one_does(undisturbed, start, tmp_path, flags):
    learn = ["--mode=eval", "--eval.dynamic.rule=rmsprop", "--eval.dynamic.learning_rate=0.01"]
    evaluate = ["--mode=eval", "--eval.stride=4", "--eval.mem_len=0", "--eval.same_length=false"]
    write = [
        "--mode=generate",
        "--generate.length=40",
        "--generate.samples=2",
        "--generate.prompt=one two three four",
    ]

    def use(n_process, workdir, *mode):
        """Uses the trained run in a mode. Only the first process prints."""
        ended = processes.finish(start(n_process, workdir, *mode, *flags))
        for number, (code, out, err) in enumerate(ended):
            assert code == 0, err
            assert out == "" or number == 0

    # Results by number of processes.
    losses = {}
    learned = {}
    evaluated = {}
    samples = {}
    for n_process in (1, 2):
        workdir = tmp_path / str(n_process)
        shutil.copytree(undisturbed, workdir)
        use(n_process, workdir, *learn)
        learned[n_process] = read_json(workdir / "evaluation.json")
        use(n_process, workdir, "--mode=score")
        losses[n_process] = losses_of(workdir)
        use(n_process, workdir, *evaluate)
        evaluated[n_process] = read_json(workdir / "evaluation.json")
        use(n_process, workdir, *write)
        [sample] = workdir.glob("sample-seed*.txt")
        samples[n_process] = sample.read_bytes()

    assert len(losses[1]) > 500
    np.testing.assert_allclose(losses[1], losses[2], rtol=TOLERANCE)
    for split in ("valid", "test"):
        assert evaluated[1][split] == pytest.approx(evaluated[2][split], rel=TOLERANCE), split
        for kind in ("static", "dynamic"):
            of_one = learned[1][kind][split]
            of_two = learned[2][kind][split]
            assert of_one == pytest.approx(of_two, rel=TOLERANCE), (kind, split)
        assert learned[1]["dynamic"][split]["loss"] < learned[1]["static"][split]["loss"], split
    assert samples[1] == samples[2]


@pytest.mark.full
def test_two_processes_save_whole_checkpoints_in_a_directory_whose_name_is_a_pattern(
    start, tmp_path
):
    """Each process writes files with its number, and process 0 merges them."""
    workdir = tmp_path / "lr[0.1]"
    latest = workdir / "checkpoints" / "latest"
    short = [*programs.steps(4, every=2), "--train.eval_every=4"]

    for code, _, err in processes.finish(start(2, workdir, *short)):
        assert code == 0, err

    step, tensors = arrays(latest)
    assert step == 4
    assert len(tensors) > 10
    assert len(list((latest / "4" / "state").glob("ocdbt.process_*"))) == 2
    [(code, out, err)] = processes.finish(start(1, workdir, *short, "--train.steps=6"))
    assert code == 0, err
    assert re.search(r"(?m)^resum\w+ +from step 4\b", out), out


@pytest.mark.full
def test_a_step_that_one_process_cannot_open_does_not_count_and_both_end(text_file, tmp_path):
    """Its array is missing for the second process alone. Both print the error, and step 2 stays the
    latest one.
    """
    # The second process misses an array of step 4, for which it waits half a second.
    script = (
        "import jax; from experiments import text; from txl_jax import cli; "
        "from txl_jax.runtime import checkpoint, stored_arrays; "
        "checkpoint._SECONDS_TO_APPEAR = 0.5; real = stored_arrays.find_missing; "
        "stored_arrays.find_missing = lambda folder, *given, **more: "
        "'the array x is missing' if jax.process_index() and '/4/' in folder else real(folder, "
        "*given, **more); cli.train_main(text.DEFAULTS)"
    )
    flags = [
        *TINY,
        *programs.steps(8, every=4),
        "--train.checkpoint_every=2",
        "--train.sample_every=none",
        f"--data.file={text_file}",
        f"--cache_dir={text_file.parent}",
        f"--workdir={tmp_path}",
    ]

    started = processes.start("-c", script, *flags, JAX_ENABLE_X64="1")
    (code_0, _, err_0), (code_1, _, err_1) = processes.finish(started)

    assert (code_0, code_1) == (1, 1), (err_0, err_1)
    assert err_1.startswith("process 1: error: ")
    assert "the array x is missing" in err_1
    assert err_1.count("\n") == 1
    assert err_0.startswith("error: process 1: "), err_0
    assert "step 4" in err_0
    assert err_0.count("\n") == 1, err_0
    step, _ = arrays(tmp_path / "checkpoints" / "latest")
    assert step == 2


# How a process finds out about the others


# The environment of a process in a job of Slurm: in the shell of salloc, in a script of sbatch, in
# an interactive step on one node, as one of four tasks of srun, and as one of two, a task a node.
SALLOC_SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-2]"}
SBATCH_SCRIPT = SALLOC_SHELL | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
INTERACTIVE_STEP = SBATCH_SCRIPT | {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": "1"}
SRUN = SBATCH_SCRIPT | {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "4"}
ONE_A_NODE = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture(autouse=True)
def without_tpu(monkeypatch):
    """No test depends on whether this machine has a TPU."""
    monkeypatch.setattr(other_hosts, "_has_tpu", lambda: False)


@pytest.fixture
def with_tpu(without_tpu, monkeypatch):
    monkeypatch.setattr(other_hosts, "_has_tpu", lambda: True)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SALLOC_SHELL,
        SBATCH_SCRIPT,
        INTERACTIVE_STEP,
        BY_HAND | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"},
        {"TPU_WORKER_HOSTNAMES": "a,b,c"},
    ],
    ids=[
        "nothing",
        "a shell of salloc",
        "a script of sbatch",
        "an interactive step",
        "one by hand",
        "workers without their TPU",
    ],
)
def test_a_process_by_itself_waits_for_nobody(environment):
    assert other_hosts.announced(environment) is None


@pytest.mark.parametrize(
    ("environment", "count", "all_devices"),
    [
        # Two tasks of a node share its GPUs: jax gives each its own. Otherwise a task uses all
        # devices that it sees.
        pytest.param(SRUN, 4, False, id="two tasks a node"),
        pytest.param(ONE_A_NODE, 2, True, id="one task a node"),
        pytest.param(SRUN | {"CUDA_VISIBLE_DEVICES": "3"}, 4, True, id="visible devices"),
        # The environment names the devices already.
        pytest.param(ONE_A_NODE | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, 2, False, id="local device ids"),
    ],
)
def test_the_tasks_of_a_slurm_step_are_counted_and_keep_their_devices(
    environment, count, all_devices
):
    announced = other_hosts.announced(environment)
    assert announced.num_processes == count
    assert announced.arguments["num_processes"] == count
    assert ("local_device_ids" in announced.arguments) == all_devices


def test_flags_come_before_the_environment_and_both_before_slurm(monkeypatch):
    """The flag's number wins over the environment's, and of Slurm's four tasks nothing is left."""
    monkeypatch.setattr(os, "environ", SRUN | BY_HAND)
    with programs.own_flags():
        other_hosts.define_flags()
        assert flags.FLAGS(["program", "--process_id=0"]) == ["program"]
        announced = other_hosts.announced(other_hosts.environment())

    assert announced.num_processes == 2
    assert announced.arguments == {
        "coordinator_address": "a:1",
        "num_processes": 2,
        "process_id": 0,
        "cluster_detection_method": "deactivate",
    }


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(
            {"JAX_NUM_PROCESSES": "2"},
            "--coordinator .*JAX_COORDINATOR_ADDRESS.*--process_id",
            id="only a count",
        ),
        pytest.param(
            BY_HAND | {"JAX_PROCESS_ID": "2"},
            "process_id .*num_processes - 1.*process_id 2 .*num_processes 2",
            id="too large a number",
        ),
        pytest.param(BY_HAND | {"JAX_COORDINATOR_ADDRESS": "a"}, "HOST:PORT.*'a'", id="no port"),
        pytest.param(
            BY_HAND | {"JAX_NUM_PROCESSES": "two"}, "num_processes two", id="not a number"
        ),
    ],
)
def test_half_an_announcement_is_refused(environment, expected):
    with pytest.raises(UserError, match=expected):
        other_hosts.announced(environment)


# The attribute of a TPU's metadata that lists the hosts of a slice.
ENDPOINTS = "worker-network-endpoints"


@pytest.mark.usefixtures("with_tpu")
@pytest.mark.parametrize(
    ("attributes", "count"),
    [
        pytest.param({}, None, id="not a Cloud TPU"),
        pytest.param(
            {ENDPOINTS: "unknown:unknown:10.0.0.1", "tpu-env": "ACCELERATOR_TYPE: 'v5e-8'"},
            None,
            id="one host",
        ),
        pytest.param({ENDPOINTS: "a:b:10.0.0.1,a:b:10.0.0.2"}, 2, id="two hosts"),
        pytest.param(
            {
                ENDPOINTS: "10.0.0.1,10.0.0.2",
                "tpu-env": "X: 'y'\nMEGASCALE_NUM_SLICES: '3'\n",
            },
            6,
            id="three slices of two hosts",
        ),
        pytest.param(
            {ENDPOINTS: "10.0.0.1", "tpu-env": "MEGASCALE_NUM_SLICES: '2'\n"},
            2,
            id="two slices of one host",
        ),
    ],
)
def test_the_hosts_of_a_tpu_slice_are_asked_of_its_metadata(attributes, count):
    expected = None
    if count is not None:
        expected = other_hosts.Processes(count, "the TPU slice", {})
    with MetadataServer() as server:
        for name, value in attributes.items():
            server.values[f"attributes/{name}"] = value
        environment = {"GCE_METADATA_IP": server.host}

        assert other_hosts.announced(environment) == expected
        # Variables by which this process does not use the TPU, or only its own.
        for alone in (
            {"JAX_PLATFORMS": "cpu"},
            {"TPU_SKIP_MDS_QUERY": "1"},
            {"TPU_WORKER_HOSTNAMES": "localhost"},
        ):
            assert other_hosts.announced(environment | alone) is None, alone


@pytest.mark.usefixtures("with_tpu")
def test_the_hosts_that_the_environment_of_a_tpu_names_are_counted():
    announced = other_hosts.announced({"TPU_WORKER_HOSTNAMES": "a,b,c"})
    assert announced.num_processes == 3


@pytest.mark.usefixtures("with_tpu")
def test_a_tpu_whose_metadata_server_does_not_answer_is_an_error_and_a_proxy_is_not_asked(
    monkeypatch,
):
    # Nobody listens at port 9. A server that is reached has no attributes, and is asked for two.
    monkeypatch.setattr(other_hosts, "_METADATA_TRIES", 2)
    with MetadataServer() as server:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        monkeypatch.delenv("no_proxy", raising=False)
        assert other_hosts.announced({"GCE_METADATA_IP": server.host}) is None
        assert len(server.asked) == 2
    with (
        MetadataServer(failures=2) as server,
        pytest.raises(UserError, match=r"HTTP 503.*TPU_WORKER_HOSTNAMES"),
    ):
        other_hosts.announced({"GCE_METADATA_HOST": server.host})
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 .*TPU_WORKER_HOSTNAMES"):
        other_hosts.announced({"GCE_METADATA_IP": "127.0.0.1:9"})


def test_process_0_names_a_lost_process_to_the_others_and_listens_to_no_stranger(
    monkeypatch, capsys
):
    exits = queue.Queue()
    monkeypatch.setattr(other_hosts.os, "_exit", exits.put)
    # The thread that ends a process keeps a lock, for which the process would wait at its exit.
    # Here it only seems to end.
    monkeypatch.setattr(other_hosts.atexit, "register", lambda act: None)
    addresses = []

    def broadcast(find):
        """Keeps the address and the key that process 0 sends to the others."""
        addresses.append(find())
        return addresses[0]

    monkeypatch.setattr(other_hosts.distributed, "broadcast_from_primary", broadcast)
    names = ["process 0 on host-0", "process 1 on host-1", "process 2 on host-2"]
    other_hosts._watch(names, "localhost")
    [(port, key)] = addresses

    def connect(words):
        connection = socket.create_connection(("localhost", port), timeout=30)
        connection.sendall(words.encode())
        return connection

    # A process sends the key and its number. The stranger sends only a number.
    with connect("1") as stranger, connect(f"{key}1") as lost, connect(f"{key}2") as other:
        assert stranger.recv(100) == b""
        assert exits.empty()
        time.sleep(0.2)  # So that the other processes are known, too.
        lost.close()
        assert exits.get(timeout=30) == other_hosts.LOST
        assert other.recv(100) == b"process 1 on host-1 has ended"
    assert capsys.readouterr().err.startswith("error: process 1 on host-1 has ended. ")
    with contextlib.suppress(ConnectionRefusedError):
        connect("").close()  # It may wait for one more connection.


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="open files are listed on Linux only"
)
def test_connections_that_grpc_gives_20_s_outlast_a_link_that_is_cut_for_a_moment():
    """After a cut of 15 s, TCP tries again when up to 25.6 s have passed since the cut began."""

    def set_limit(connection, milliseconds):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def limit(connection):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("localhost", 0)))
        set_limit(listening, 20_000)
        client = stack.enter_context(socket.create_connection(listening.getsockname(), timeout=30))
        server = stack.enter_context(listening.accept()[0])
        assert (limit(server), limit(client)) == (20_000, 0)
        other_hosts._outlast_cuts()
        # Twice the 25.6 s, in milliseconds.
        assert limit(listening) == limit(server) > 2 * 25_600
        assert limit(client) == 0, "without a limit TCP tries for longer"

        set_limit(server, 500_000)
        other_hosts._outlast_cuts()
        assert limit(server) == 500_000
        assert client.send(b"a") == len(server.recv(1)), "they stay open"


FULL = pytest.mark.full
NIGHTLY = pytest.mark.nightly(part="long")
SHORT = [*programs.TINY, *programs.steps(2, every=2), "--train.batch_size=8"]


# What the second process gets in addition, and what the first one says about it. OTHER and
# ELSEWHERE stand for paths.
@pytest.mark.parametrize(
    ("of_second", "first_prints"),
    [
        pytest.param(
            "--model.n_layer=3",
            r"process 1: model\.n_layer\D*\b2\b.*process 0\D*\b3\b",
            marks=NIGHTLY,
            id="another setting",
        ),
        pytest.param(
            "--data.file=OTHER", r"process 1: .*\bother\.txt\b", marks=FULL, id="another text"
        ),
        pytest.param(
            "--workdir=ELSEWHERE",
            r"\belsewhere\b.*--workdir\b",
            marks=NIGHTLY,
            id="another workdir",
        ),
    ],
)
def test_hosts_that_differ_are_refused_by_name_and_none_hangs(
    text_file, tmp_path, of_second, first_prints
):
    other = tmp_path / "other.txt"
    other.write_text("four three two one " * 400)
    places = {"OTHER": other, "ELSEWHERE": tmp_path / "elsewhere"}
    # The flags of the first process are the same without it.
    flag, _, value = of_second.partition("=")
    changed = [f"{flag}={places.get(value, value)}"]
    # A workdir that does not appear is waited for half a second.
    script = (
        "from experiments import text; from txl_jax import cli; from txl_jax.runs import run; "
        "run._SECONDS_TO_APPEAR = 0.5; cli.train_main(text.DEFAULTS)"
    )
    flags = [
        f"--data.file={text_file}",
        f"--cache_dir={text_file.parent}",
        f"--workdir={tmp_path / 'run'}",
    ]
    started = processes.start("-c", script, *SHORT, *flags, of_process=[[], changed].__getitem__)
    began = time.monotonic()
    (code_0, _, err_0), (code_1, _, err_1) = processes.finish(started)
    assert (code_0, code_1) == (1, 1), (err_0, err_1)
    assert time.monotonic() - began < 60
    assert re.search(first_prints, err_0) and len(err_0.splitlines()) == 1, err_0
    assert err_1.startswith("process 1: error: ") and len(err_1.splitlines()) == 1, err_1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@NIGHTLY
def test_one_process_that_is_left_alone_reports_it():
    # It waits two seconds for the others instead of five minutes.
    script = (
        "from txl_jax import cli; from txl_jax.cli import other_hosts; "
        "other_hosts.START_SECONDS = 2; other_hosts._SILENT_SECONDS = 0.2; "
        "cli.main(print, cli.Plan, hosts='join')"
    )
    environment = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    [(code, _, err)] = processes.finish(processes.start("-c", script, processes=1, **environment))
    assert code != 0
    assert re.match(r".*\b2\b.*--num_processes\b.*\bJAX_NUM_PROCESSES\b", err), err
