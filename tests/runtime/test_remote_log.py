"""Tests the log of a run on object storage: sealed records are there after a kill, repeated ones are dropped."""

import pytest

from tests.runtime.test_metrics_log import read_events_of
from txl_jax.runtime.log import RunLog, read_appended, read_metrics


@pytest.mark.full
def test_what_was_sealed_is_there_and_a_resumed_run_drops_what_it_repeats(bucket):
    killed = RunLog(bucket)
    for step in (1, 2, 3):
        killed.record("train", step, {"loss": step / 2})
        killed.print(f"step {step}")
        if step < 3:
            killed.seal()
    assert [record["step"] for record in read_metrics(str(bucket))] == [1, 2]
    assert len(list((bucket / "tensorboard").iterdir())) == 2
    with RunLog(bucket, first_step=1) as log:
        assert [record["step"] for record in read_metrics(bucket)] == [1]
        log.record("train", 2, {"loss": 1.5})
        log.print("again")
    assert read_metrics(bucket) == [
        {"kind": "train", "step": 1, "loss": 0.5},
        {"kind": "train", "step": 2, "loss": 1.5},
    ]
    assert read_appended(bucket / "log.txt") == b"step 1\nstep 2\nagain\n"
    events = [event for path in (bucket / "tensorboard").iterdir() for event in read_events_of(path)]
    seen = [(event.step, bool(event.summary.value)) for event in events if not event.file_version]
    assert seen == [(1, False), (1, True), (2, True), (2, False), (2, True)]
    with RunLog(bucket, first_step=2):
        pass
    assert len(read_metrics(bucket)) == 2
    tensorboard = killed._sinks._sinks[0]
    tensorboard._file.close()
    tensorboard._temporary.cleanup()
