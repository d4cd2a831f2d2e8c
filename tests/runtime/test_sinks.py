"""Tests the sinks: what TensorBoard and W&B read back, and that a sink which fails ends nothing."""

import math
import sys
from unittest import mock

import pytest
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

from support.runs import log_lines
from tests.runtime.test_log import read_events
from txl_jax.errors import UserError
from txl_jax.runtime.log import RunLog, read_metrics
from txl_jax.runtime.sinks import Sink, WeightsAndBiases

SETTINGS = {"model.n_layer": 3, "train.same_length": True, "model.cutoffs": [1, 2], "a": None}
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
    assert getattr(broken, fails).call_count == 1
    assert broken.mock_calls[-1] == mock.call.close()  # It may hold a connection.
    assert sound.record.call_count == 4
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
    events = [(event.step, value) for event in read_events(tmp_path / "tensorboard") for value in event.summary.value]
    values = {(step, value.tag): value for step, value in events}
    scalars = {place: value.simple_value for place, value in values.items() if value.HasField("simple_value")}
    assert (scalars[10, "train/loss"], scalars[20, "train/loss"]) == (2, 1.5)
    assert scalars[10, "speed/tokens_per_second"] == 900 and scalars[20, "seed_2/valid/loss"] == math.inf
    assert values[20, "sample/text_summary"].tensor.string_val == [b"    a b\n    *c*\n"]
    tags = {tag: value for (_, tag), value in values.items()}
    assert b"| model.n_layer | 3 |" in tags["settings/text_summary"].tensor.string_val[0]
    start = HParamsPluginData.FromString(tags["_hparams_/session_start_info"].metadata.plugin_data.content)
    found = start.session_start_info.hparams
    assert found["model.n_layer"].number_value == 3 and found["train.same_length"].bool_value is True
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
    monkeypatch.setattr(wandb.Run, "log", lambda run, row: logged.append((run.id, row)) or take(run, row))
    workdir = tmp_path / "my-run"
    for first_step in (0, 20):
        sink = WeightsAndBiases("project", workdir)
        with RunLog(workdir, sinks=[sink]).open(first_step) as log:
            report_all(log)
            assert (sink._run.project, sink._run.name) == ("project", "my-run")
            assert sink._run.config["model.n_layer"] == 3 and sink._run.config["model.cutoffs"] == [1, 2]
    assert len({run_id for run_id, _ in logged}) == 1 and len([*workdir.glob("wandb/offline-run-*/*.wandb")]) == 2
    losses = [(row["step"], row["train/loss"]) for _, row in logged if "train/loss" in row]
    assert losses == [(10, 2.0), (20, 1.5)] * 2
    assert any("sample" in row for _, row in logged) and any("seed=2/valid/loss" in row for _, row in logged)
    assert "failed" not in (workdir / "log.txt").read_text()
