"""Tests that runs from before 0.1, with dropout masks of version 1, can be used as before.

`record.py` made them, and the numbers that they must still give. Only training them further with
dropout is an error, and then no file changes.
"""

import asyncio
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

import txl_jax
from old_runs import record
from support import processes, programs, serving
from support.cases import full_but
from txl_jax.config import config_tree
from txl_jax.errors import UserError
from txl_jax.runs import convert
from txl_jax.runs.run import MASKS_VERSION, Run
from txl_jax.runs.run_tables import read_runs
from txl_jax.serving.app import make_app

FOLDER = Path(__file__).parent
NUMBERS = json.loads((FOLDER / "numbers.json").read_text())
# Relative tolerances. Other processors and versions of XLA round sums differently, and the first
# updates of Adam enlarge that where a gradient is almost 0. Other weights or masks change losses by
# 1e-2 and more.
ROUNDING = 1e-4
UPDATED = 1e-3


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """The directory of the runs as they were recorded, with their text."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(FOLDER / "runs.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    record.write_text(folder)
    return folder


@pytest.fixture
def copy(originals, tmp_path):
    """Copies a run, and returns its directory."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(originals / name, tmp_path / name))

    return copied


@pytest.fixture
def resume(originals, tmp_path):
    """Trains a copy of a run with the settings that began it, of which some can be changed."""

    def resumed(run: Path, **changes):
        settings = record.RUNS[run.name][0] | changes
        config = record.config_of(originals / "text.txt", **settings)
        return txl_jax.train(config, run, cache_dir=str(tmp_path / "prepared"))

    return resumed


def flags_of(originals: Path, tmp_path: Path, run: Path) -> list[str]:
    return [
        f"--workdir={run}",
        f"--data.file={originals / 'text.txt'}",
        f"--cache_dir={tmp_path / 'prepared'}",
        "--compilation_cache=off",
    ]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Returns the bytes of each file below a directory, and None for each directory."""
    by_name: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else None
        by_name[str(path.relative_to(folder))] = content
    return by_name


def assert_close(found, expected, *, tolerance: float = ROUNDING) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=tolerance, err_msg=name)


def losses_of(outcome) -> dict[str, float]:
    """Returns the losses in the results of a run."""
    return {split: outcome.results[split]["loss"] for split in ("best_valid", "test")}


def test_the_runs_are_of_version_1(originals):
    """A record without the version of its masks is of version 1."""
    for name in record.RUNS:
        saved = json.loads((originals / name / "config.json").read_text())
        assert saved["format"] == 3, name
        assert "dropout_masks" not in saved, name
        assert Run.read(originals / name).dropout_masks == 1, name


@pytest.mark.parametrize("name", full_but(["with_dropout"], record.RUNS))
def test_a_run_scores_and_writes_as_before(originals, name):
    """Losses of documents and generated texts stay, and using a run does not change its files."""
    before = contents(originals / name)

    used = record.used(originals / name)

    expected = NUMBERS[name]
    assert used["step"] == expected["step"]
    assert used["texts"] == expected["texts"]
    np.testing.assert_allclose(used["documents"], expected["documents"], rtol=ROUNDING)
    assert contents(originals / name) == before


# Training


def test_without_dropout_a_run_resumes_with_the_numbers_of_before(copy, resume):
    """The version of the masks does not matter to it."""
    run = copy("without_dropout")

    outcome = resume(run)

    expected = NUMBERS["without_dropout"]
    assert outcome.finished
    assert outcome.step == record.STEPS
    assert_close(record.curves(run), expected["curves"], tolerance=UPDATED)
    assert_close(losses_of(outcome), expected["results"], tolerance=UPDATED)
    # Its record has the current version from now on.
    assert json.loads((run / "config.json").read_text())["dropout_masks"] == MASKS_VERSION


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        pytest.param("with_dropout", record.STEPS, id="stopped"),
        pytest.param("finished", record.STEPS + 4, id="finished, with more steps"),
    ],
)
def test_with_dropout_a_run_is_not_trained_further(copy, resume, name, steps):
    """The error says to begin a new run with its weights, and no file changes."""
    run = copy(name)
    before = contents(run)

    with pytest.raises(UserError, match=rf"{run}\b.* version 1\b.*--init_from={run}\b"):
        resume(run, **{"train.steps": steps})

    assert contents(run) == before


def test_a_finished_run_gives_its_results_again(copy, resume):
    """It keeps its version: with more steps, it would be trained further."""
    run = copy("finished")
    metrics = (run / "metrics.jsonl").read_bytes()

    outcome = resume(run)

    assert outcome.finished
    assert losses_of(outcome) == NUMBERS["finished"]["results"]
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert Run.read(run).dropout_masks == 1


# Settings that these records lack, since dynamic evaluation did not exist.
LEARNING = {"eval.dynamic.rule": "rmsprop", "eval.dynamic.learning_rate": 0.01}


@pytest.mark.parametrize("changes", [{}, LEARNING], ids=["static", "dynamic"])
def test_settings_that_a_record_lacks_are_the_defaults_and_training_does_not_learn_from_scores(
    copy, resume, changes
):
    run = copy("finished")
    before = contents(run)
    assert "dynamic.rule" not in json.loads(before["results.json"])["eval"]

    outcome = resume(run, **changes)

    # The saved results belong to these settings, so nothing is scored again.
    assert outcome.finished
    assert outcome.results == json.loads(before["results.json"])
    assert contents(run)["results.json"] == before["results.json"]


def test_a_resumed_run_keeps_its_best_step_and_scores_it_without_learning(copy, resume):
    """Settings of dynamic evaluation, which the record lacks, do not change its results."""
    run = copy("without_dropout")

    outcome = resume(run, **LEARNING)

    expected = NUMBERS["without_dropout"]
    assert_close(losses_of(outcome), expected["results"], tolerance=UPDATED)
    assert "chosen again" not in (run / "log.txt").read_text()
    assert not any(name.startswith("dynamic") for name in outcome.results["eval"])


def test_an_earlier_checkpoint_is_not_trained_further_in_place_of_a_corrupted_one(copy, resume):
    """The empty directory counts as the last step's checkpoint, after which no step is left."""
    run = copy("with_dropout")
    (run / "checkpoints" / "latest" / str(record.STEPS)).mkdir()

    with pytest.raises(UserError, match=r" version 1\b"):
        resume(run)

    assert len(record.curves(run)["train loss"]) == record.STOPPED, "no further update was made"


@pytest.mark.full
@pytest.mark.parametrize("name", record.RUNS)
def test_a_new_run_begins_with_the_weights_of_an_old_one(originals, tmp_path, name):
    """Weights do not depend on the masks' version, so `--init_from` gives the same numbers."""
    changes = {"model.dropout.rate": 0.0, "train.steps": record.STOPPED}
    config = record.config_of(originals / "text.txt", **changes)
    config = config_tree.replace(config, {"init_from": str(originals / name)})

    txl_jax.train(config, tmp_path / "new", cache_dir=str(tmp_path / "prepared"))

    saved = json.loads((tmp_path / "new" / "config.json").read_text())
    expected = NUMBERS[name]["begun"]
    assert saved["warm_start"]["sha256"] == expected["sha256"]
    assert saved["dropout_masks"] == MASKS_VERSION
    curves = record.curves(tmp_path / "new")
    assert_close(curves, expected["curves"], tolerance=UPDATED)
    # The loss of the weights before the first update, which Adam has not changed.
    assert curves["train loss"][0] == pytest.approx(expected["curves"]["train loss"][0], rel=1e-5)


# Everything else


async def _complete(application, body: dict) -> dict:
    """Asks a server for a completion, as ASGI servers do. Returns the content of its answer."""
    content = b""
    status = None
    sent = False

    async def receive():
        nonlocal sent
        if sent:
            # The client waits for the answer.
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message):
        nonlocal content, status
        status = message.get("status", status)
        content += message.get("body", b"")

    path = "/v1/completions"
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }
    await application(scope, receive, send)
    assert status == 200, content
    return json.loads(content)


@pytest.mark.full
def test_a_server_writes_the_texts_of_before(originals):
    """The most likely completion of a prompt stays."""
    with serving.engine(txl_jax.load(originals / "with_dropout")) as engine:
        application = make_app(engine, "old")
        body = {"prompt": record.PROMPTS[0], "max_tokens": record.LENGTH, "temperature": 0}
        answer = asyncio.run(_complete(application, body))

    assert answer["choices"][0]["text"] == NUMBERS["with_dropout"]["texts"]["greedy"][0]


@pytest.mark.full
def test_a_run_is_converted_and_read_back(originals, tmp_path):
    """A portable checkpoint of the run gives the same losses and texts."""
    convert.convert(originals / "with_dropout", tmp_path / "portable")

    used = record.used(tmp_path / "portable")
    expected = NUMBERS["with_dropout"]
    assert used["texts"] == expected["texts"]
    np.testing.assert_allclose(used["documents"], expected["documents"], rtol=ROUNDING)


def test_a_report_has_the_scores_of_a_run(originals):
    """It lists the state of each run, and the scores of a finished one in bits per character."""
    rows = {run.name: run.row([]) for run in read_runs([str(originals)])}

    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "without_dropout": "4 of 8 training steps",
        "with_dropout": "4 of 8 training steps",
        "finished": "finished",
    }
    nats = NUMBERS["finished"]["results"]
    row = rows["finished"]
    assert row["test"] == pytest.approx(nats["test"] / np.log(2), rel=1e-12)
    assert row["best_valid"] == pytest.approx(nats["best_valid"] / np.log(2), rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", record.RUNS)
def test_the_command_scores_a_run_as_before(originals, copy, tmp_path, name):
    """`--mode=eval` gives the losses of both splits."""
    run = copy(name)

    flags = flags_of(originals, tmp_path, run)
    code, _, errors = programs.run("experiments.text", "--mode=eval", *flags)

    assert code == 0, errors
    scores = json.loads((run / "evaluation.json").read_text())
    losses = {split: scores[split]["loss"] for split in ("valid", "test")}
    assert_close(losses, NUMBERS[name]["evaluation"])


@pytest.mark.full
def test_the_command_ends_with_one_error_and_writes_nothing(originals, copy, tmp_path):
    """Resuming a run with dropout fails before a file is written."""
    run = copy("with_dropout")
    before = contents(run)

    code, _, errors = programs.run("experiments.text", *flags_of(originals, tmp_path, run))

    assert code == 1, errors
    assert f"--init_from={run}" in errors
    assert contents(run) == before
    assert not (tmp_path / "prepared").exists()


@pytest.mark.full
def test_all_hosts_end(originals, copy, tmp_path):
    """On two hosts, both end with the error, and no file changes."""
    run = copy("with_dropout")
    before = contents(run)

    words = ["-m", "experiments.text", *flags_of(originals, tmp_path, run)]
    ended = processes.finish(processes.start(*words, devices=1))

    assert [code for code, _, _ in ended] == [1, 1], str(ended)
    assert f"--init_from={run}" in ended[0][2]
    assert contents(run) == before


@pytest.mark.full
def test_two_hosts_resume_a_run_without_dropout(originals, copy, tmp_path):
    """Process 0 locks it once all processes may train it further."""
    run = copy("without_dropout")

    flags = [*flags_of(originals, tmp_path, run), "--eval.batch_size=2"]
    ended = processes.finish(processes.start("-m", "experiments.text", *flags, devices=1))

    assert [code for code, _, _ in ended] == [0, 0], str(ended)
    losses = record.curves(run)["train loss"]
    expected = NUMBERS["without_dropout"]["curves"]["train loss"]
    np.testing.assert_allclose(losses, expected, rtol=UPDATED)
    assert Run.read(run).dropout_masks == MASKS_VERSION
