"""Tests the sinks: what TensorBoard and W&B read back, and that a sink which fails ends nothing."""

import json
import math
import struct
import sys
import time
from unittest import mock

import pytest
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from tests.runtime.test_log import read_events
from txl_jax.errors import UserError
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.runtime.sinks import Sink, WeightsAndBiases

SETTINGS = {
    "model.n_layer": 3,
    "model.dtype": "bfloat16",
    "train.same_length": True,
    "model.cutoffs": [1, 2],
    "a": None,
}
RECORDS = [
    ("train", 10, {"loss": 2.0, "tokens_per_second": 900.0}, None),
    ("train", 20, {"loss": 1.5, "tokens_per_second": 800.0}, None),
    ("valid", 20, {"loss": math.inf}, "seed=2"),
]


def report_all(log):
    """Gives a log everything that a run reports."""
    log.settings(SETTINGS)
    for kind, step, values, member in RECORDS:
        log.record(kind, step, values, member=member)
    log.text(20, "sample", "a b\n*c*")
    log.seal()


def test_a_sink_gets_everything_in_order(tmp_path):
    """The other one has none of the methods."""
    sink = mock.Mock(spec=Sink)
    with RunLog(tmp_path, sinks=[Sink(), sink]).open() as log:
        report_all(log)
    assert sink.mock_calls == [
        mock.call.settings(SETTINGS),
        *(mock.call.record(*record) for record in RECORDS),
        mock.call.text(20, "sample", "a b\n*c*"),
        mock.call.flush(),
        mock.call.flush(),
        mock.call.close(),
    ]


@pytest.mark.parametrize("fails", ["settings", "record", "close"])
def test_a_sink_that_fails_is_reported_once_and_left_out(fails, tmp_path, capsys):
    broken, sound = mock.Mock(spec=Sink), mock.Mock(spec=Sink)
    getattr(broken, fails).side_effect = ConnectionError("the network is down\nwith details")
    with RunLog(tmp_path, sinks=[broken, sound]).open() as log:
        report_all(log)
        log.record("train", 30, {"loss": 1.0})
    assert getattr(broken, fails).call_count == (2 if fails == "close" else 1)
    assert broken.mock_calls[-1] == mock.call.close()  # It may hold a connection.
    assert sound.record.call_count == 4
    assert [record["step"] for record in read_metrics(tmp_path)] == [10, 20, 20, 30]
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert "Mock" in line and "ConnectionError: the network is down)" in line
    if fails != "close":  # The log is open until then.
        assert line in (tmp_path / "log.txt").read_text().splitlines()


def test_without_tensorboardx_a_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with RunLog(tmp_path).open() as log:
        report_all(log)
    assert len(read_metrics(tmp_path)) == 3
    assert capsys.readouterr().out.count("tensorboardX") == 1


# TensorBoard


@pytest.mark.full
def test_tensorboard_reads_back_scalars_settings_and_texts(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    with RunLog(tmp_path).open() as log:
        report_all(log)
    found = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"train/loss", "speed/tokens_per_second", "seed_2/valid/loss"}
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [(10, 2.0), (20, 1.5)]
    [settings] = found.Tensors("settings/text_summary")
    assert b"| model.n_layer | 3 |" in settings.tensor_proto.string_val[0]
    [sample] = found.Tensors("sample/text_summary")
    assert sample.step == 20 and sample.tensor_proto.string_val == [b"    a b\n    *c*\n"]


def test_tensorboard_has_the_table_of_settings(tmp_path):
    """Values by name, in the types that its plugin can sort and filter by."""
    with RunLog(tmp_path).open() as log:
        log.settings(SETTINGS)
    values = {value.tag: value for event in read_events(tmp_path / "tensorboard") for value in event.summary.value}
    start = HParamsPluginData.FromString(values["_hparams_/session_start_info"].metadata.plugin_data.content)
    found = start.session_start_info.hparams
    assert found["model.n_layer"].number_value == 3 and found["train.same_length"].bool_value is True
    assert found["model.cutoffs"].string_value == "[1, 2]"


# Weights & Biases


def test_without_wandb_the_project_is_refused_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"'mine'.*wandb is not installed.*txl_jax\[wandb\]"):
        WeightsAndBiases("mine", tmp_path)


def offline_records(folder):
    """Yields the records of W&B's offline files: a header of 7 bytes, then LevelDB's log format, blocks of 32 kB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.rglob("*.wandb")):
        data, at, parts = path.read_bytes(), 7, []
        assert data[:4] == b":W&B"
        while at + 7 <= len(data):
            if 32_768 - at % 32_768 < 7:  # No record begins in the last bytes of a block.
                at += 32_768 - at % 32_768
                continue
            _, length, part = struct.unpack("<IHB", data[at : at + 7])
            parts.append(data[at + 7 : at + 7 + length])
            at += 7 + length
            if part in (1, 4):  # A whole record, or the last part of one.
                yield Record.FromString(b"".join(parts))
                parts = []


@pytest.mark.full
def test_wandb_offline_holds_settings_records_and_texts(tmp_path, monkeypatch):
    """Both starts of a run are one run of the project."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    workdir = tmp_path / "my-run"
    for first_step in (0, 20):
        with RunLog(workdir, sinks=[WeightsAndBiases("project", workdir)]).open(first_step) as log:
            report_all(log)
    for _ in range(300):  # wandb's own process writes the rest after `finish`: 0.1 s, more on a busy machine.
        records = list(offline_records(workdir))
        if sum(record.HasField("exit") for record in records) == 2:
            break
        time.sleep(0.1)
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.project, run.display_name) for run in runs} == {("project", "my-run")}
    assert len({run.run_id for run in runs}) == 1
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["model.n_layer"] == 3 and config["model.cutoffs"] == [1, 2]
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    losses = [(json.loads(row["step"]), json.loads(row["train/loss"])) for row in rows if "train/loss" in row]
    assert losses == [(10, 2.0), (20, 1.5)] * 2
    assert any(any(name.startswith("sample") for name in row) for row in rows)
    assert any("seed=2/valid/loss" in row for row in rows)
