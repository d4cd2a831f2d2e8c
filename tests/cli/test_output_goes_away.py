"""Tests commands whose output or terminal goes away while they work: no step is lost, and commands
whose results nobody reads exit with 141.

The exit code after a signal is 128 + its number: 129 for SIGHUP, 130 for SIGINT (Ctrl-C), and 141
for SIGPIPE.
"""

import json
import os
import signal
import subprocess
import time

import pytest

from support import ON_PATH, ROOT, processes, programs
from txl_jax.runtime.checkpoint import find_damage, find_steps
from txl_jax.runtime.log import read_metrics

pytestmark = pytest.mark.full

SECONDS = 120  # Longer is a hang.
ENDLESS = [*programs.TINY, *programs.steps(100_000, every=100_000), "--train.log_every=2"]
SHORT = [*programs.TINY, *programs.steps(20, every=10), "--train.log_every=2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = programs.write_words(tmp_path_factory.mktemp("text"), 3_000)
    return [f"--data.file={path}", f"--cache_dir={path.parent}"]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    # Names with a space, and with brackets that are a pattern for `glob`.
    workdir = tmp_path_factory.mktemp("run [best]") / "lr[0.1]"
    code, _, err = programs.run("experiments.text", *SHORT, *text, f"--workdir={workdir}")
    assert code == 0, err
    return workdir


def start(module, *words, before=(), **how):
    """Starts a command.

    `before` has the words of another program, which replaces itself by the command.
    """
    environment = os.environ | ON_PATH | {"JAX_PLATFORMS": "cpu", "NO_GCE_CHECK": "true"}
    return subprocess.Popen(
        [*before, *programs.command(module, *words)], cwd=ROOT, env=environment, **how
    )


def closed_pipe():
    """Returns the end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def wait_for_steps(workdir, process):
    """Waits for the first metrics of a run in another process."""
    until = time.monotonic() + SECONDS
    while not read_metrics(workdir):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)


def assert_saved(workdir):
    """Checks that the latest step is complete, and the last one of the metrics and of the log."""
    step, folder = find_steps(workdir / "checkpoints" / "latest")[0]
    assert find_damage(folder) is None
    assert step >= read_metrics(workdir)[-1]["step"] > 0
    assert f"stopped   at step {step}" in (workdir / "log.txt").read_text()


@pytest.mark.parametrize("both", [False, True], ids=["output", "output and errors"])
def test_a_run_continues_if_nobody_reads_its_output(text, tmp_path, both):
    writer = closed_pipe()
    errors = subprocess.PIPE
    if both:
        errors = writer
    flags = [
        *SHORT,
        *text,
        f"--workdir={tmp_path}",
        "--train.sample_every=10",
        "--generate.length=20",
    ]
    process = start("experiments.text", *flags, stdout=writer, stderr=errors)
    os.close(writer)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err or b"") == (0, b"")
    assert json.loads((tmp_path / "results.json").read_text())["steps"] == 20


def test_ctrl_c_with_tee_saves(text, tmp_path):
    """In `command | tee log`, Ctrl-C ends tee as well, so the pipe has no reader any more."""
    reader, writer = os.pipe()
    process = start(
        "experiments.text", *ENDLESS, *text, f"--workdir={tmp_path}", stdout=writer, stderr=writer
    )
    os.close(writer)
    wait_for_steps(tmp_path, process)
    os.close(reader)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=SECONDS) == 130
    assert_saved(tmp_path)


def test_a_terminal_that_is_closed_stops_and_saves(text, tmp_path):
    """The system sends SIGHUP to the session's first process.

    From then on, every write to the terminal fails.
    """
    master, terminal = os.openpty()
    with processes.that_notice_hangups():
        process = start(
            "experiments.text",
            *(*ENDLESS, *text, f"--workdir={tmp_path}"),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            before=["setsid", "--ctty"],  # A session of its own, whose terminal it is.
        )
    os.close(terminal)
    wait_for_steps(tmp_path, process)
    os.close(master)
    assert process.wait(timeout=SECONDS) == 129
    assert_saved(tmp_path)


def test_nohup_lets_a_run_finish(text, tmp_path):
    flags = [*SHORT, "--train.steps=60", *text, f"--workdir={tmp_path}"]
    with open(tmp_path / "nohup.out", "wb") as log:
        process = start("experiments.text", *flags, before=["nohup"], stdout=log, stderr=log)
        wait_for_steps(tmp_path, process)
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=SECONDS) == 0
    assert json.loads((tmp_path / "results.json").read_text())["steps"] == 60


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_needs_neither_stream(text, tmp_path, stream):
    """After `>&-` or `2>&-`, a file of the run must not get the number of the closed stream."""
    closing = {"stdout": "exec 1>&-", "stderr": "exec 2>&-"}[stream]
    process = start(
        "experiments.text",
        *(*SHORT, *text, f"--workdir={tmp_path}"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        before=["bash", "-c", f'{closing}; exec "$@"', "bash"],
    )
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, (out, err)
    assert (tmp_path / "results.json").exists()
    [(step, folder)] = find_steps(tmp_path / "checkpoints" / "latest")[:1]
    assert step == 20
    assert find_damage(folder) is None


# RUN is a trained run, and OUT an empty directory.
COMMANDS = {
    "generate": "experiments.text --mode=generate --generate.length=30 --workdir=RUN --out=OUT",
    "eval": "experiments.text --mode=eval --workdir=RUN --out=OUT",
    "score": "experiments.text --mode=score --input=OUT/input --workdir=RUN",
    "report": "experiments.report RUN",
    "sweep": "launch.sweep --table RUN",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_result_that_nobody_reads_ends_quietly_with_141(trained, tmp_path, name):
    (tmp_path / "input").write_text("one two three\n")
    words = []
    for word in COMMANDS[name].split():
        words.append(word.replace("RUN", str(trained)).replace("OUT", str(tmp_path)))

    writer = closed_pipe()
    process = start(*words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    _, err = process.communicate(timeout=SECONDS)

    assert process.returncode == 141
    # Neither "Broken pipe" nor "broken pipe".
    assert "roken" not in err, err
    assert "Traceback" not in err, err
    if name == "eval":
        assert (tmp_path / "evaluation.json").exists()
    if name == "generate":
        assert (tmp_path / "sample-seed0.txt").exists()


def test_a_full_disk_behind_standard_output_is_an_error(trained):
    with open("/dev/full", "wb") as full:
        process = start(
            "experiments.report", trained, stdout=full, stderr=subprocess.PIPE, text=True
        )
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err.startswith("error: ")
    assert "No space left" in err
    assert err.count("\n") == 1


def test_what_a_stranger_wrote_into_a_run_cannot_act_on_the_terminal(trained, tmp_path):
    """The description of the text, which several commands print, has a sequence that clears the
    screen and a line that looks like an error. Both are printed as escapes.
    """
    config = json.loads((trained / "config.json").read_text())
    config["text"]["description"] = "a book\x1b[2J\nerror: none"
    run = tmp_path / "run"
    run.mkdir()
    for name in os.listdir(trained):
        if name != "config.json":
            (run / name).symlink_to(trained / name)
    (run / "config.json").write_text(json.dumps(config))

    printed = ""
    for words in (
        ["experiments.convert", f"--from={run}", f"--to={tmp_path}/converted"],
        ["experiments.text", "--mode=eval", f"--workdir={run}", f"--out={tmp_path}"],
        ["experiments.report", run],
    ):
        code, out, err = programs.run(*words)
        assert code == 0, (words, err)
        printed += out + err

    assert r"a book\x1b[2J\nerror: none" in printed
    assert "\x1b" not in printed
    assert "\nerror: none" not in printed
