"""Tests launch/tpu.sh: what it prints, and the script against a fake gcloud and hosts, scripts of
tests/launch/fake.

`watch` meets preemptions, maintenance, stops, hosts that are replaced, and runs that break off.
"""

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from support import ROOT, shell
from support.processes import wait_for

FAKES = ROOT / "tests" / "launch" / "fake"
SCRIPT = str(ROOT / "launch" / "tpu.sh")
RUN = [
    "--",
    "python",
    "-m",
    "experiments.enwik8",
    "--workdir",
    "gs://mine/one",
    "--generate.prompt=it's",
]
HOST_COMMANDS = ("sudo", "python3", "uv", "systemctl", "systemd-run", "journalctl", "curl")


def start(cloud, *words, **environment):
    own = {
        "PATH": f"{cloud / 'bin'}:{os.environ['PATH']}",
        "FAKE": str(cloud),
        "TMPDIR": str(cloud),
    }
    variables = os.environ | own | {"REAL_PYTHON": sys.executable} | environment
    return subprocess.Popen(
        [SCRIPT, *words],
        cwd=cloud / "clone",
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def call(cloud, *words, **environment):
    process = start(cloud, *words, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def program(cloud, text):
    (cloud / "program").write_text(f"#!/usr/bin/env bash\nset -eu\n{text}")
    (cloud / "program").chmod(0o755)


def is_running(cloud):
    """Returns whether both hosts run the program, and have been asked about it since."""
    log = (cloud / "host.log").read_text() if (cloud / "host.log").exists() else ""
    _, started, since = log.rpartition("\nsystemd-run ")
    return started and since.count("ExecMainStatus") >= 2


def asked_of_gcloud(cloud):
    """Verbs of the requests that change something; an installation that is tried again counts
    once.
    """
    lines = (cloud / "gcloud.log").read_text().splitlines()
    commands = [line.split()[2:4] for line in lines]
    return [
        verb
        for verb, _ in itertools.groupby(
            verb for _, verb in commands if verb in ("create", "delete", "scp")
        )
    ]


@pytest.fixture
def cloud(tmp_path):
    """A folder in place of the cloud; its `program` is what the hosts run in place of python."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "gcloud").symlink_to(FAKES / "gcloud")
    for name in HOST_COMMANDS:
        (commands / name).symlink_to(FAKES / "host")
    clone = tmp_path / "clone"
    clone.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    (clone / "setup.cfg").write_text("[metadata]\n")
    (clone / ".gitignore").write_text("data/\n")
    (clone / "data").mkdir()
    (clone / "data" / "large").write_text("not to be sent")
    return tmp_path


@pytest.mark.full
def test_dry_run_prints_each_command_and_runs_none(cloud):
    words = (
        "create one --zone=z --type=v5p-16 --node-count=2 --project=p --spot --network=n "
        "--service-account=a@p"
    )
    code, out, err = call(cloud, *words.split(), "--dry_run")
    printed = "queued-resources create one --zone=z --project=p --node-count=2 --node-prefix=one "
    printed += (
        "--accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5 --spot --network=n "
        "--service-account=a@p"
    )
    assert (code, out, err) == (0, f"gcloud compute tpus {printed}\n", "")
    assert not (cloud / "gcloud.log").exists()


# A command for each flag, a second value, and the words that it adds. `--every` adds none, and
# tests of `watch` wait for it.
EFFECTS = {
    "zone": ("stop", "=other", {"--zone=other"}),
    "project": ("stop", "=p", {"--project=p"}),
    "type": ("create", "=v6e-8", {"--accelerator-type=v6e-8", "--runtime-version=v2-alpha-tpuv6e"}),
    "runtime": ("create", "=v9", {"--runtime-version=v9"}),
    "node-count": ("create", "=3", {"--node-count=3"}),
    "spot": ("create", "", {"--spot"}),
    "reserved": ("create", "", {"--reserved"}),
    "network": ("create", "=n", {"--network=n"}),
    "service-account": ("create", "=a@p", {"--service-account=a@p"}),
    "worker": ("logs", "=5", {"--worker=5"}),
    "node": ("logs", "=6", {"--node=6"}),
    "follow": (
        "logs",
        "",
        {"--command=sudo journalctl --unit=txl --output=cat --lines=200 --follow"},
    ),
}


@pytest.mark.full
def test_each_documented_flag_changes_its_words_of_a_command(cloud):
    def words(command, *flags):
        usual = ["--zone=z", "--type=v4-8", "--node-count=2"]
        code, out, err = call(cloud, command, "one", *usual, *flags, "--dry_run")
        assert code == 0, err
        return set(shlex.split(out))

    code, out, _ = call(cloud, "--help")
    documented = set(re.findall(r"--([a-z-]+)", out.partition("\n  --zone")[2])) - {"dry"}
    assert code == 0 and documented | {"zone"} == EFFECTS.keys() | {"every"}
    for flag, (command, value, added) in EFFECTS.items():
        assert words(command, f"--{flag}{value}") - words(command) == added, flag


@pytest.mark.full
def test_the_scripts_for_the_hosts_are_valid_shell(cloud):
    code, out, err = call(cloud, "watch", "one", "--zone=z", "--type=v5p-8", "--dry_run", *RUN)
    assert code == 0, err
    # As a shell reads them.
    commands = (word for word in shlex.split(out) if word.startswith("--command="))
    install, run, poll = (word.removeprefix("--command=") for word in commands)
    for script in (install, run, poll):
        assert not shell.findings(script)
    assert 'pip install --quiet "./txl/source[plots,tpu,gcs]"' in install
    assert shlex.split(run.splitlines()[-1])[1:] == RUN[1:]
    assert '--setenv=PYTHONPATH="$HOME/txl/source"' in run and '--working-directory="$HOME"' in run
    assert "--property=LimitMEMLOCK=infinity" in run


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["install", "one", "--zone=z"], "root of a clone"),
        (["create", "one", "--zone=z", "--type=v9-8"], "v9-8"),
        (["delete", "one", "--zone=z"], "watch, got 'delete'"),
        (["create", "one", "--zone=z", "--runtime=v2"], "--type"),
        (
            ["watch", "one", "--zone=z", "--type=v4-8", "--", "python", "-m", "experiments.ptb"],
            "--workdir=gs://",
        ),
        (
            [
                "watch",
                "one",
                "--zone=z",
                "--type=v4-8",
                "--",
                "python",
                "-m",
                "x",
                "--workdir=runs/one",
            ],
            "gs://",
        ),
    ],
)
def test_mistakes_are_named(cloud, words, expected):
    (cloud / "clone" / "setup.cfg").unlink()  # Without it this is not a clone, and is not sent.
    code, out, err = call(cloud, *words)
    assert code == 2 and not out
    assert err.startswith("error: ") and expected in err
    assert not (cloud / "gcloud.log").exists()


STEPS = """
# Six steps, in a bucket that all hosts share; each host counts its own.
folder=$FAKE/${3#--workdir=gs://}
mkdir -p "$folder"
own=$folder/$(basename "$HOME")
n=$(cat "$own" 2>/dev/null || echo 0)
echo "goes on after $n" >>"$own.starts"
while [ "$n" -lt 6 ]; do
  n=$((n + 1))
  echo $n >"$own.new" && mv "$own.new" "$own" # A kill in between must not leave it empty.
  sleep 0.02
  if [ $n = 3 ] && [ ! -e "$FAKE/preempted" ] && [ "$(basename "$HOME")" = host0 ]; then
    touch "$FAKE/preempted"
    echo SUSPENDED >"$FAKE/state"
    kill -KILL $$
  fi
done
"""


def watch(cloud, *more, wait=True, **environment):
    words = ["watch", "one", "--zone=z", "--type=v4-32", "--spot"]
    run = [
        "--",
        "python",
        "-m",
        "experiments.enwik8",
        "--workdir=gs://mine/run",
        "two words",
        "$HOME",
    ]
    return (call if wait else start)(cloud, *words, "--every=0.05", *more, *run, **environment)


@pytest.mark.full
def test_watch_begins_again_after_a_preemption_and_goes_on_from_the_workdir(cloud):
    program(cloud, f'[ "$4" = "two words" ] && [ "$5" = "\\$HOME" ]\n{STEPS}')
    code, out, err = watch(cloud)
    assert code == 0, out + err
    assert asked_of_gcloud(cloud) == ["create", "scp", "delete", "create", "scp"], out + err
    for host in ("host0", "host1"):
        assert (cloud / "mine" / "run" / host).read_text() == "6\n"
    assert (
        cloud / "mine" / "run" / "host0.starts"
    ).read_text() == "goes on after 0\ngoes on after 3\n"
    assert re.search(r"\bSUSPENDED\b", out) and out.splitlines()[-1].endswith(
        "delete one --zone=z --force"
    )
    source = cloud / "host1" / "txl" / "source"
    assert sorted(path.name for path in source.iterdir()) == [".gitignore", "setup.cfg"], (
        "the working tree, but for data"
    )


@pytest.mark.full
def test_watch_waits_while_a_host_is_maintained(cloud):
    """The program has the same notice, saves and exits with 143; afterwards the host may have
    rebooted.
    """
    program(cloud, "trap 'exit 143' TERM\nwhile [ ! -e \"$FAKE/over\" ]; do sleep 0.02; done\n")
    watching = watch(cloud, wait=False)
    wait_for(lambda: is_running(cloud), [watching])
    (cloud / "host1" / "maintenance").write_text("TERMINATE_ON_HOST_MAINTENANCE\n")
    for host in ("host0", "host1"):
        os.kill(int((cloud / host / "pid").read_text()), signal.SIGTERM)
    log = cloud / "host.log"
    begins = log.read_text().count("\nsystemd-run ")
    polls = log.read_text().count("ExecMainStatus")
    wait_for(lambda: log.read_text().count("ExecMainStatus") > polls + 8, [watching])
    assert log.read_text().count("\nsystemd-run ") == begins, (
        "it is not started before the maintenance is over"
    )
    for name in ("pid", "status", "maintenance"):  # A reboot.
        (cloud / "host1" / name).unlink()
    (cloud / "over").touch()
    out, err = watching.communicate(timeout=60)
    assert watching.returncode == 0, out + err
    assert log.read_text().count("\nsystemd-run ") == begins + 2 and "maintained" in out


@pytest.mark.full
def test_watch_ends_when_the_run_is_stopped(cloud):
    program(cloud, "trap 'echo saved; exit 143' TERM\nwhile :; do sleep 0.02; done\n")
    watching = watch(cloud, wait=False)
    wait_for(lambda: is_running(cloud), [watching])
    code, _, err = call(cloud, "stop", "one", "--zone=z")
    assert code == 0, err
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 143 and "watch" in err
    assert (cloud / "host1" / "journal").read_text() == "saved\n"
    program(cloud, "echo went on\n")
    code, _, err = watch(cloud)
    assert code == 0, "watch goes on with a run that was stopped before: " + err
    assert (cloud / "host1" / "journal").read_text() == "went on\n"
    assert asked_of_gcloud(cloud) == ["create", "scp"]


@pytest.mark.nightly(part="faults")
def test_a_request_that_is_refused_is_made_again_a_few_times(cloud):
    program(cloud, "echo done\n")
    code, out, err = watch(cloud, FAKE_REFUSALS="2")
    assert code == 0 and err.count("no quota") == 2, out + err
    (cloud / "state").unlink()
    code, out, err = watch(cloud, FAKE_REFUSALS="9")
    assert code == 1 and err.count("no quota") == 5 and re.search(r"(?m)^error: .*\b5\b", err)


@pytest.mark.nightly(part="faults")
def test_a_run_that_is_going_on_is_not_started_twice(cloud):
    program(cloud, "trap 'exit 143' TERM\nwhile :; do sleep 0.02; done\n")
    assert call(cloud, "create", "one", "--zone=z", "--type=v4-8")[0] == 0
    (cloud / "state").write_text("ACTIVE\n")
    assert call(cloud, "install", "one", "--zone=z")[0] == 0
    assert call(cloud, "run", "one", "--zone=z", *RUN)[0] == 0
    code, _, err = call(cloud, "run", "one", "--zone=z", *RUN)
    assert code == 1 and re.search(r"(?m)^error: .*tpu\.sh stop\b", err)
    assert call(cloud, "stop", "one", "--zone=z")[0] == 0
    assert call(cloud, "run", "one", "--zone=z", *RUN)[0] == 0, (
        "after a stop it may be started again"
    )
    assert call(cloud, "stop", "one", "--zone=z")[0] == 0


@pytest.mark.nightly(part="faults")
@pytest.mark.parametrize("end", ["exit 134", "kill -TERM $$"])
def test_watch_starts_a_run_that_broke_off_again(cloud, end):
    """One host loses the other and is aborted, a few times; or somebody else ends it, which systemd
    calls clean.
    """
    program(
        cloud,
        f'echo x >>"$HOME/starts"\n[ "$(wc -l <"$HOME/starts")" -ge 3 ] || {end}\nsleep 0.02\n',
    )
    code, out, err = watch(cloud)
    assert code == 0, out + err
    assert (cloud / "host0" / "starts").read_text() == "x\n" * 3
    program(cloud, "exit 134\n")
    code, out, err = watch(cloud)
    assert code == 1 and re.search(r"\b6\b", err), out + err


@pytest.mark.full
def test_a_request_that_is_never_served_is_not_asked_for_again(cloud):
    code, _, err = watch(cloud, FAKE_FIRST_STATE="FAILED")
    assert code == 1 and "describe one --zone=z" in err
    assert asked_of_gcloud(cloud) == ["create"]


@pytest.mark.nightly(part="faults")
def test_a_host_that_was_replaced_is_installed_again(cloud):
    """One of two hosts comes back empty: the run is stopped on the other, and begins again on
    both.
    """
    program(cloud, 'trap "exit 143" TERM\nwhile [ ! -e "$FAKE/replaced" ]; do sleep 0.02; done\n')
    watching = watch(cloud, wait=False)
    wait_for(lambda: is_running(cloud), [watching])
    pid = int((cloud / "host1" / "pid").read_text())
    (cloud / "host1").rename(cloud / "host1-gone")
    (cloud / "host1").mkdir()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: (cloud / "gcloud.log").read_text().count(" scp ") == 2, [watching])
    (cloud / "replaced").touch()
    out, err = watching.communicate(timeout=60)
    assert watching.returncode == 0, out + err
