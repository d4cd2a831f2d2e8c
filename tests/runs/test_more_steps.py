"""Tests runs that get more steps, or fewer: their numbers, their schedule, what is recorded, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest

from support import runs, tiny, tiny_run
from support.runs import numbers, stop_after
from txl_jax.errors import UserError
from txl_jax.runs.records import read_runs
from txl_jax.runs.run import Run
from txl_jax.runtime import storage
from txl_jax.training.hooks import Hook
from txl_jax.training.optimizer import learning_rate

STEPS, MORE = 24, 36


class Killed(BaseException):
    """Ends a run as a kill does: nothing catches it."""


def grown(before, to):
    return {"step": STEPS, "name": "train.steps", "old": before, "new": to}


def kill_after(step):
    def kill(context):
        if context.step == step:
            raise Killed

    return Hook(2, kill)


@pytest.fixture(scope="module")
def longer(run_once, config, corpus, tmp_path_factory):
    """(folder, outcome) of the finished run, which then got more steps and was not disturbed."""
    folder = tmp_path_factory.mktemp("longer") / "run"
    shutil.copytree(run_once[0].path, folder)
    return folder, runs.train(tiny.changed(config, train__steps=MORE), corpus, folder)


def test_a_finished_run_trains_on_by_the_schedule_of_the_new_total(run_once, longer, config):
    folder, outcome = longer
    assert outcome.finished and outcome.step == outcome.results["steps"] == MORE
    assert outcome.results["changes"] == [grown(STEPS, MORE)] and "changes" not in run_once[1].results
    assert json.loads((folder / "results.json").read_text()) == outcome.results
    before, after = numbers(run_once[0]), numbers(folder)
    assert after[: len(before)] == before, "the test scores of the earlier end stay"
    assert [record["step"] for record in after if record["kind"] == "test"] == [STEPS, MORE]
    rate = learning_rate(tiny.changed(config, train__steps=MORE))
    rates = {each["step"]: each["learning_rate"] for each in after if each["kind"] == "train"}
    assert rates[STEPS] < 1e-3 < rates[STEPS + 4] == pytest.approx(float(rate(STEPS + 3)))
    peak = config.optimizer.learning_rate
    [note] = [line for line in (folder / "log.txt").read_text().splitlines() if "% of its peak" in line]
    assert f"{float(rate(STEPS)) / peak:.1%} of its peak, not 0.0%" in note


def test_it_equals_a_run_with_the_same_change_that_is_killed_and_stopped(longer, finished, config, corpus):
    (folder, outcome), (workdir, _) = longer, finished
    more = tiny.changed(config, train__steps=MORE)
    with pytest.raises(Killed):  # Before its first checkpoint: the record has the change, and the checkpoint not.
        runs.train(more, corpus, workdir, hooks=[kill_after(STEPS + 2)])
    assert Run.read(workdir.path).config.train.steps == MORE
    [row] = read_runs([workdir.path])
    assert row.results is None and "of 36 training steps" in row.row([])["state"], "the results are of the earlier end"
    assert not runs.train(more, corpus, workdir, stop_requested=stop_after(4)).finished
    assert runs.train(more, corpus, workdir) == outcome
    assert numbers(workdir) == numbers(folder)
    tiny_run.assert_equal(*(runs.state_of(run)[1] for run in (workdir, folder)))


def test_a_run_that_was_stopped_gets_fewer_steps_and_not_less_than_are_done(config, corpus, tmp_path):
    assert not runs.train(config, corpus, tmp_path, stop_requested=stop_after(3)).finished
    done = runs.state_of(tmp_path)[0]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=rf"train\.steps was 24 and is now {done - 2}, fewer than the {done} "):
        runs.train(tiny.changed(config, train__steps=done - 2), corpus, tmp_path)
    assert {path: path.read_bytes() for path in files} == files
    outcome = runs.train(tiny.changed(config, train__steps=done + 2), corpus, tmp_path)
    change = {"step": done, "name": "train.steps", "old": STEPS, "new": done + 2}
    assert outcome.results["steps"] == done + 2 and outcome.results["changes"] == [change]


def test_checkpoints_without_a_total_have_that_of_the_record(finished, config, corpus):
    """Those of earlier versions."""
    workdir, _ = finished
    notes = Path(workdir.latest, str(STEPS), "notes", "metadata")
    saved = json.loads(notes.read_text())
    notes.write_text(json.dumps({name: value for name, value in saved.items() if name not in ("steps", "changes")}))
    digests = Path(workdir.latest, str(STEPS), "digests.json")
    of_files = json.loads(digests.read_text()) | {"notes/metadata": storage.sha256(str(notes))}
    digests.write_text(json.dumps(of_files))
    outcome = runs.train(tiny.changed(config, train__steps=STEPS + 2), corpus, workdir)
    assert outcome.results["changes"] == [grown(STEPS, STEPS + 2)]
