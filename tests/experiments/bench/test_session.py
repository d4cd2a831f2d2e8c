"""Tests of the session on a device: it goes on where it stopped, after failures too."""

import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.bench import chips, session, trace_table
from experiments.bench.session import Plan
from experiments.bench.session_parts import PARTS, Part
from experiments.bench.trace_table import Share
from support import ROOT
from txl_jax.errors import UserError

# Limits are in seconds. `Machine` measures the parts, and not their functions.
FIRST = Part("first", "a first thing", limit=100, measure=None)
SECOND = Part("second", "a second thing", limit=150, measure=None)
THIRD = Part("third", "a third thing", limit=60, measure=None)


class Machine:
    """A clock, and processes that measure parts while it runs."""

    def __init__(self, out):
        self.out = out
        self.now = 0.0
        self.started = []  # Names of parts, in order.
        self.takes = {}  # Seconds by part, or 50.
        self.exit_codes = {}  # By part, or 0.

    def run_alone(self, command, log, limit):
        """Replaces the process of a part: takes its time, and writes its output and its result.

        Returns how it failed, or an empty text.
        """
        [name] = [word.partition("=")[2] for word in command if word.startswith("--inside=")]
        self.started.append(name)
        seconds = self.takes.get(name, 50)
        self.now += min(seconds, limit)
        log.write(f"the output of {name}\n".encode())
        if seconds > limit:
            return f"did not end within its {limit} s"
        code = self.exit_codes.get(name, 0)
        if code != 0:
            return f"failed with exit code {code}"
        table = {"columns": ["time"], "rows": [[f"{name} took {seconds} s"]]}
        result = {"machine": "a chip", "tables": [table], "seconds": seconds}
        folder = self.out
        if "--miniature" in command:
            folder = self.out / "miniature"
        (folder / f"{name}.json").write_text(json.dumps(result))
        return ""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine for three parts, with which the session writes to `tmp_path`."""
    machine = Machine(tmp_path)
    monkeypatch.setattr(session, "PARTS", (FIRST, SECOND, THIRD))
    monkeypatch.setattr(session, "_run_alone", machine.run_alone)
    monkeypatch.setattr(session.time, "monotonic", lambda: machine.now)
    return machine


def start(machine, **settings):
    """Runs the session, and returns its exit code and its page."""
    machine.started.clear()
    settings = {"parts": ("first", "second", "third")} | settings
    code = session.run(Plan(out=str(machine.out), **settings), None)
    folder = machine.out
    if settings.get("miniature"):
        folder = machine.out / "miniature"
    return code, (folder / "session.md").read_text()


def test_a_second_command_measures_what_the_first_one_left(machine, capsys):
    # Of 200 s the first part takes 50, the second may take 150, and then no time is left.
    machine.takes["second"] = 149
    code, page = start(machine, minutes=200 / 60)
    assert machine.started == ["first", "second"]
    assert code == 0
    assert "first took 50 s" in page
    assert "Not measured yet: third" in page
    assert "left      third. Run it again." in capsys.readouterr().out

    code, page = start(machine, minutes=200 / 60)
    assert machine.started == ["third"]
    assert "second took 149 s" in page
    assert "third took 50 s" in page
    assert "Not measured yet" not in page


def test_a_part_that_fits_is_measured_after_one_that_does_not(machine):
    code, page = start(machine, minutes=165 / 60)
    # After the first part 115 s are left: not enough for the second part's 150.
    assert machine.started == ["first", "third"]
    assert code == 0
    assert "Not measured yet: second" in page


def test_failures_and_limits_are_noted_and_the_next_part_begins(machine):
    machine.exit_codes["first"] = 3
    machine.takes["second"] = 151
    code, page = start(machine, minutes=10)
    assert code == 1
    assert machine.started == ["first", "second", "third"]
    assert "It failed with exit code 3." in page
    assert "It did not end within its 150 s." in page
    # The end of its output tells why.
    assert "    the output of first" in page
    assert "third took 50 s" in page


def test_a_failed_part_is_measured_again_only_on_request(machine):
    machine.exit_codes["first"] = 3
    start(machine, parts=("first",))
    del machine.exit_codes["first"]

    start(machine, parts=("first",))
    assert machine.started == []

    code, page = start(machine, parts=("first",), again=True)
    assert machine.started == ["first"]
    assert code == 0
    assert "first took 50 s" in page


def test_results_in_miniature_and_those_of_the_session_keep_apart(machine):
    start(machine, parts=("first",))
    _, page = start(machine, parts=("first",), miniature=True)
    assert machine.started == ["first"]
    assert "In miniature" in page

    _, page = start(machine, parts=("first",))
    assert machine.started == []
    assert "In miniature" not in page


def test_a_corrupted_result_is_measured_again(machine):
    start(machine, parts=("first",))
    (machine.out / "first.json").write_text('{"tables": [')
    start(machine, parts=("first",))
    assert machine.started == ["first"]


def test_the_least_time_is_enough_for_a_part(machine):
    start(machine, parts=("first",), minutes=100 / 60)
    assert machine.started == ["first"]


def test_less_time_than_a_part_needs_is_an_error():
    """Of the real parts, the longest has a limit of 100 s, and peaks one of 45 s."""
    Plan(minutes=100 / 60).validate()
    with pytest.raises(UserError, match="minutes"):
        Plan(minutes=1).validate()
    Plan(minutes=1, parts=("peaks",)).validate()


def is_running(process):
    """Returns whether a process is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_part_that_hangs_leaves_no_process(tmp_path):
    # The part starts a process of its own, writes its number, and waits for it.
    program = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '600']); "
        "print(child.pid, flush=True); child.wait()"
    )
    with open(tmp_path / "log", "wb") as log:
        # Without site-packages, Python starts within the limit on a busy machine too.
        failure = session._run_alone([sys.executable, "-I", "-S", "-c", program], log, limit=3)
    assert failure == "did not end within its 3 s"

    # The kernel ends a killed process a moment later, and it stays as a zombie until the process
    # that has inherited it notices.
    child = int((tmp_path / "log").read_text())
    end = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_all_parts_fit_two_commands_of_five_minutes_if_they_take_half_of_their_limits():
    """In the last seconds of a command, no part begins whose limit is longer."""
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    limits = [part.limit for part in PARTS]
    assert sum(limits) / 2 <= 600 - max(limits)
    assert max(limits) <= 120


@pytest.mark.full
def test_without_its_device_each_part_fails_by_itself(tmp_path):
    command = [sys.executable, "-m", "experiments.bench.session", "--parts=peaks,step_12l"]
    command += ["--miniature", f"--out={tmp_path}"]
    # There is no GPU, or no plugin for it, so JAX cannot start.
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    page = (tmp_path / "miniature/session.md").read_text()
    assert page.count("It failed with exit code 1.") == 2
    assert "JAX_PLATFORMS is cuda" in page


@pytest.mark.full
def test_a_step_in_miniature_has_its_time_bytes_and_lines_of_code(tmp_path):
    command = [sys.executable, "-m", "experiments.bench.session", "--parts=step"]
    command += ["--miniature", f"--out={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True)
    result = json.loads((tmp_path / "miniature/step.json").read_text())
    model, times, memory, trace = result["tables"]
    # Rows and tokens of a segment.
    assert model["rows"][0][model["columns"].index("sizes")] == "2 x 96"
    assert float(times["rows"][0][0].removesuffix(" ms")) > 0
    assert memory["rows"][0][0].endswith(" s")
    # Attention is computed in every step, whichever path it takes.
    assert any("ops/attention" in line for line, *_ in trace["rows"])


# The table of a trace


def event(name, start, duration, instruction=None):
    """Returns an event of a trace, as `jax.profiler.ProfileData` has it."""
    stats = []
    if instruction is not None:
        stats.append(("hlo_op", instruction))
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=stats)


def shares_of(line_name, events):
    """Returns own time in nanoseconds and number of events by name, on a line of a trace.

    An event's own time is the time in which no event within it runs.
    """
    shares = collections.defaultdict(Share)
    line = SimpleNamespace(name=line_name, events=events)
    trace_table._add_own_times(trace_table._events_of(line), shares)
    return {name: (round(share.seconds * 1e9), share.events) for name, share in shares.items()}


def test_a_loop_has_only_the_time_that_its_instructions_do_not_have():
    events = [
        event("dot.1", 10, 30, "dot.1"),
        event("while", 0, 100, "while.5"),
        event("dot.1", 50, 30, "dot.1"),
        event("add.2", 100, 5, "add.2"),  # It begins when the loop ends.
        event("a thread waits", 0, 1000),  # It is not an instruction.
    ]
    assert shares_of("a stream", events) == {"while.5": (40, 1), "dot.1": (60, 2), "add.2": (5, 1)}


def test_on_tpus_an_events_name_is_its_instruction():
    events = [event("%fusion.3 = bf16[8] fusion(%a), kind=kLoop", 0, 7)]
    assert shares_of("XLA Ops", events) == {"fusion.3": (7, 1)}
    assert shares_of("Steps", events) == {}


def test_instructions_of_one_line_of_code_are_added_up():
    shares = {"dot.1": Share(2.0, 1), "dot.2": Share(3.0, 2), "copy.7": Share(4.0, 3)}
    shares["copy.8"] = Share(4.5, 1)
    # Copies have no line of code, and are added up by their kind. The longest time comes first.
    by_source = trace_table.shares_by_source(shares, {"dot.1": "a.py:1", "dot.2": "a.py:1"})
    assert by_source == [("copy", Share(8.5, 4)), ("a.py:1", Share(5.0, 3))]


def test_peaks_are_those_of_the_longest_name_in_the_devices_name():
    assert chips.peaks_of("TPU v5 lite").hbm_bytes == 819e9
    assert chips.peaks_of("TPU v5").hbm_bytes == 2765e9
    assert chips.peaks_of("NVIDIA H200").flops == 989e12
    assert chips.peaks_of("TPU v5p") == chips.peaks_of("TPU v5")
    assert chips.peaks_of("cpu") is None
    # It has less memory, slower, and fewer multiprocessors than the modules in the table.
    assert chips.peaks_of("NVIDIA H100 PCIe") is None
    assert chips.peaks_of("NVIDIA GeForce RTX 4090").hbm_bytes == 1008e9
    assert chips.peaks_of("NVIDIA GeForce RTX 4090 Laptop GPU") is None
