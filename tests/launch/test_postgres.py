"""Tests a study in PostgreSQL with workers in two network namespaces, as on two machines: kills, restarts, a cut."""

import contextlib
import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from support import ON_PATH, ROOT
from support.sweep_worker import FILE, check_each_trained_once, starts, trials
from support.waiting import wait_until

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
CONTENT = FILE + (
    "[grid]\nseed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\noptimizer.learning_rate = [1e-3, 2e-3, 3e-3, 4e-3]\n"
    '[pruner]\nname = "MedianPruner"\nn_startup_trials = 10\nn_warmup_steps = 10\n'
)


def shell(*commands):
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


@pytest.fixture
def networks():
    """Two namespaces by the address at which this one is reached from them."""
    if PROGRAMS is None or os.geteuid() or not shutil.which("ip"):
        pytest.skip("it needs root, ip and Debian's postgresql")
    found = {f"10.77.{number}.1": f"txl-{number}-{os.getpid()}" for number in (1, 2)}
    with contextlib.ExitStack() as at_end:
        for number, (address, name) in enumerate(found.items(), start=1):
            inside = f"ip -n {name} "
            shell(f"ip netns add {name}")
            at_end.callback(shell, f"ip netns del {name}")  # The pair goes with it.
            shell(f"ip link add txl{number} type veth peer name eth0 netns {name}")
            shell(f"ip addr add {address}/24 dev txl{number}", f"ip link set txl{number} up")
            shell(f"{inside}addr add 10.77.{number}.2/24 dev eth0", f"{inside}link set eth0 up")
        yield found


@pytest.fixture
def postgres(networks):
    """The arguments of pg_ctl for a server of our own, which runs, and its port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    # Folders of pytest can be read by their owner alone.
    data, user = Path(tempfile.mkdtemp(prefix="postgres-")), pwd.getpwnam("postgres")
    os.chown(data, user.pw_uid, user.pw_gid)

    def server(*words):
        subprocess.run(words, user=user.pw_uid, group=user.pw_gid, cwd=data, check=True, stdout=subprocess.DEVNULL)

    server(PROGRAMS / "initdb", "-D", data, "-A", "trust", "--no-sync")
    with open(data / "pg_hba.conf", "a") as rules:
        rules.write("host all all 10.77.0.0/16 trust\n")
    options = f"-p {port} -k {data} -c listen_addresses=*"
    control = [PROGRAMS / "pg_ctl", "-D", data, "-w", "-s", "-l", data / "log", "-o", options]
    server(*control, "start")
    yield server, control, port
    server(*control, "stop", "-m", "immediate")
    shutil.rmtree(data)


@pytest.mark.nightly(part="postgres")
def test_forty_runs_of_four_workers_survive_kills_restarts_and_a_cut(tmp_path, networks, postgres, request):
    (server, control, port), out, chance = postgres, tmp_path / "out", random.Random(0)
    (tmp_path / "sweep.toml").write_text(CONTENT)
    places = [*networks.items()] * 2
    log, at_end = open(tmp_path / "log", "a"), request.addfinalizer  # noqa: SIM115
    at_end(log.close)

    def start(place):
        address, name = place
        worker = [sys.executable, "-m", "support.sweep_worker", str(tmp_path / "sweep.toml"), f"--out={out}"]
        command = ["ip", "netns", "exec", name, *worker, f"--storage=postgresql://postgres@{address}:{port}/postgres"]
        environment = os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu", "STEP_SECONDS": "0.3"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    workers = [start(place) for place in places]
    at_end(lambda: [worker.kill() or worker.wait() for worker in workers])
    wait_until(lambda: len(list(out.glob("*/ends"))) >= 3, seconds=600)
    for event in ("kill", "fast", "kill", "kill", "cut", "kill", "immediate", "kill"):
        time.sleep(chance.uniform(1, 4))
        if event == "kill":
            number = chance.randrange(4)
            workers[number].kill()
            workers[number].wait()
            workers[number] = start(places[number])
        elif event == "cut":
            shell("ip link set txl2 down")
            time.sleep(30)
            shell("ip link set txl2 up")
        else:
            server(*control, "restart", "-m", event)
    codes = [worker.wait(timeout=900) for worker in workers]
    assert set(codes) <= {0, os.EX_TEMPFAIL}, (tmp_path / "log").read_text()  # 75: it was started during a restart.
    url = f"postgresql+psycopg://postgres@10.77.1.1:{port}/postgres"
    done = [trial for trial in trials(url) if trial.state.name in ("COMPLETE", "PRUNED")]
    names = {trial.user_attrs["run"] for trial in done}
    assert len(done) == len(names) == 40, "none is lost, and none is there twice"
    assert {trial.state.name for trial in trials(url)} <= {"COMPLETE", "PRUNED", "FAIL"}
    complete = {trial.user_attrs["run"]: trial.value for trial in done if trial.state.name == "COMPLETE"}
    for name, value in complete.items():
        seed, rate = (float(part.partition("=")[2]) for part in name.split("+"))
        assert value == pytest.approx(seed + 10 * rate + 1 / 20, abs=1e-12)
    assert any(len(starts(out / name)) > 1 for name in names), "some were resumed"
    for name in names - complete.keys():
        shutil.rmtree(out / name)
    check_each_trained_once(out, len(complete))
