"""Tests a study in PostgreSQL with workers in two network namespaces, as on two machines: kills,
restarts, a cut.
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

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
CONTENT = FILE + (
    "[grid]\nseed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n"
    "optimizer.learning_rate = [1e-3, 2e-3, 3e-3, 4e-3]\n"
    '[pruner]\nname = "MedianPruner"\nn_startup_trials = 10\nn_warmup_steps = 10\n'
)

MODELS = TINY.replace("checkpoint_every = 600", "checkpoint_every = 100") + (
    "[grid]\nseed = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\noptimizer.learning_rate = [1e-4, "
    "1e-3, 3e-3, 1e-2]\n"
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
        subprocess.run(
            words,
            user=user.pw_uid,
            group=user.pw_gid,
            cwd=data,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    server(PROGRAMS / "initdb", "-D", data, "-A", "trust", "--no-sync")
    with open(data / "pg_hba.conf", "a") as rules:
        rules.write("host all all 10.77.0.0/16 trust\n")
    options = f"-p {port} -k {data} -c listen_addresses=*"
    control = [PROGRAMS / "pg_ctl", "-D", data, "-w", "-s", "-l", data / "log", "-o", options]
    server(*control, "start")
    yield server, control, port
    server(*control, "stop", "-m", "immediate")
    shutil.rmtree(data)


def is_training(folder):
    """Returns whether the process of a run has logged a step, and has not ended."""
    return (
        (folder / "metrics.jsonl").exists()
        and not (folder / "results.json").exists()
        and is_held(folder)
    )


class Workers:
    """Four workers, two in each network, and what disturbs them."""

    def __init__(self, folder, networks, postgres, **variables):
        (self.server, self.control, port), self.out, self.log = (
            postgres,
            folder / "out",
            folder / "log",
        )
        self.url = f"postgresql+psycopg://postgres@10.77.1.1:{port}/postgres"
        environment = os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu"} | variables
        words = [
            sys.executable,
            "-m",
            "support.sweep_worker",
            str(folder / "sweep.toml"),
            f"--out={self.out}",
        ]
        self.commands = [
            [
                "ip",
                "netns",
                "exec",
                name,
                *words,
                f"--storage=postgresql://postgres@{address}:{port}/postgres",
            ]
            for address, name in [*networks.items()] * 2
        ]
        self.how = {"cwd": ROOT, "env": environment, "stderr": subprocess.STDOUT}
        self.processes = [self.start(number) for number in range(4)]

    def start(self, number):
        with open(self.log, "a") as log:
            return subprocess.Popen(self.commands[number], stdout=log, **self.how)

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
        """Kills five times, restarts the database twice, and cuts the network once."""
        chance = random.Random(0)
        for event in ("kill", "fast", "kill", "kill", "cut", "kill", "immediate", "kill"):
            time.sleep(chance.uniform(1, 4))
            if event == "kill":
                self.kill(chance.randrange(4))
            elif event == "cut":
                shell("ip link set txl2 down")
                time.sleep(30)
                shell("ip link set txl2 up")
            else:
                self.server(*self.control, "restart", "-m", event)

    def losses(self):
        """Waits for the end; returns the loss of each run by name, None for one that was pruned."""
        codes = [process.wait(timeout=1800) for process in self.processes]
        # 75: it was started during a restart.
        assert set(codes) <= {0, os.EX_TEMPFAIL}, self.log.read_text()
        found = trials(self.url)
        assert {trial.state.name for trial in found} <= {"COMPLETE", "PRUNED", "FAIL"}
        done = [trial for trial in found if trial.state.name != "FAIL"]
        complete = {
            trial.user_attrs["run"]: trial.value for trial in done if trial.state.name == "COMPLETE"
        }
        names = dict.fromkeys(trial.user_attrs["run"] for trial in done)
        assert len(done) == len(names) == 40, "none is lost, and none is there twice"
        return names | complete


@pytest.fixture
def start_workers(tmp_path, networks, postgres):
    with contextlib.ExitStack() as at_end:

        def start(content, **variables):
            (tmp_path / "sweep.toml").write_text(content)
            workers = Workers(tmp_path, networks, postgres, **variables)
            at_end.callback(
                lambda: [process.kill() or process.wait() for process in workers.processes]
            )
            return workers

        yield start


@pytest.mark.nightly(part="postgres")
def test_forty_runs_of_four_workers_survive_kills_restarts_and_a_cut(start_workers):
    workers = start_workers(CONTENT, STEP_SECONDS="0.3")
    out = workers.out
    wait_until(lambda: len(list(out.glob("*/ends"))) >= 3, seconds=600)
    workers.disturb()
    losses = workers.losses()
    for name, loss in losses.items():
        seed, rate = (float(part.partition("=")[2]) for part in name.split("+"))
        assert loss in (None, pytest.approx(seed + 10 * rate + 1 / 20, abs=1e-12))
    assert any(len(starts(out / name)) > 1 for name in losses), "some were resumed"
    for name in [name for name, loss in losses.items() if loss is None]:
        shutil.rmtree(out / name)
    check_each_trained_once(out, len([*out.glob("*/ends")]))


@pytest.mark.nightly(part="postgres")
def test_forty_models_are_those_that_are_trained_alone(start_workers, tmp_path):
    write_words(tmp_path, 12_000)
    content = MODELS.replace("WORK", str(tmp_path))
    pruned = (
        content + '[pruner]\nname = "MedianPruner"\nn_startup_trials = 10\nn_warmup_steps = 200\n'
    )
    workers = start_workers(pruned, REAL_TRAININGS="1")
    wait_until(lambda: len(list(workers.out.glob("*/results.json"))) >= 3, seconds=600)
    workers.kill_all_in_the_middle_of_a_training()
    workers.disturb()
    losses = workers.losses()
    logs = [(workers.out / name / "sweep.log").read_text() for name in losses]
    assert any("resuming " in log for log in logs) and None in losses.values()
    (tmp_path / "alone.toml").write_text(content)
    code = sweep.main(
        ["sweep", str(tmp_path / "alone.toml"), f"--out={tmp_path / 'alone'}", "--jobs=2"]
    )
    assert code == 0
    for name in [name for name, loss in losses.items() if loss is not None]:
        found, alone = (
            json.loads((folder / name / "results.json").read_text())
            for folder in (workers.out, tmp_path / "alone")
        )
        assert losses[name] == alone["best_valid"]["loss"] and found["test"] == alone["test"], name
