"""Tests what a run writes about itself: records, lines, events, sinks, its origin, and no step
twice after a resume.
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
    workdir = tmp_path / "new" / "run"

    with RunLog(workdir).open() as log:
        log.record("train", 1, {"loss": np.float32(0.5), "rate": 1e-9})
        # JSON has no nan and no infinity.
        log.record("valid", np.int64(1), {"bpc": 2, "a": math.nan, "b": -math.inf})
        while_open = read_metrics(workdir)
        with pytest.raises(ValueError, match=r"kind.*member.*step"):
            log.record("train", 1, {"kind": 1.0, "step": 1.0, "member": 1.0})

    records = read_metrics(workdir)
    assert while_open == records, "each line is with the system before the next"
    assert read_metrics(workdir / "metrics.jsonl") == records, "the file itself"
    assert numbers(workdir) == [
        {"kind": "train", "step": 1, "loss": 0.5, "rate": 1e-9},
        {"kind": "valid", "step": 1, "bpc": 2, "a": "nan", "b": "-inf"},
    ]
    for record in records:
        recorded = datetime.fromisoformat(record["time"]).timestamp()
        assert abs(time.time() - recorded) < 100, "the time of writing"


def test_resuming_drops_later_steps(tmp_path):
    log_steps(tmp_path, [10, 20, 30, 40])
    log_steps(tmp_path, [30], first_step=20)
    assert steps_of(tmp_path) == [10, 20, 30]
    before = (tmp_path / "metrics.jsonl").stat()
    log_steps(tmp_path, [], first_step=30)  # With nothing to drop, the file stays.
    after = (tmp_path / "metrics.jsonl").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_resuming_drops_the_evaluations_of_its_first_step_that_are_done_again(tmp_path):
    with RunLog(tmp_path).open() as log:
        for kind, step in (("valid", 10), ("train", 20), ("valid", 20), ("test", 20)):
            log.record(kind, step, {"loss": 1.0})
    with RunLog(tmp_path).open(20, redone={"valid", "test"}):
        pass
    kept = [(record["kind"], record["step"]) for record in read_metrics(tmp_path)]
    assert kept == [("valid", 10), ("train", 20)]


# Bytes that the last line lacks: its end, the closing brace too, or some of its values.
@pytest.mark.parametrize("cut", [1, 2, 10])
def test_a_torn_last_line_is_not_a_record(cut, tmp_path):
    log_steps(tmp_path, [10, 20])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps_of(tmp_path) == [10]
    log_steps(tmp_path, [30], first_step=20)
    assert steps_of(tmp_path) == [10, 30]


def test_a_corrupted_line_further_up_is_named_and_kept(tmp_path):
    log_steps(tmp_path, [10, 20, 30])
    path = tmp_path / "metrics.jsonl"
    text = path.read_text().replace('"step": 20', '"st')
    path.write_text(text)
    # The second line.
    with pytest.raises(LogError, match=r"\b2\b.*metrics\.jsonl"):
        read_metrics(tmp_path)
    with pytest.raises(LogError, match=r"\b2\b.*metrics\.jsonl"):
        RunLog(tmp_path).open()
    assert path.read_text() == text


# Lines


def test_lines_wait_until_the_log_is_open(tmp_path, capsys):
    log = RunLog(tmp_path)
    log.print("early")
    log.note("a remark")
    assert capsys.readouterr().out == ""
    assert os.listdir(tmp_path) == []

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
    """The events of all files in the order in which they were written.

    Each record is a length, its checksum, the bytes, and their checksum.
    """
    events = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_a_resumed_run_adds_a_file_that_hides_the_steps_it_repeats(tmp_path, monkeypatch):
    """TensorBoard reads files in the order of their names. It is the order of writing, though the
    clock goes back.
    """
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    log_steps(tmp_path, [10, 20, 30])
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    log_steps(tmp_path, [30], first_step=20)
    log_steps(tmp_path, [40], first_step=30)
    events = read_events(tmp_path / "tensorboard")
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [1, 21, 31], "the first steps that each start makes"
    assert len(os.listdir(tmp_path / "tensorboard")) == 3
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
    def fail():
        with contextlib.suppress(LogError):
            full_log.print("a line", show=False)
        raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"), full_log:
        fail()
    printed = capsys.readouterr().out
    assert printed.count("File too large") == 1, "the error of closing is printed"


def test_an_error_of_closing_is_raised_if_it_is_the_only_one(full_log):
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
    lines = [str(number) for number in range(12)]
    append(path, *lines)
    append(path, "more")
    assert log_lines(read_appended(path)) == [*lines, "more"]
    assert parts(path) == [f"{number:06}" for number in range(1, 14)]

    replace_appended(path, ["new ", "text "])
    assert read_appended(path) == b"new text "
    assert parts(path) == ["000014.all"]

    files.write(f"{path}.parts/000013", b"of a removal that was killed")
    append(path, "end")
    text = read_appended(path)
    # A line begins with its time, whose first digit is the year's, and two spaces.
    assert text.startswith(b"new text 2")
    assert text.endswith(b"  end\n")
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
        assert parts(bucket / "log.txt") == ["000001"], "the part is replaced until it is sealed"


@pytest.mark.full
def test_a_checkpoint_waits_for_uploads_and_a_step_does_not(bucket, monkeypatch):
    """Otherwise a kill after the checkpoint would lose records that nobody makes again."""
    write = files.write
    may_upload = threading.Event()
    sealed = threading.Event()

    def write_later(path, data):
        assert may_upload.wait(20)
        write(path, data)

    def seal():
        log.seal()
        sealed.set()

    monkeypatch.setattr(files, "write", write_later)
    monkeypatch.setattr(appended_text, "SECONDS_BETWEEN_UPLOADS", 0.0)
    with RunLog(bucket).open() as log:
        for step in (1, 2):
            log.record("train", step, {"loss": 1.0})
        assert steps_of(bucket) == [], "the steps continue while the first record is uploaded"

        sealing = threading.Thread(target=seal)
        sealing.start()
        assert not sealed.wait(0.2)
        may_upload.set()
        sealing.join()
        assert sealed.is_set()
        assert steps_of(bucket) == [1, 2]


# Sinks


# Settings of each type: a number, a switch, a list, and one that is none.
SETTINGS = {
    "model.n_layer": 3,
    "train.same_length": True,
    "model.cutoffs": [1, 2],
    "train.clamp_len": None,
}
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
    """Another sink gets everything in order."""
    broken = mock.Mock(spec=Sink)
    sound = mock.Mock(spec=Sink)
    getattr(broken, fails).side_effect = ConnectionError("the network is down\nwith details")
    with RunLog(tmp_path, sinks=[broken, sound]).open() as log:
        report_all(log)
        log.record("train", 30, {"loss": 1.0})

    assert getattr(broken, fails).call_count == 1
    assert broken.mock_calls[-1] == mock.call.close(), "it may have a connection"
    assert sound.mock_calls == [
        mock.call.settings(SETTINGS),
        *(mock.call.record(*record) for record in RECORDS),
        mock.call.text(20, "sample", "a b\n*c*"),
        mock.call.flush(),
        mock.call.record("train", 30, {"loss": 1.0}, None),
        mock.call.flush(),
        mock.call.close(),
    ]
    assert steps_of(tmp_path) == [10, 20, 20, 30]
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert "Mock" in line, "the sink's class"
    assert "ConnectionError: the network is down)" in line
    if fails != "close":  # The log is open until then.
        assert line in log_lines(tmp_path / "log.txt")


# TensorBoard


def test_tensorboard_gets_scalars_texts_and_the_table_of_settings(tmp_path):
    """Settings by name, in the types that its plugin can sort and filter by."""
    with RunLog(tmp_path).open() as log:
        report_all(log)
    scalars = {}
    others = {}
    steps = {}
    for event in read_events(tmp_path / "tensorboard"):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars[event.step, value.tag] = value.simple_value
            else:
                others[value.tag] = value
                steps[value.tag] = event.step

    assert scalars == {
        (10, "train/loss"): 2.0,
        (10, "speed/tokens_per_second"): 900.0,
        (20, "train/loss"): 1.5,
        (20, "speed/tokens_per_second"): 800.0,
        (20, "seed_2/valid/loss"): math.inf,
    }
    # Indented lines are shown as they are, not as Markdown.
    assert others["sample/text_summary"].tensor.string_val == [b"    a b\n    *c*\n"]
    assert steps["sample/text_summary"] == 20
    [table] = others["settings/text_summary"].tensor.string_val
    assert b"| model.n_layer | 3 |" in table
    start = others["_hparams_/session_start_info"].metadata.plugin_data.content
    settings = HParamsPluginData.FromString(start).session_start_info.hparams
    assert settings["model.n_layer"].number_value == 3
    assert settings["train.same_length"].bool_value is True
    assert settings["model.cutoffs"].string_value == "[1, 2]"


# Weights & Biases


def test_without_wandb_the_project_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"'mine'.*wandb is not installed.*pip install wandb"):
        WeightsAndBiases("mine", tmp_path)


@pytest.mark.full
def test_wandb_offline_takes_settings_records_and_texts(tmp_path, monkeypatch):
    """Both starts of a run are one run of the project."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_ids = set()
    rows = []
    log_row = wandb.Run.log

    def keep_row(run, row):
        run_ids.add(run.id)
        rows.append(row)
        log_row(run, row)

    monkeypatch.setattr(wandb.Run, "log", keep_row)
    workdir = tmp_path / "my-run"
    for first_step in (0, 20):
        sink = WeightsAndBiases("project", workdir)
        with RunLog(workdir, sinks=[sink]).open(first_step) as log:
            report_all(log)
            assert sink._run.project == "project"
            assert sink._run.name == "my-run"
            assert sink._run.config["model.n_layer"] == 3
            assert sink._run.config["model.cutoffs"] == [1, 2]

    assert len(run_ids) == 1
    assert len(list(workdir.glob("wandb/offline-run-*/*.wandb"))) == 2
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(10, 2.0), (20, 1.5), (10, 2.0), (20, 1.5)]
    assert any("sample" in row for row in rows)
    assert any("seed=2/valid/loss" in row for row in rows)
    notes = [line for line in log_lines(workdir / "log.txt") if line.startswith("note")]
    assert notes == [], "no sink failed"


# Where a run comes from


def test_the_command_line_has_no_secrets_and_git_may_be_missing(monkeypatch):
    typed = [
        "--api_key=a b",
        "--data.hf_token=a b",
        "-password=a\nb",
        "--file=a b",
        "--data.tokenizer.kind=word",
    ]
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "program", *typed])

    command, versions = environment.origin()

    shown = [
        "--api_key=...",
        "--data.hf_token=...",
        "-password=...",
        "--file=a b",
        "--data.tokenizer.kind=word",
    ]
    # The first word is the line's key.
    assert shlex.split(command)[1:] == ["python", "-m", "program", *shown]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert not commit or versions.endswith(f", commit {commit}")

    monkeypatch.setenv("PATH", "/nowhere")
    _, versions = environment.origin()
    assert "commit" not in versions
    assert f"txl_jax {environment.__version__}" in versions
