"""Tests what a run writes about itself: its origin, no step twice after a resume, valid JSON,
events, sinks.
"""

import contextlib
import math
import os
import shlex
import struct
import subprocess
import sys
import threading
import time
from datetime import datetime
from unittest import mock

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from support import ROOT
from support.full_disk import largest_file
from support.runs import log_lines, numbers
from txl_jax.errors import LogError, UserError
from txl_jax.runtime import appended_text, environment
from txl_jax.runtime import storage as files
from txl_jax.runtime.appended_text import read_appended, replace_appended
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.runtime.sinks import Sink, WeightsAndBiases


def log_steps(workdir, steps, first_step=0):
    with RunLog(workdir).open(first_step) as log:
        for step in steps:
            log.record("train", step, {"loss": step / 4, "tokens": step})


def steps_of(workdir):
    return [record["step"] for record in read_metrics(workdir)]


def test_records_come_back_in_order(tmp_path):
    assert read_metrics(tmp_path) == []
    with RunLog(tmp_path / "new" / "run").open() as log:
        log.record("train", 1, {"loss": np.float32(0.5), "rate": 1e-9})
        # JSON cannot hold these.
        log.record("valid", np.int64(1), {"bpc": 2, "a": math.nan, "b": -math.inf})
        # Each line is with the system before the next.
        first = read_metrics(tmp_path / "new" / "run")
        with pytest.raises(ValueError, match=r"kind.*member.*step"):
            log.record("train", 1, {"kind": 1.0, "step": 1.0, "member": 1.0})
    assert first == read_metrics(tmp_path / "new" / "run")
    valid = {"kind": "valid", "step": 1, "bpc": 2, "a": "nan", "b": "-inf"}
    assert numbers(tmp_path / "new" / "run") == [
        {"kind": "train", "step": 1, "loss": 0.5, "rate": 1e-9},
        valid,
    ]
    assert all(
        abs(time.time() - datetime.fromisoformat(record["time"]).timestamp()) < 100
        for record in first
    )
    assert read_metrics(tmp_path / "new" / "run" / "metrics.jsonl") == first, "the file itself"


def test_resuming_drops_later_steps(tmp_path):
    log_steps(tmp_path, [10, 20, 30, 40])
    log_steps(tmp_path, [30], first_step=20)
    assert steps_of(tmp_path) == [10, 20, 30]
    before = (tmp_path / "metrics.jsonl").stat()
    log_steps(tmp_path, [], first_step=30)  # Nothing to drop: the file is left alone.
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)

    with RunLog(tmp_path).open() as log:  # What is done again is dropped at the first step too.
        for kind, step in (("valid", 10), ("train", 20), ("valid", 20), ("test", 20)):
            log.record(kind, step, {"loss": 1.0})
    with RunLog(tmp_path).open(20, redone={"valid", "test"}):
        pass
    assert [(record["kind"], record["step"]) for record in read_metrics(tmp_path)] == [
        ("valid", 10),
        ("train", 20),
    ]


@pytest.mark.parametrize("cut", [1, 2, 10])
def test_a_torn_last_line_is_no_record(cut, tmp_path):
    log_steps(tmp_path, [10, 20])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps_of(tmp_path) == [10]
    log_steps(tmp_path, [30], first_step=20)
    assert steps_of(tmp_path) == [10, 30]


def test_a_damaged_line_further_up_is_named_and_kept(tmp_path):
    log_steps(tmp_path, [10, 20, 30])
    path = tmp_path / "metrics.jsonl"
    text = path.read_text().replace('"step": 20', '"st')
    path.write_text(text)
    for act in (lambda: read_metrics(tmp_path), RunLog(tmp_path).open):
        with pytest.raises(LogError, match=r"\b2\b.*metrics\.jsonl"):
            act()
    assert path.read_text() == text


# Lines


def test_lines_wait_until_the_log_is_open(tmp_path, capsys):
    log = RunLog(tmp_path)
    log.print("early")
    log.note("a remark")
    assert capsys.readouterr().out == "" and os.listdir(tmp_path) == []
    with log.open(header=["header"], opening=["opening"]):
        log.print("late\nand later")
        log.print("a detail", show=False)
    log.print("after")
    printed = ["opening", "early", "note      a remark", "late", "and later"]
    assert capsys.readouterr().out.splitlines() == [*printed, "after"]
    with RunLog(tmp_path).open(5) as log:
        log.print("resumed é")
        assert log_lines(tmp_path / "log.txt") == ["header", *printed, "a detail", "resumed é"]
        log.close()  # Nothing happens the second time.


# TensorBoard


def read_events(folder):
    """Events of all files in the order written: each record is a length, its checksum, the bytes,
    their checksum.
    """
    events = []
    for data in (path.read_bytes() for path in sorted(folder.iterdir())):
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_a_resumed_run_adds_a_file_that_hides_the_steps_it_repeats(tmp_path, monkeypatch):
    """TensorBoard reads files in the order of their names, which is that of writing though the
    clock goes back.
    """
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    log_steps(tmp_path, [10, 20, 30])
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    log_steps(tmp_path, [30], first_step=20)
    log_steps(tmp_path, [40], first_step=30)
    events = read_events(tmp_path / "tensorboard")
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [1, 21, 31] and len(os.listdir(tmp_path / "tensorboard")) == 3
    assert [event.step for event in events if event.summary.value] == [10, 20, 30, 30, 40]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """What a full disk does to a run is in tests/faults/test_disk_and_clock.py."""
    (tmp_path / "run").write_text("a file")
    with pytest.raises(LogError, match=r"/run\b.*File exists"):
        RunLog(tmp_path / "run").open()


@pytest.fixture
def full_log(tmp_path):
    """An open log whose log.txt may not grow.

    Closing it tries again to write a line that could not be written.
    """
    (tmp_path / "log.txt").write_bytes(bytes(20_000))
    with largest_file(20_000):
        log = RunLog(tmp_path).open()
        yield log
        with contextlib.suppress(LogError):
            log.close()


def test_an_error_of_closing_does_not_hide_the_one_that_ended_the_block(full_log, capsys):
    with pytest.raises(LogError, match=r"/log\.txt \(File too large\)"), full_log:
        full_log.print("a line", show=False)
    assert capsys.readouterr().out.count("File too large") == 1, "it is printed"


def test_an_error_of_closing_alone_is_raised(full_log):
    with pytest.raises(LogError, match="File too large"), full_log, contextlib.suppress(LogError):
        full_log.print("a line", show=False)


# A text in a bucket


def append(path, *lines):
    with RunLog(os.path.dirname(path)).open() as log:
        for line in lines:
            log.print(line)
            log.seal()
            log.seal()  # Nothing new: no part.


def parts(path):
    return files.names(f"{path}.parts")


@pytest.mark.full
def test_parts_are_joined_in_order_and_a_replaced_text_counts_as_a_whole(bucket, storage):
    path = bucket / "log.txt"
    with pytest.raises(FileNotFoundError):
        read_appended(path)
    append(path, *map(str, range(12)))
    append(path, "more")
    assert log_lines(read_appended(path)) == [*map(str, range(12)), "more"]
    assert parts(path) == [f"{number:06}" for number in range(1, 14)]
    replace_appended(path, ["new ", "text "])
    assert (read_appended(path), parts(path)) == (b"new text ", ["000014.all"])
    files.write(f"{path}.parts/000013", b"of a removal that was killed")
    append(path, "end")
    text = read_appended(path)
    assert text.startswith(b"new text 2") and text.endswith(b"  end\n")
    assert parts(path) == ["000013", "000014.all", "000015"]
    storage.refuse("POST /upload")
    with pytest.raises(LogError, match="permission"):
        replace_appended(path, ["lost"])
    assert read_appended(path) == text


@pytest.mark.full
def test_readers_see_what_is_not_sealed_after_a_while(bucket, monkeypatch):
    monkeypatch.setattr(appended_text, "SECONDS_BETWEEN_UPLOADS", 0.0)
    with RunLog(bucket).open() as log:
        for text in ("one", "two"):
            log.print(text)
            log._texts.wait()
            assert read_appended(bucket / "log.txt").endswith(f"{text}\n".encode())
        assert parts(bucket / "log.txt") == ["000001"]


@pytest.mark.full
def test_a_checkpoint_waits_for_uploads_and_a_step_does_not(bucket, monkeypatch):
    """Otherwise a kill after the checkpoint would lose records that nobody makes again."""
    write, go_on, sealed = files.write, threading.Event(), threading.Event()
    monkeypatch.setattr(files, "write", lambda *given: go_on.wait(20) and write(*given))
    monkeypatch.setattr(appended_text, "SECONDS_BETWEEN_UPLOADS", 0.0)
    with RunLog(bucket).open() as log:
        for step in (1, 2):
            log.record("train", step, {"loss": 1.0})
        assert steps_of(bucket) == [], "the steps go on while the first record is uploaded"
        sealing = threading.Thread(target=lambda: (log.seal(), sealed.set()))
        sealing.start()
        assert not sealed.wait(0.2)
        go_on.set()
        sealing.join()
        assert sealed.is_set() and steps_of(bucket) == [1, 2]


# Sinks


SETTINGS = {"model.n_layer": 3, "train.same_length": True, "model.cutoffs": [1, 2], "a": None}
RECORDS = [
    ("train", 10, {"loss": 2.0, "tokens_per_second": 900.0}, None),
    ("train", 20, {"loss": 1.5, "tokens_per_second": 800.0}, None),
    ("valid", 20, {"loss": math.inf}, "seed=2"),
]


def report_all(log):
    log.settings(SETTINGS)
    for kind, step, values, member in RECORDS:
        log.record(kind, step, values, member=member)
    log.text(20, "sample", "a b\n*c*")
    log.seal()


@pytest.mark.parametrize("fails", ["settings", "record", "close"])
def test_a_sink_that_fails_is_reported_once_and_left_out(fails, tmp_path, capsys):
    """A sound one gets everything in order."""
    broken, sound = mock.Mock(spec=Sink), mock.Mock(spec=Sink)
    getattr(broken, fails).side_effect = ConnectionError("the network is down\nwith details")
    with RunLog(tmp_path, sinks=[broken, sound]).open() as log:
        report_all(log)
        log.record("train", 30, {"loss": 1.0})
    assert getattr(broken, fails).call_count == 1
    assert broken.mock_calls[-1] == mock.call.close()  # It may hold a connection.
    assert sound.mock_calls == [
        mock.call.settings(SETTINGS),
        *(mock.call.record(*record) for record in RECORDS),
        mock.call.text(20, "sample", "a b\n*c*"),
        mock.call.flush(),
        mock.call.record("train", 30, {"loss": 1.0}, None),
        mock.call.flush(),
        mock.call.close(),
    ]
    assert [record["step"] for record in read_metrics(tmp_path)] == [10, 20, 20, 30]
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert "Mock" in line and "ConnectionError: the network is down)" in line
    if fails != "close":  # The log is open until then.
        assert line in log_lines(tmp_path / "log.txt")


# TensorBoard


def test_tensorboard_gets_scalars_texts_and_the_table_of_settings(tmp_path):
    """Settings by name, in the types that its plugin can sort and filter by."""
    with RunLog(tmp_path).open() as log:
        report_all(log)
    events = [
        (event.step, value)
        for event in read_events(tmp_path / "tensorboard")
        for value in event.summary.value
    ]
    values = {(step, value.tag): value for step, value in events}
    scalars = {
        place: value.simple_value
        for place, value in values.items()
        if value.HasField("simple_value")
    }
    assert (scalars[10, "train/loss"], scalars[20, "train/loss"]) == (2, 1.5)
    assert (
        scalars[10, "speed/tokens_per_second"] == 900
        and scalars[20, "seed_2/valid/loss"] == math.inf
    )
    assert values[20, "sample/text_summary"].tensor.string_val == [b"    a b\n    *c*\n"]
    tags = {tag: value for (_, tag), value in values.items()}
    assert b"| model.n_layer | 3 |" in tags["settings/text_summary"].tensor.string_val[0]
    start = HParamsPluginData.FromString(
        tags["_hparams_/session_start_info"].metadata.plugin_data.content
    )
    found = start.session_start_info.hparams
    assert (
        found["model.n_layer"].number_value == 3 and found["train.same_length"].bool_value is True
    )
    assert found["model.cutoffs"].string_value == "[1, 2]"


# Weights & Biases


def test_without_wandb_the_project_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"'mine'.*wandb is not installed.*txl_jax\[wandb\]"):
        WeightsAndBiases("mine", tmp_path)


@pytest.mark.full
def test_wandb_offline_takes_settings_records_and_texts(tmp_path, monkeypatch):
    """Both starts of a run are one run of the project."""
    import wandb

    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    logged, take = [], wandb.Run.log
    monkeypatch.setattr(
        wandb.Run, "log", lambda run, row: logged.append((run.id, row)) or take(run, row)
    )
    workdir = tmp_path / "my-run"
    for first_step in (0, 20):
        sink = WeightsAndBiases("project", workdir)
        with RunLog(workdir, sinks=[sink]).open(first_step) as log:
            report_all(log)
            assert (sink._run.project, sink._run.name) == ("project", "my-run")
            assert sink._run.config["model.n_layer"] == 3 and sink._run.config["model.cutoffs"] == [
                1,
                2,
            ]
    assert (
        len({run_id for run_id, _ in logged}) == 1
        and len([*workdir.glob("wandb/offline-run-*/*.wandb")]) == 2
    )
    losses = [(row["step"], row["train/loss"]) for _, row in logged if "train/loss" in row]
    assert losses == [(10, 2.0), (20, 1.5)] * 2
    assert any("sample" in row for _, row in logged) and any(
        "seed=2/valid/loss" in row for _, row in logged
    )
    assert "failed" not in (workdir / "log.txt").read_text()


# Where a run comes from


def test_the_command_line_has_no_secrets_and_git_may_be_missing(monkeypatch):
    secrets = ["--api_key=a b", "--data.hf_token=a b", "-password=a\nb"]
    monkeypatch.setattr(
        sys,
        "orig_argv",
        ["python", "-m", "program", *secrets, "--file=a b", "--data.tokenizer.kind=word"],
    )
    command, versions = environment.origin()
    shown = [
        "--api_key=...",
        "--data.hf_token=...",
        "-password=...",
        "--file=a b",
        "--data.tokenizer.kind=word",
    ]
    assert shlex.split(command)[1:] == ["python", "-m", "program", *shown]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert not commit or versions.endswith(f", commit {commit}")
    monkeypatch.setenv("PATH", "/nowhere")
    assert (
        "commit" not in environment.origin()[1]
        and f"txl_jax {environment.__version__}" in environment.origin()[1]
    )
