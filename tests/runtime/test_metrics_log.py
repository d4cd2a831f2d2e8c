"""Tests what a run writes about itself: whole files or none, no step twice after a resume, valid JSON and events."""

import json
import math
import os
import re
import struct
import time

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from support.full_disk import largest_file
from txl_jax.errors import LogError
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.runtime.storage import write_json, write_lines

# write_json


def test_write_json_replaces_the_whole_file_or_nothing(tmp_path):
    path, another = tmp_path / "config.json", tmp_path / "another"
    for value in ({"a": [1, 2.5, None]}, {"b": "é"}):
        write_json(path, value)
        assert json.loads(path.read_bytes()) == value
    another.touch()
    assert path.stat().st_mode == another.stat().st_mode, "others may read it as they may read any new file"
    for bad, error in (({"a": object()}, TypeError), ({"a": math.nan}, ValueError)):
        with pytest.raises(error):
            write_json(path, bad)
    with largest_file(20_000), pytest.raises(LogError, match=r"config\.json.*File too large"):
        write_json(path, "x" * 100_000)
    assert (json.loads(path.read_bytes()), sorted(os.listdir(tmp_path))) == ({"b": "é"}, ["another", "config.json"])


def test_lines_are_written_as_they_come_and_all_or_none(tmp_path):
    path = tmp_path / "scores.tsv"

    def lines():
        yield "é\n"
        assert os.listdir(tmp_path) == [next(name for name in os.listdir(tmp_path) if name.endswith(".tmp"))]
        yield "b\n"

    write_lines(path, lines())
    assert path.read_text(encoding="utf-8") == "é\nb\n"
    for mistake in (ValueError, KeyboardInterrupt):

        def broken(mistake=mistake):
            yield "new\n"
            raise mistake

        with pytest.raises(mistake):
            write_lines(path, broken())
        assert (path.read_text(encoding="utf-8"), os.listdir(tmp_path)) == ("é\nb\n", ["scores.tsv"])


# Metrics


def log_steps(workdir, steps, **arguments):
    with RunLog(workdir, **arguments) as log:
        for step in steps:
            log.record("train", step, {"loss": step / 4, "tokens": step})


def test_records_come_back_in_order(tmp_path):
    assert read_metrics(tmp_path) == []
    with RunLog(tmp_path / "new" / "run") as log:
        log.record("train", 1, {"loss": np.float32(0.5), "rate": 1e-9})
        log.record("valid", np.int64(1), {"bpc": 2})
        first = read_metrics(tmp_path / "new" / "run")  # Each line is with the system before the next.
    assert first == read_metrics(tmp_path / "new" / "run")
    assert first == [
        {"kind": "train", "step": 1, "loss": 0.5, "rate": 1e-9},
        {"kind": "valid", "step": 1, "bpc": 2},
    ]


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    with RunLog(tmp_path) as log:
        log.record("train", 1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert math.isnan(float(record["a"]))
    assert (float(record["b"]), float(record["c"])) == (math.inf, -math.inf)


def test_names_that_the_record_uses(tmp_path):
    with RunLog(tmp_path) as log:
        for name in ("kind", "step", "member"):
            with pytest.raises(ValueError, match=name):
                log.record("train", 1, {name: 1.0})
    assert read_metrics(tmp_path) == []


def test_resuming_drops_later_steps(tmp_path):
    log_steps(tmp_path, [10, 20, 30, 40])
    log_steps(tmp_path, [30], first_step=20)
    assert [record["step"] for record in read_metrics(tmp_path)] == [10, 20, 30]
    before = (tmp_path / "metrics.jsonl").stat()
    log_steps(tmp_path, [], first_step=30)  # Nothing to drop: the file is left alone.
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    log_steps(tmp_path, [], first_step=0)
    assert read_metrics(tmp_path) == []


def test_what_is_done_again_is_dropped_at_the_first_step_too(tmp_path):
    with RunLog(tmp_path) as log:
        for step in (10, 20):
            for kind in ("train", "valid", "test"):
                log.record(kind, step, {"loss": 1.0})
    with RunLog(tmp_path, first_step=20, redone={"valid", "test"}):
        pass
    found = [(record["kind"], record["step"]) for record in read_metrics(tmp_path)]
    assert found == [("train", 10), ("valid", 10), ("test", 10), ("train", 20)]


@pytest.mark.parametrize("cut", [1, 2, 10])
def test_a_torn_last_line_is_no_record(cut, tmp_path):
    log_steps(tmp_path, [10, 20])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert [record["step"] for record in read_metrics(tmp_path)] == [10]
    log_steps(tmp_path, [30], first_step=20)
    assert [record["step"] for record in read_metrics(tmp_path)] == [10, 30]


def test_a_damaged_line_further_up_is_named_and_kept(tmp_path):
    log_steps(tmp_path, [10, 20, 30])
    path = tmp_path / "metrics.jsonl"
    text = path.read_text().replace('"step": 20', '"st')
    path.write_text(text)
    for act in (lambda: read_metrics(tmp_path), lambda: RunLog(tmp_path, first_step=20)):
        with pytest.raises(LogError, match=r"\b2\b.*metrics\.jsonl"):
            act()
    assert path.read_text() == text


# Lines


def test_print_prints_and_keeps(tmp_path, capsys):
    for first_step, line in ((0, "started"), (5, "resumed é")):
        with RunLog(tmp_path, first_step=first_step) as log:
            log.print(line)
            assert (tmp_path / "log.txt").read_text().splitlines()[-1] == line
            log.close()  # Nothing happens the second time.
    assert capsys.readouterr().out == "started\nresumed é\n"
    assert (tmp_path / "log.txt").read_text() == "started\nresumed é\n"


# TensorBoard


def read_events(folder):
    """Events of all files in the order written: each record is a length, its checksum, the bytes, their checksum."""
    paths = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return [event for path in paths for event in read_events_of(path)]


def read_events_of(path):
    """Events of one file."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_a_resumed_run_adds_a_file_that_hides_the_steps_it_repeats(tmp_path, monkeypatch):
    """TensorBoard reads files in the order of their names, which is that of writing though the clock goes back."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    log_steps(tmp_path, [10, 20, 30])
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    log_steps(tmp_path, [30], first_step=20)
    log_steps(tmp_path, [40], first_step=30)
    paths = sorted((tmp_path / "tensorboard").iterdir())
    events = [event for path in paths for event in read_events_of(path)]
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [1, 21, 31] and len(paths) == 3
    assert [event.step for event in events if event.summary.value] == [10, 20, 30, 30, 40]


# Trouble


def test_a_full_disk_and_a_folder_that_cannot_be_made(tmp_path):
    with RunLog(tmp_path) as log:
        log.record("train", 1, {"loss": 1.0})
        with largest_file(200), pytest.raises(LogError, match=f"{re.escape(str(tmp_path))}.*File too large"):  # noqa: PT012
            for step in range(2, 50):
                log.record("train", step, {"loss": 1.0})
    assert read_metrics(tmp_path)[0] == {"kind": "train", "step": 1, "loss": 1.0}

    (tmp_path / "run").write_text("a file")
    with pytest.raises(LogError, match=r"/run\b.*File exists"):
        RunLog(tmp_path / "run")
