"""Tests a study in PostgreSQL with workers in two network namespaces, as on two machines: kills,
restarts, and a network that is cut.
"""

import contextlib
import json
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

from launch import sweep
from support import ON_PATH, ROOT
from support.programs import write_words
from support.sweep_worker import FILE, TINY, check_each_trained_once, starts, trials
from support.waiting import wait_until
from txl_jax.runtime.lock import is_held

DIRECTORIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
PROGRAMS = DIRECTORIES[-1] if DIRECTORIES else None  # Of the latest version.
CONTENT = FILE + (
    "[grid]\nseed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
    "optimizer.learning_rate = [1e-3, 2e-3, 3e-3, 4e-3]\n"
    '[pruner]\nname = "MedianPruner"\nn_startup_trials = 10\nn_warmup_steps = 10\n'
)

# Trainings that save more often, so that killed ones have something to resume.
MODELS = TINY.replace("checkpoint_every = 600", "checkpoint_every = 100") + (
    "[grid]\nseed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\noptimizer.learning_rate = [1e-4, "
    "1e-3, 3e-3, 1e-2]\n"
)


def shell(*commands):
    """Runs commands, all of which must succeed."""
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


@contextlib.contextmanager
def network(number, name):
    """A network namespace with a pair of devices, the other one of which is here."""
    shell(f"ip netns add {name}")
    try:
        shell(
            f"ip link add txl{number} type veth peer name eth0 netns {name}",
            f"ip addr add 10.77.{number}.1/24 dev txl{number}",
            f"ip link set txl{number} up",
            f"ip -n {name} addr add 10.77.{number}.2/24 dev eth0",
            f"ip -n {name} link set eth0 up",
        )
        yield
    finally:
        shell(f"ip netns del {name}")  # The pair goes with it.


@pytest.fixture
def networks():
    """Two namespaces by the address at which this one is reached from them."""
    if PROGRAMS is None or os.geteuid() or not shutil.which("ip"):
        pytest.skip("it needs root, ip and Debian's postgresql")
    first = f"txl-1-{os.getpid()}"
    second = f"txl-2-{os.getpid()}"
    with network(1, first), network(2, second):
        yield {"10.77.1.1": first, "10.77.2.1": second}


class Postgres:
    """A server of the test, which runs."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("", 0))
            self.port = probe.getsockname()[1]
        self.user = pwd.getpwnam("postgres")
        # Only the owner can read directories of pytest.
        self.data = Path(tempfile.mkdtemp(prefix="postgres-"))
        os.chown(self.data, self.user.pw_uid, self.user.pw_gid)
        self.call("initdb", "-A", "trust", "--no-sync")
        with open(self.data / "pg_hba.conf", "a") as rules:
            rules.write("host all all 10.77.0.0/16 trust\n")
        self.control("start")

    def call(self, program, *words):
        subprocess.run(
            [PROGRAMS / program, "-D", self.data, *words],
            user=self.user.pw_uid,
            group=self.user.pw_gid,
            cwd=self.data,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def control(self, *words):
        """Starts, stops or restarts the server."""
        options = f"-p {self.port} -k {self.data} -c listen_addresses=*"
        self.call("pg_ctl", "-w", "-s", "-l", self.data / "log", "-o", options, *words)

    def close(self):
        self.control("stop", "-m", "immediate")
        shutil.rmtree(self.data)


@pytest.fixture
def postgres(networks):
    server = Postgres()
    yield server
    server.close()


def is_training(folder):
    """Returns whether the process of a run has logged a step, and has not ended."""
    has_begun = (folder / "metrics.jsonl").exists()
    has_ended = (folder / "results.json").exists()
    return has_begun and not has_ended and is_held(folder)


class Workers:
    """Four workers, two in each network, and what disturbs them."""

    def __init__(self, folder, networks, postgres, **variables):
        self.postgres = postgres
        self.out = folder / "out"
        self.log = folder / "log"
        self.url = f"postgresql+psycopg://postgres@10.77.1.1:{postgres.port}/postgres"
        self.environment = os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu"} | variables
        self.commands = []
        for address, name in [*networks.items()] * 2:
            storage = f"postgresql://postgres@{address}:{postgres.port}/postgres"
            self.commands.append(
                [
                    *("ip", "netns", "exec", name),
                    *(sys.executable, "-m", "support.sweep_worker"),
                    str(folder / "sweep.toml"),
                    f"--out={self.out}",
                    f"--storage={storage}",
                ]
            )
        self.processes = [self.start(number) for number in range(4)]

    def start(self, number):
        with open(self.log, "a") as log:
            return subprocess.Popen(
                self.commands[number],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, number):
        """Kills a worker and starts it again."""
        self.processes[number].kill()
        self.processes[number].wait()
        self.processes[number] = self.start(number)

    def kill_all_in_the_middle_of_a_training(self):
        """Waits until a run has trained for some steps, so that there is something to resume, and
        kills all workers.
        """
        wait_until(lambda: any(is_training(folder) for folder in self.out.glob("*")), seconds=600)
        for number in range(len(self.processes)):
            self.kill(number)

    def disturb(self):
        """Kills five times, restarts the database twice, and cuts the network once.

        "fast" and "immediate" are PostgreSQL's ways to stop: cleanly, and as if it crashed.
        """
        chance = random.Random(0)
        for event in ("kill", "fast", "kill", "kill", "cut", "kill", "immediate", "kill"):
            time.sleep(chance.uniform(1, 4))
            if event == "kill":
                self.kill(chance.randrange(4))
            elif event == "cut":
                # Much longer than the grace of workers without heartbeats in these tests.
                shell("ip link set txl2 down")
                time.sleep(30)
                shell("ip link set txl2 up")
            else:
                self.postgres.control("restart", "-m", event)

    def losses(self):
        """Waits for the end. Returns the loss of each run by name, None if it was pruned.

        No run is lost, and none is trained twice.
        """
        codes = [process.wait(timeout=1800) for process in self.processes]
        # 75: it was started during a restart.
        assert set(codes) <= {0, os.EX_TEMPFAIL}, self.log.read_text()
        losses = {}
        for trial in trials(self.url):
            assert trial.state.name in ("COMPLETE", "PRUNED", "FAIL")
            if trial.state.name != "FAIL":
                name = trial.user_attrs["run"]
                assert name not in losses, f"{name} has two trials"
                losses[name] = trial.value if trial.state.name == "COMPLETE" else None
        assert len(losses) == 40
        return losses

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start_workers(tmp_path, networks, postgres):
    """Starts workers on the content of a file."""
    with contextlib.ExitStack() as at_end:

        def start(content, **variables):
            (tmp_path / "sweep.toml").write_text(content)
            workers = Workers(tmp_path, networks, postgres, **variables)
            at_end.callback(workers.close)
            return workers

        yield start


@pytest.mark.nightly(part="postgres")
def test_forty_runs_of_four_workers_survive_kills_restarts_and_a_cut(start_workers):
    workers = start_workers(CONTENT, STEP_SECONDS="0.3")
    out = workers.out
    wait_until(lambda: len(list(out.glob("*/ends"))) >= 3, seconds=600)
    workers.disturb()
    losses = workers.losses()

    assert any(len(starts(out / name)) > 1 for name in losses), "some were resumed"
    for name, loss in losses.items():
        # Pruned runs have no end, which the check below expects of each run.
        if loss is None:
            shutil.rmtree(out / name)
        else:
            seed, rate = (float(part.partition("=")[2]) for part in name.split("+"))
            # As `support.sweep_worker` makes it up, after 20 steps.
            assert loss == pytest.approx(seed + 10 * rate + 1 / 20, abs=1e-12), name
    check_each_trained_once(out, len([*out.glob("*/ends")]))


@pytest.mark.nightly(part="postgres")
def test_forty_models_are_those_that_are_trained_alone(start_workers, tmp_path):
    """Some runs are resumed, and some are pruned."""
    write_words(tmp_path, 12_000)
    content = MODELS.replace("WORK", str(tmp_path))
    pruner = '[pruner]\nname = "MedianPruner"\nn_startup_trials = 10\nn_warmup_steps = 200\n'
    workers = start_workers(content + pruner, REAL_TRAININGS="1")
    wait_until(lambda: len(list(workers.out.glob("*/results.json"))) >= 3, seconds=600)
    workers.kill_all_in_the_middle_of_a_training()
    workers.disturb()
    losses = workers.losses()
    logs = [(workers.out / name / "sweep.log").read_text() for name in losses]
    assert any("resuming " in log for log in logs)
    assert None in losses.values()

    (tmp_path / "alone.toml").write_text(content)
    alone = tmp_path / "alone"
    assert sweep.main(["sweep", str(tmp_path / "alone.toml"), f"--out={alone}", "--jobs=2"]) == 0

    for name, loss in losses.items():
        if loss is not None:
            results = json.loads((workers.out / name / "results.json").read_text())
            expected = json.loads((alone / name / "results.json").read_text())
            assert loss == expected["best_valid"]["loss"], name
            assert results["test"] == expected["test"], name
