"""Tests that two processes of four devices do what one of eight does: train, stop, go on, score,
write.

In float64: sums over devices are made in another order, and nothing else may differ. And how a
program finds out that it is one of several processes, and what each is answered if they do not fit.
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
]
TINY += [
    "--model.dtype=float64",
    "--train.batch_size=8",
    "--eval.batch_size=8",
    "--train.keep_checkpoints=4",
]
TINY += ["--train.sample_every=4", "--generate.length=20", "--generate.samples=2"]
TOLERANCE = 1e-10


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    return programs.write_words(tmp_path_factory.mktemp("text"), 2_000)


@pytest.fixture(scope="module")
def start(text_file):
    """Starts a run, or another mode of it, in processes that have eight devices together."""

    def start(n_process, workdir, *flags):
        own = [*TINY, f"--data.file={text_file}", f"--cache_dir={text_file.parent}"]
        own = [] if any(flag.startswith("--mode") for flag in flags) else own
        command = ["-m", "experiments.text", *own, *flags, f"--workdir={workdir}"]
        return processes.start(
            *command, processes=n_process, devices=8 // n_process, JAX_ENABLE_X64="1"
        )

    return start


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    [(code, _, err)] = processes.finish(start(1, workdir))
    assert code == 0, err
    return workdir


def assert_same_run(workdir, expected):
    found, wanted = read_metrics(workdir), read_metrics(expected)
    for record, other in zip(found, wanted, strict=True):
        assert (record["kind"], record["step"]) == (other["kind"], other["step"])
        for name in record.keys() - {"kind", "time", *MEASURED}:
            assert record[name] == pytest.approx(other[name], rel=TOLERANCE), (
                record["kind"],
                record["step"],
                name,
            )
    results, others = (
        json.loads((folder / "results.json").read_text()) for folder in (workdir, expected)
    )
    for name in ("best_valid", "test"):
        assert results[name] == pytest.approx(others[name], rel=TOLERANCE)
    (step, found), (last, wanted) = (
        arrays(folder / "checkpoints" / "latest") for folder in (workdir, expected)
    )
    for sampled in ("step-4.txt", f"step-{STEPS}.txt"):
        assert (workdir / "samples" / sampled).read_bytes() == (
            expected / "samples" / sampled
        ).read_bytes()
    assert step == last == STEPS and found.keys() == wanted.keys() and len(found) > 10
    for name, array in found.items():
        np.testing.assert_allclose(
            array, wanted[name], rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


@pytest.mark.full
def test_what_two_processes_began_one_ends_with_the_numbers_of_an_undisturbed_run(
    undisturbed, start, tmp_path
):
    """A signal to the second process saves the same step in both; one process goes on from it."""
    started = start(2, tmp_path)
    processes.wait_for((tmp_path / "samples" / "step-4.txt").exists, started)
    started[1].send_signal(signal.SIGTERM)
    (code_0, out_0, err_0), (code_1, out_1, err_1) = processes.finish(started)
    assert (code_0, code_1, out_1) == (143, 143, "") and "Traceback" not in err_0 + err_1, (
        err_0 + err_1
    )
    step = int(re.search(r"(?m)^stopped\D*(\d+)", out_0)[1])
    assert 4 <= step < STEPS
    assert re.search(r"\bdata 8\b.*\bfsdp 1\b.*\btensor 1\b.*\b2\b", out_0)
    newest = max(int(path.name) for path in (tmp_path / "checkpoints" / "latest").iterdir())
    assert (
        newest == step
        and (tmp_path / "checkpoints" / "latest" / str(step) / "digests.json").exists()
    )
    [(code, out, err)] = processes.finish(start(1, tmp_path))
    assert code == 0, err
    assert re.search(r"resum\w+\D*\d", out)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.nightly(part="long")
@pytest.mark.parametrize("flags", [[], ["--mesh.fsdp=2", "--mesh.tensor=2"]], ids=" ".join)
def test_two_processes_score_evaluate_and_write_as_one_does(undisturbed, start, tmp_path, flags):
    evaluate = ["--mode=eval", "--eval.stride=4", "--eval.mem_len=0", "--eval.same_length=false"]
    write = [
        "--mode=generate",
        "--generate.length=40",
        "--generate.samples=2",
        "--generate.prompt=one two three four",
    ]
    learn = ["--mode=eval", "--eval.dynamic.rule=rmsprop", "--eval.dynamic.learning_rate=0.01"]
    scores, found, learned = [], [], []
    for n_process in (1, 2):
        workdir = tmp_path / str(n_process)
        shutil.copytree(undisturbed, workdir)
        for job in (learn, ["--mode=score"], evaluate, write):
            ended = processes.finish(start(n_process, workdir, *job, *flags))
            if job is learn:
                learned.append(json.loads((workdir / "evaluation.json").read_text()))
            assert {code for code, _, _ in ended} == {0}, ended
            assert all(out == "" for _, out, _ in ended[1:])
        lines = "".join(
            (workdir / f"scores-{name}.tsv").read_text() for name in ("valid", "test")
        ).splitlines()
        scores.append(
            [float(line.split("\t")[2]) for line in lines if not line.startswith("index")]
        )
        [sample] = workdir.glob("sample-seed*.txt")
        found.append((json.loads((workdir / "evaluation.json").read_text()), sample.read_bytes()))
    assert len(scores[0]) > 500
    np.testing.assert_allclose(scores[0], scores[1], rtol=TOLERANCE)
    for split in ("valid", "test"):
        assert found[0][0][split] == pytest.approx(found[1][0][split], rel=TOLERANCE)
        for kind in ("static", "dynamic"):
            of_one, of_two = (results[kind][split] for results in learned)
            assert of_one == pytest.approx(of_two, rel=TOLERANCE)
        assert learned[0]["dynamic"][split]["loss"] < learned[0]["static"][split]["loss"]
    assert found[0][1] == found[1][1]


@pytest.mark.full
def test_two_processes_save_whole_checkpoints_in_a_directory_whose_name_is_a_pattern(
    start, tmp_path
):
    """Each makes a link of its own, and process 0 merges what both have written."""
    workdir = tmp_path / "lr[0.1]"
    short = [*programs.steps(4, every=2), "--train.eval_every=4"]
    ended = processes.finish(start(2, workdir, *short))
    assert [code for code, _, _ in ended] == [0, 0], ended
    step, found = arrays(workdir / "checkpoints" / "latest")
    assert step == 4 and len(found) > 10
    assert (
        len(list((workdir / "checkpoints" / "latest" / "4" / "state").glob("ocdbt.process_*"))) == 2
    )
    [(code, out, err)] = processes.finish(start(1, workdir, *short, "--train.steps=6"))
    assert code == 0 and re.search(r"(?m)^resum\w+ +from step 4\b", out), err


@pytest.mark.full
def test_a_step_that_one_process_cannot_open_does_not_count_and_both_end(text_file, tmp_path):
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
    ]
    flags += [
        f"--data.file={text_file}",
        f"--cache_dir={text_file.parent}",
        f"--workdir={tmp_path}",
    ]
    started = processes.start("-c", script, *flags, JAX_ENABLE_X64="1")
    (code_0, _, err_0), (code_1, _, err_1) = processes.finish(started)
    assert (code_0, code_1) == (1, 1), (err_0, err_1)
    assert (
        err_1.startswith("process 1: error: ")
        and "the array x is missing" in err_1
        and err_1.count("\n") == 1
    )
    assert (
        err_0.startswith("error: process 1: ") and "step 4" in err_0 and err_0.count("\n") == 1
    ), err_0
    step, _ = arrays(tmp_path / "checkpoints" / "latest")
    assert step == 2


# One of several processes


SALLOC_SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[1-2]"}
SBATCH_SCRIPT = SALLOC_SHELL | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
INTERACTIVE_STEP = SBATCH_SCRIPT | {"SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": "1"}
SRUN = SBATCH_SCRIPT | {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "4"}
ONE_A_NODE = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
BY_HAND = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture(autouse=True)
def has_tpu(request, monkeypatch):
    monkeypatch.setattr(other_hosts, "_has_tpu", lambda: "tpu" in request.node.name)


def test_the_tasks_of_a_slurm_step_are_counted_and_keep_their_devices():
    """A process by itself waits for nobody."""
    for environment, count, all_devices in (
        *((alone, None, False) for alone in ({}, SALLOC_SHELL, SBATCH_SCRIPT, INTERACTIVE_STEP)),
        (BY_HAND | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c"}, None, False),  # Without a TPU.
        (SRUN, 4, False),  # Two a node share its GPUs: jax gives each its own.
        (ONE_A_NODE, 2, True),
        (SRUN | {"CUDA_VISIBLE_DEVICES": "3"}, 4, True),
        (ONE_A_NODE | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, 2, False),  # The environment names them.
    ):
        found = other_hosts.announced(environment)
        assert (
            (found and found.num_processes) == (found and found.arguments["num_processes"]) == count
        )
        assert bool(found and "local_device_ids" in found.arguments) == all_devices


def test_flags_come_before_the_environment_and_both_before_slurm(monkeypatch):
    monkeypatch.setattr(os, "environ", SRUN | BY_HAND)
    with programs.own_flags():
        other_hosts.define_flags()
        assert flags.FLAGS(["program", "--process_id=0"]) == ["program"]
        found = other_hosts.announced(other_hosts.environment())
    given = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}
    assert found.num_processes == 2 and found.arguments == given | {
        "cluster_detection_method": "deactivate"
    }


def test_half_an_announcement_is_refused():
    for environment, expected in (
        ({"JAX_NUM_PROCESSES": "2"}, "--coordinator .*JAX_COORDINATOR_ADDRESS.*--process_id"),
        (
            BY_HAND | {"JAX_PROCESS_ID": "2"},
            "process_id .*num_processes - 1.*process_id 2 .*num_processes 2",
        ),
        (BY_HAND | {"JAX_COORDINATOR_ADDRESS": "a"}, "HOST:PORT.*'a'"),
        (BY_HAND | {"JAX_NUM_PROCESSES": "two"}, "num_processes two"),
    ):
        with pytest.raises(UserError, match=expected):
            other_hosts.announced(environment)


def test_the_hosts_of_a_tpu_slice_are_asked_of_its_metadata():
    for attributes, count in (
        ({}, None),  # No Cloud TPU.
        (
            {
                "worker-network-endpoints": "unknown:unknown:10.0.0.1",
                "tpu-env": "ACCELERATOR_TYPE: 'v5e-8'",
            },
            None,
        ),
        ({"worker-network-endpoints": "a:b:10.0.0.1,a:b:10.0.0.2"}, 2),
        (
            {
                "worker-network-endpoints": "10.0.0.1,10.0.0.2",
                "tpu-env": "X: 'y'\nMEGASCALE_NUM_SLICES: '3'\n",
            },
            6,
        ),
        ({"worker-network-endpoints": "10.0.0.1", "tpu-env": "MEGASCALE_NUM_SLICES: '2'\n"}, 2),
    ):
        with MetadataServer() as server:
            server.values |= {f"attributes/{name}": value for name, value in attributes.items()}
            environment = {"GCE_METADATA_IP": server.host}
            found = other_hosts.announced(environment)
            assert found == (
                None if count is None else other_hosts.Processes(count, "the TPU slice", {})
            )
            for other in (
                {"JAX_PLATFORMS": "cpu"},
                {"TPU_SKIP_MDS_QUERY": "1"},
                {"TPU_WORKER_HOSTNAMES": "localhost"},
            ):
                assert other_hosts.announced(environment | other) is None
        assert other_hosts.announced({"TPU_WORKER_HOSTNAMES": "a,b,c"}).num_processes == 3


def test_a_tpu_whose_metadata_server_does_not_answer_is_an_error_and_a_proxy_is_not_asked(
    monkeypatch,
):
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
    ended, found = queue.Queue(), []
    monkeypatch.setattr(other_hosts.os, "_exit", ended.put)
    monkeypatch.setattr(other_hosts.atexit, "register", lambda act: None)
    monkeypatch.setattr(
        other_hosts.distributed,
        "broadcast_from_primary",
        lambda find: found.append(find()) or found[0],
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


@pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="open files are listed on Linux only"
)
def test_connections_that_grpc_gives_20_s_outlast_a_link_that_is_cut_for_a_moment():
    """After a cut of 15 s, TCP tries again when up to 25.6 s have passed since the cut began."""

    def limit(connection, *value):
        if value:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, *value)
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("localhost", 0)))
        limit(listening, 20_000)
        client = stack.enter_context(socket.create_connection(listening.getsockname(), timeout=30))
        server = stack.enter_context(listening.accept()[0])
        assert (limit(server), limit(client)) == (20_000, 0)
        other_hosts._outlast_cuts()
        assert limit(listening) == limit(server) > 2 * 25_600
        assert limit(client) == 0, "without a limit TCP tries for longer"
        limit(server, 500_000)
        other_hosts._outlast_cuts()
        assert limit(server) == 500_000
        assert client.send(b"a") == len(server.recv(1)), "they stay open"


FULL, NIGHTLY = pytest.mark.full, pytest.mark.nightly(part="long")
SHORT = [*programs.TINY, *programs.steps(2, every=2), "--train.batch_size=8"]


DIFFERENCES = [
    ("--model.n_layer=3", r"process 1: model\.n_layer\D*\b2\b.*process 0\D*\b3\b"),
    ("--data.file=OTHER", r"process 1: .*\bother\.txt\b"),
    ("--workdir=ELSEWHERE", r"\belsewhere\b.*--workdir\b"),
]


@pytest.mark.parametrize(
    ("of_second", "first_prints"),
    [pytest.param(*case, marks=FULL if "OTHER" in case[0] else NIGHTLY) for case in DIFFERENCES],
)
def test_hosts_that_differ_are_refused_by_name_and_none_hangs(
    text_file, tmp_path, of_second, first_prints
):
    other = tmp_path / "other.txt"
    other.write_text("four three two one " * 400)
    places = {"OTHER": other, "ELSEWHERE": tmp_path / "elsewhere"}
    flag, _, value = of_second.partition("=")
    changed = [f"{flag}={places.get(value, value)}"]
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
    script = (
        "from txl_jax import cli; from txl_jax.cli import other_hosts; "
        "other_hosts.START_SECONDS = 2; other_hosts._SILENT_SECONDS = 0.2; "
        "cli.main(print, cli.Plan, hosts='join')"
    )
    environment = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    [(code, _, err)] = processes.finish(processes.start("-c", script, processes=1, **environment))
    assert code != 0
    assert re.match(r".*\b2\b.*--num_processes\b.*\bJAX_NUM_PROCESSES\b", err), err
