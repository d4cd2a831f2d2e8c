"""Tests tpu.sh watch: preemptions, maintenance, stops, hosts that are replaced, and runs that break off."""

import os
import re
import signal

import pytest

from support.fake_cloud import RUN, asked_of_gcloud, call, is_running, program, start, wait_until

STEPS = """
folder=$FAKE/${3#--workdir=gs://} # Six steps, in a bucket that all hosts share; each host counts its own.
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
    run = ["--", "python", "-m", "experiments.enwik8", "--workdir=gs://mine/run", "two words", "$HOME"]
    return (call if wait else start)(cloud, *words, "--every=0.05", *more, *run, **environment)


@pytest.mark.full
def test_watch_begins_again_after_a_preemption_and_goes_on_from_the_workdir(cloud):
    program(cloud, f'[ "$4" = "two words" ] && [ "$5" = "\\$HOME" ]\n{STEPS}')
    code, out, err = watch(cloud)
    assert code == 0, out + err
    assert asked_of_gcloud(cloud) == ["create", "scp", "delete", "create", "scp"], out + err
    for host in ("host0", "host1"):
        assert (cloud / "mine" / "run" / host).read_text() == "6\n"
    assert (cloud / "mine" / "run" / "host0.starts").read_text() == "goes on after 0\ngoes on after 3\n"
    assert re.search(r"\bSUSPENDED\b", out) and out.splitlines()[-1].endswith("delete one --zone=z")
    source = cloud / "host1" / "txl" / "source"
    assert sorted(path.name for path in source.iterdir()) == [".gitignore", "setup.cfg"], (
        "the working tree, but for data"
    )


@pytest.mark.full
def test_watch_waits_while_a_host_is_maintained(cloud):
    """The program has the same notice, saves and exits with 143; afterwards the host may have rebooted."""
    program(cloud, "trap 'exit 143' TERM\nwhile [ ! -e \"$FAKE/over\" ]; do sleep 0.02; done\n")
    watching = watch(cloud, wait=False)
    wait_until(lambda: is_running(cloud), watching)
    (cloud / "host1" / "maintenance").write_text("TERMINATE_ON_HOST_MAINTENANCE\n")
    for host in ("host0", "host1"):
        os.kill(int((cloud / host / "pid").read_text()), signal.SIGTERM)
    log = cloud / "host.log"
    begins = log.read_text().count("\nsystemd-run ")
    polls = log.read_text().count("ExecMainStatus")
    wait_until(lambda: log.read_text().count("ExecMainStatus") > polls + 8, watching)
    assert log.read_text().count("\nsystemd-run ") == begins, "it is not started before the maintenance is over"
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
    wait_until(lambda: is_running(cloud), watching)
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
def test_a_run_that_somebody_else_ends_is_not_taken_for_finished(cloud):
    """Systemd calls an end by SIGTERM a clean one."""
    program(cloud, 'echo x >>"$HOME/starts"\n[ "$(wc -l <"$HOME/starts")" -ge 2 ] || kill -TERM $$\nsleep 0.02\n')
    code, out, err = watch(cloud)
    assert code == 0, out + err
    assert (cloud / "host0" / "starts").read_text() == "x\n" * 2, out + err


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
    assert call(cloud, "wait", "one", "--zone=z", "--every=0.05")[0] == 0
    assert call(cloud, "install", "one", "--zone=z")[0] == 0
    assert call(cloud, "run", "one", "--zone=z", *RUN)[0] == 0
    code, out, _ = call(cloud, "status", "one", "--zone=z")
    assert code == 0 and out.splitlines() == ["one ACTIVE", *["run running 0 installed wanted NONE"] * 2]
    code, _, err = call(cloud, "run", "one", "--zone=z", *RUN)
    assert code == 1 and re.search(r"(?m)^error: .*tpu\.sh stop\b", err)
    assert call(cloud, "stop", "one", "--zone=z")[0] == 0
    assert call(cloud, "run", "one", "--zone=z", *RUN)[0] == 0, "after a stop it may be started again"
    assert call(cloud, "stop", "one", "--zone=z")[0] == 0


@pytest.mark.nightly(part="faults")
def test_watch_starts_a_run_that_broke_off_again(cloud):
    """One host loses the other and is aborted, a few times."""
    program(cloud, 'echo x >>"$HOME/starts"\n[ "$(wc -l <"$HOME/starts")" -ge 3 ] || exit 134\n')
    code, out, err = watch(cloud)
    assert code == 0, err
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
    """One of two hosts comes back empty: the run is stopped on the other, and begins again on both."""
    program(cloud, 'trap "exit 143" TERM\nwhile [ ! -e "$FAKE/replaced" ]; do sleep 0.02; done\n')
    watching = watch(cloud, wait=False)
    wait_until(lambda: is_running(cloud), watching)
    pid = int((cloud / "host1" / "pid").read_text())
    (cloud / "host1").rename(cloud / "host1-gone")
    (cloud / "host1").mkdir()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (cloud / "gcloud.log").read_text().count(" scp ") == 2, watching)
    (cloud / "replaced").touch()
    out, err = watching.communicate(timeout=60)
    assert watching.returncode == 0, out + err
