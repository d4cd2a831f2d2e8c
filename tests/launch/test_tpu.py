"""Tests launch/tpu.sh: what it prints, and the script with a fake gcloud and fake hosts, which are
scripts of tests/launch/fake.

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
    """Starts the script in a process, in the clone and with the fake commands."""
    variables = {
        "PATH": f"{cloud / 'bin'}:{os.environ['PATH']}",
        "FAKE": str(cloud),
        "TMPDIR": str(cloud),
        "REAL_PYTHON": sys.executable,
    }
    return subprocess.Popen(
        [SCRIPT, *words],
        cwd=cloud / "clone",
        env=os.environ | variables | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def call(cloud, *words, **environment):
    """Runs the script. Returns its exit code, output and errors."""
    process = start(cloud, *words, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def call_without_error(cloud, *words):
    """Runs the script, which must exit with 0."""
    code, out, err = call(cloud, *words)
    assert code == 0, out + err


def program(cloud, text):
    """Writes what the hosts run instead of python."""
    path = cloud / "program"
    path.write_text(f"#!/usr/bin/env bash\nset -eu\n{text}")
    path.chmod(0o755)


def is_running(cloud):
    """Returns whether both hosts run the program, and have been polled since."""
    path = cloud / "host.log"
    if not path.exists():
        return False
    _, started, since = path.read_text().rpartition("\nsystemd-run ")
    return started and since.count("ExecMainStatus") >= 2


def requests_to_gcloud(cloud):
    """Verbs of the requests that change something. An installation that is tried again counts
    once.
    """
    verbs = []
    for line in (cloud / "gcloud.log").read_text().splitlines():
        verb = line.split()[3:4]
        if verb in (["create"], ["delete"], ["scp"]):
            verbs += verb
    return [verb for verb, _ in itertools.groupby(verbs)]


@pytest.fixture
def cloud(tmp_path):
    """A directory instead of the cloud. Its `program` is what the hosts run instead of python."""
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
    flags = (
        "--zone=z --type=v5p-16 --node-count=2 --project=p --spot --network=n --service-account=a@p"
    )
    code, out, err = call(cloud, "create", "one", *flags.split(), "--dry_run")
    assert code == 0, err
    assert err == ""
    assert out == (
        "gcloud compute tpus queued-resources create one --zone=z --project=p --node-count=2 "
        "--node-prefix=one --accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5 --spot "
        "--network=n --service-account=a@p\n"
    )
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


def printed_words(cloud, command, *flags):
    """The words of the command that a dry run prints."""
    usual = ["--zone=z", "--type=v4-8", "--node-count=2"]
    code, out, err = call(cloud, command, "one", *usual, *flags, "--dry_run")
    assert code == 0, err
    return set(shlex.split(out))


@pytest.mark.full
def test_the_flags_with_an_effect_are_those_of_the_help(cloud):
    code, out, err = call(cloud, "--help")
    assert code == 0, err
    # The list of flags begins with --zone, at which the text is cut. "dry" is of --dry_run.
    documented = set(re.findall(r"--([a-z-]+)", out.partition("\n  --zone")[2])) - {"dry"}
    assert documented | {"zone"} == EFFECTS.keys() | {"every"}


@pytest.mark.full
@pytest.mark.parametrize("flag", EFFECTS)
def test_each_documented_flag_changes_its_words_of_a_command(cloud, flag):
    command, value, added = EFFECTS[flag]
    before = printed_words(cloud, command)
    after = printed_words(cloud, command, f"--{flag}{value}")
    assert after - before == added


@pytest.mark.full
def test_the_scripts_for_the_hosts_are_valid_shell(cloud):
    code, out, err = call(cloud, "watch", "one", "--zone=z", "--type=v5p-8", "--dry_run", *RUN)
    assert code == 0, err

    # As a shell reads them.
    words = [word for word in shlex.split(out) if word.startswith("--command=")]
    scripts = [word.removeprefix("--command=") for word in words]
    for script in scripts:
        assert not shell.findings(script)
    install, run, _ = scripts  # The last one asks for the state of the run.
    assert 'pip install --quiet "./txl/source[plots,tpu,gcs]"' in install
    assert shlex.split(run.splitlines()[-1])[1:] == RUN[1:]
    assert '--setenv=PYTHONPATH="$HOME/txl/source"' in run
    assert '--working-directory="$HOME"' in run
    assert "--property=LimitMEMLOCK=infinity" in run


WATCH = ["watch", "one", "--zone=z", "--type=v4-8", "--", "python", "-m"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(["install", "one", "--zone=z"], "root of a clone", id="not in a clone"),
        pytest.param(["create", "one", "--zone=z", "--type=v9-8"], "v9-8", id="unknown type"),
        pytest.param(["delete", "one", "--zone=z"], "watch, got 'delete'", id="unknown command"),
        pytest.param(["create", "one", "--zone=z", "--runtime=v2"], "--type", id="no type"),
        pytest.param([*WATCH, "experiments.ptb"], "--workdir=gs://", id="no workdir"),
        pytest.param([*WATCH, "x", "--workdir=runs/one"], "gs://", id="local workdir"),
    ],
)
def test_mistakes_are_named(cloud, words, expected):
    (cloud / "clone" / "setup.cfg").unlink()  # Without it this is not a clone, and is not sent.
    code, out, err = call(cloud, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert expected in err
    assert not (cloud / "gcloud.log").exists()


STEPS = """
# Six steps, in a bucket that all hosts share. Each host counts its own.
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


WATCH_A_RUN = [
    "watch",
    "one",
    "--zone=z",
    "--type=v4-32",
    "--spot",
    "--every=0.05",
    "--",
    "python",
    "-m",
    "experiments.enwik8",
    "--workdir=gs://mine/run",
    "two words",
    "$HOME",
]


def watch(cloud, **environment):
    """Watches a run to its end. Returns the exit code, output and errors."""
    return call(cloud, *WATCH_A_RUN, **environment)


def start_watching(cloud):
    """Starts to watch a run. Returns the process when both hosts run it."""
    watching = start(cloud, *WATCH_A_RUN)
    wait_for(lambda: is_running(cloud), [watching])
    return watching


def finish(watching):
    """Waits for the end of watching. Returns the exit code, output and errors."""
    out, err = watching.communicate(timeout=60)
    return watching.returncode, out, err


@pytest.mark.full
def test_watch_begins_again_after_a_preemption_and_continues_from_the_workdir(cloud):
    """The working tree is sent, except for data, and the run's arguments arrive as they were
    typed.
    """
    program(cloud, f'[ "$4" = "two words" ] && [ "$5" = "\\$HOME" ]\n{STEPS}')

    code, out, err = watch(cloud)

    assert code == 0, out + err
    requests = requests_to_gcloud(cloud)
    assert requests == ["create", "scp", "delete", "create", "scp"], out + err
    run = cloud / "mine" / "run"
    assert (run / "host0").read_text() == "6\n"
    assert (run / "host1").read_text() == "6\n"
    assert (run / "host0.starts").read_text() == "goes on after 0\ngoes on after 3\n"
    assert re.search(r"\bSUSPENDED\b", out)
    assert out.splitlines()[-1].endswith("delete one --zone=z --force")
    source = cloud / "host1" / "txl" / "source"
    assert sorted(path.name for path in source.iterdir()) == [".gitignore", "setup.cfg"]


def notify_of_maintenance(cloud):
    """Host 1 is going to be maintained. The program gets the same notice."""
    (cloud / "host1" / "maintenance").write_text("TERMINATE_ON_HOST_MAINTENANCE\n")
    for host in ("host0", "host1"):
        os.kill(int((cloud / host / "pid").read_text()), signal.SIGTERM)


@pytest.mark.full
def test_watch_waits_while_a_host_is_maintained(cloud):
    """The program saves and exits with 143. Afterwards the host may have rebooted."""
    program(cloud, "trap 'exit 143' TERM\nwhile [ ! -e \"$FAKE/over\" ]; do sleep 0.02; done\n")
    watching = start_watching(cloud)
    log = cloud / "host.log"

    def count(text):
        return log.read_text().count(text)

    # The run is not started before the maintenance is over.
    notify_of_maintenance(cloud)
    n_starts = count("\nsystemd-run ")
    n_polls = count("ExecMainStatus")
    # Four times of both hosts.
    wait_for(lambda: count("ExecMainStatus") > n_polls + 8, [watching])
    assert count("\nsystemd-run ") == n_starts

    for name in ("pid", "status", "maintenance"):  # A reboot.
        (cloud / "host1" / name).unlink()
    (cloud / "over").touch()
    code, out, err = finish(watching)
    assert code == 0, out + err
    assert count("\nsystemd-run ") == n_starts + 2
    assert "maintained" in out


@pytest.mark.full
def test_watch_ends_when_the_run_is_stopped(cloud):
    """Another `watch` continues the run."""
    program(cloud, "trap 'echo saved; exit 143' TERM\nwhile :; do sleep 0.02; done\n")
    watching = start_watching(cloud)

    call_without_error(cloud, "stop", "one", "--zone=z")
    code, _, err = finish(watching)
    assert code == 143, err
    assert "watch" in err
    assert (cloud / "host1" / "journal").read_text() == "saved\n"

    program(cloud, "echo went on\n")
    code, _, err = watch(cloud)
    assert code == 0, err
    assert (cloud / "host1" / "journal").read_text() == "went on\n"
    assert requests_to_gcloud(cloud) == ["create", "scp"]


@pytest.mark.nightly(part="faults")
def test_a_request_that_is_rejected_is_made_again_a_few_times(cloud):
    """Five times at most, one after the other."""
    program(cloud, "echo done\n")
    code, out, err = watch(cloud, FAKE_REFUSALS="2")
    assert code == 0, out + err
    assert err.count("no quota") == 2, out + err

    (cloud / "state").unlink()
    code, out, err = watch(cloud, FAKE_REFUSALS="9")
    assert code == 1, out + err
    assert err.count("no quota") == 5
    assert re.search(r"(?m)^error: .*\b5\b", err)


@pytest.mark.nightly(part="faults")
def test_a_run_that_is_going_on_is_not_started_twice(cloud):
    """After a stop it may be started again."""
    program(cloud, "trap 'exit 143' TERM\nwhile :; do sleep 0.02; done\n")
    call_without_error(cloud, "create", "one", "--zone=z", "--type=v4-8")
    (cloud / "state").write_text("ACTIVE\n")  # The request has been served.
    call_without_error(cloud, "install", "one", "--zone=z")
    call_without_error(cloud, "run", "one", "--zone=z", *RUN)

    code, _, err = call(cloud, "run", "one", "--zone=z", *RUN)
    assert code == 1, err
    assert re.search(r"(?m)^error: .*tpu\.sh stop\b", err)

    call_without_error(cloud, "stop", "one", "--zone=z")
    call_without_error(cloud, "run", "one", "--zone=z", *RUN)
    call_without_error(cloud, "stop", "one", "--zone=z")


@pytest.mark.nightly(part="faults")
@pytest.mark.parametrize("end", ["exit 134", "kill -TERM $$"])
def test_watch_starts_a_run_that_broke_off_again(cloud, end):
    """One host loses the other and is aborted (134, by SIGABRT), a few times. Or somebody else ends
    it, which systemd calls clean. A run that always breaks off is given up at the sixth time.
    """
    starts = '"$HOME/starts"'
    program(cloud, f'echo x >>{starts}\n[ "$(wc -l <{starts})" -ge 3 ] || {end}\nsleep 0.02\n')
    code, out, err = watch(cloud)
    assert code == 0, out + err
    assert (cloud / "host0" / "starts").read_text() == "x\n" * 3

    program(cloud, "exit 134\n")
    code, out, err = watch(cloud)
    assert code == 1, out + err
    assert re.search(r"\b6\b", err), out + err


@pytest.mark.full
def test_a_request_that_is_never_served_is_not_made_again(cloud):
    code, _, err = watch(cloud, FAKE_FIRST_STATE="FAILED")
    assert code == 1, err
    assert "describe one --zone=z" in err
    assert requests_to_gcloud(cloud) == ["create"]


@pytest.mark.nightly(part="faults")
def test_a_host_that_was_replaced_is_installed_again(cloud):
    """One of two hosts comes back empty: the run is stopped on the other, and begins again on
    both.
    """
    program(cloud, 'trap "exit 143" TERM\nwhile [ ! -e "$FAKE/replaced" ]; do sleep 0.02; done\n')
    watching = start_watching(cloud)

    host = cloud / "host1"
    pid = int((host / "pid").read_text())
    host.rename(cloud / "host1-gone")
    host.mkdir()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: (cloud / "gcloud.log").read_text().count(" scp ") == 2, [watching])
    (cloud / "replaced").touch()

    code, out, err = finish(watching)
    assert code == 0, out + err
