"""Tests `Run`: what is recorded and read back, other texts and settings, its lock, and runs as rows
of a table.
"""

import dataclasses
import fcntl
import json
import math
import os
import threading

import pytest

from support import recorded_run, runs
from support.encoded_text import own_text
from txl_jax.config import ExperimentConfig, Tokenizer, config_tree
from txl_jax.data.vocabulary import dumps
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.metrics import Measure
from txl_jax.runs.run import FORMAT, Run, TextInfo, holds_run
from txl_jax.runs.run_tables import markdown, means, read_runs
from txl_jax.runtime import storage as files
from txl_jax.runtime.lock import NAME

# The file of the text is never read.
CONFIG = ExperimentConfig(data=own_text(file="a.txt", kind=Tokenizer.WORD))
WORDS = WordVocabulary(("<eos>", "the", "<unk>", "cat"))
TEXT = TextInfo("text", "own text", "d" * 64, WORDS)


@pytest.fixture
def folder(tmp_path):
    runs.record(tmp_path / "run", CONFIG, TEXT)
    return tmp_path / "run"


@pytest.mark.parametrize("where", ["disk", pytest.param("bucket", marks=pytest.mark.full)])
def test_what_was_recorded_is_read_and_nothing_is_made_before(where, request, tmp_path):
    if where == "disk":
        place = str(tmp_path / "run")
    else:
        place = str(request.getfixturevalue("bucket"))

    with Run.open(place) as run:
        assert run.is_new
        assert not holds_run(place)
        assert files.is_remote(place) or not os.path.exists(place)
        with pytest.raises(UserError, match="contains no run"):
            Run.read(place)
        run.compare(CONFIG)
        run.record_start(CONFIG, TEXT)
        with pytest.raises(UserError, match="another run"):
            Run.open(place)

    recorded = Run.read(place)
    assert recorded.config == CONFIG
    assert recorded.text == TEXT
    assert not recorded.is_new
    assert recorded.member_names == ()
    assert set(files.names(place)) - {NAME} == {"config.json", "vocabulary.txt"}


def test_of_two_starts_of_a_new_run_the_later_is_refused(tmp_path):
    with Run.open(tmp_path / "run") as late:
        runs.record(tmp_path / "run", CONFIG, TEXT)
        with pytest.raises(UserError, match="another process"):
            late.record_start(CONFIG, TEXT)


@pytest.mark.parametrize(
    ("digest", "words", "named"),
    [("e" * 64, WORDS.words, "own text"), (TEXT.digest, (*WORDS.words, "dog"), r"4\b.*\b5")],
    ids=["text", "vocabulary"],
)
def test_another_text_or_vocabulary_is_an_error(folder, digest, words, named):
    """The text's digest decides, whatever its description says. The same text may have another
    vocabulary, here of 5 words instead of 4.
    """
    with Run.open(folder) as run, pytest.raises(UserError, match=rf"\b{named}\b"):
        run.record_start(CONFIG, TextInfo("text", "own text", digest, WordVocabulary(words)))


def test_settings_are_compared_before_a_text_is_read(folder, tmp_path):
    """`compare` needs no text. The error names all settings that must not change, and not
    train.log_every, which may.
    """
    warm = config_tree.replace(CONFIG, {"init_from": "old"})
    runs.record(tmp_path / "warm", warm, TEXT)
    minimum = config_tree.replace(CONFIG, {"data.tokenizer.min_count": 2, "train.log_every": 2})
    layers = config_tree.replace(minimum, {"model.n_layer": 3})
    both = r"(?=.*--model\.n_layer)(?=.*--data\.tokenizer\.min_count)(?!.*log_every)"

    assert_incompatible(folder, minimum, r"--data\.tokenizer\.min_count\D*\b1\b\D*\b2\b")
    assert_incompatible(folder, layers, both)
    assert_incompatible(folder, warm, "init_from was .* and is now")
    assert_incompatible(tmp_path / "warm", CONFIG, "init_from was .* and is now")


def assert_incompatible(folder, config, message, members=()):
    with Run.open(folder) as run, pytest.raises(UserError, match=message):
        run.compare(config, members)


def test_members_are_compared_and_chosen(tmp_path):
    members = [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.5}]
    ensemble = runs.record(tmp_path, CONFIG, TEXT, members)
    assert ensemble.member_names == ("seed=1", "seed=2+learning_rate=0.5")
    chosen = Run.read(tmp_path, member="seed=2+learning_rate=0.5")
    assert chosen.config.seed == 2
    assert chosen.config.optimizer.learning_rate == 0.5

    recorded = "members .* seed=1; seed=2.*"
    assert_incompatible(tmp_path, CONFIG, f"{recorded} now seed=1", members[:1])
    assert_incompatible(tmp_path, CONFIG, f"{recorded} now seed=2", members[::-1])
    assert_incompatible(tmp_path, CONFIG, f"{recorded} now none", [])

    alone = runs.record(tmp_path / "alone", CONFIG, TEXT).path
    for path, member, named in (
        (tmp_path, None, "seed=1"),
        (tmp_path, "seed=3", "'seed=3'.*seed=1"),
        (alone, "x", "'x'"),
    ):
        with pytest.raises(UserError, match=f"--ensemble_member.*{named}"):
            Run.read(path, member=member)


# Contents of config.json that are not a record and, as dicts, changes of a record that make it
# invalid. Format 3 is today's (`FORMAT`): with another number it would be the error.
CORRUPTED_RECORDS = {
    "not JSON": "{",
    "a list": "[]",
    "without text": '{"format": 3, "config": {}}',
    "a number as config": '{"format": 3, "config": 7, "text": {}}',
    "empty": "",
    "attention": {"attention": {"training": "tild 4x8"}},
    "members": {"members": 3},
    "empty text": {"text": {}},
    "a number as warm start": {"warm_start": 3},
    "a warm start without its step": {"warm_start": {"sha256": "0" * 64}},
}


@pytest.mark.parametrize("content", CORRUPTED_RECORDS.values(), ids=CORRUPTED_RECORDS)
def test_a_corrupted_record_is_named(folder, content):
    path = folder / "config.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        Run.read(folder)


def test_a_missing_vocabulary_is_named(folder):
    (folder / "vocabulary.txt").unlink()
    with pytest.raises(UserError, match=r"vocabulary\.txt"):
        Run.read(folder)


# With other words, ids would mean other words.
OTHER_WORDS = WordVocabulary(("<eos>", "the", "<unk>", "dog"))


@pytest.mark.parametrize(
    "content", ["the\ncat\n", dumps(OTHER_WORDS)], ids=["not a vocabulary", "other words"]
)
def test_a_corrupted_vocabulary_is_named(folder, content):
    (folder / "vocabulary.txt").write_text(content)
    with pytest.raises(UserError, match=r"vocabulary\.txt"):
        Run.read(folder)


@pytest.mark.parametrize(
    ("number", "advice"),
    [(None, "train"), (2, "train"), ("3", "newer"), (FORMAT + 1, "newer")],
)
def test_a_record_of_another_format_is_an_error_whatever_else_it_contains(folder, number, advice):
    """Records of format 1 have no number. Another format may have settings that are unknown here,
    which must not be what the error is about.
    """
    record = {"config": {"model.n_later": 3}}
    if number is not None:
        record["format"] = number
    (folder / "config.json").write_text(json.dumps(record))

    named = rf"config\.json .*format must be {FORMAT}, got {number or 1!r}: .*{advice}"
    with pytest.raises(UserError, match=named):
        Run.open(folder)
    assert json.loads((folder / "config.json").read_text()) == record


def test_a_lock_clears_what_killed_runs_began_and_nothing_else(folder):
    # Temporary files of a process with the number 12, which is gone.
    begun = [
        ".config.json.12.tmp",
        ".vocabulary.txt.12.tmp",
        ".metrics.jsonl.12.tmp",
        ".results.json.12.tmp",
        ".probe-12",
    ]
    # An evaluation takes no lock, so it may be writing this file now.
    of_another_program = ".evaluation.json.12.tmp"
    for name in (*begun, of_another_program):
        (folder / name).touch()
    with Run.open(folder):
        kept = {of_another_program, NAME, "config.json", "vocabulary.txt"}
        assert set(files.names(folder)) == kept


def test_the_lock_of_a_process_that_is_gone_and_a_check_of_the_lock_keep_nobody_out(folder):
    # The number of a process that exists, but does not hold the lock.
    (folder / NAME).write_text("1")
    with Run.open(folder):
        # The run that holds the lock is writing a file.
        (folder / ".results.json.12.tmp").touch()
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(UserError, match=rf"\b{os.getpid()}\b.*/run\b.*--workdir"):
            Run.open(folder)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    # A sweep checks whether a run is being trained, for which it holds the lock for a moment. A
    # start waits for so long.
    with open(folder / NAME, "a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, [handle, fcntl.LOCK_UN]).start()
        Run.open(folder).close()


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    # The advice if the credentials are missing or do not suffice, and what the server says.
    ("status", "named"),
    [(401, "gcloud"), (403, "gcloud"), (503, "made by a test")],
)
def test_a_bucket_that_cannot_be_read_does_not_count_as_empty(bucket, storage, status, named):
    """Otherwise a second run, with other settings, would begin in the directory of the first."""
    runs.record(bucket, CONFIG, TEXT)
    storage.refuse("GET ", status=status)
    writes = len(storage.writes)
    for act in (Run.open, Run.read, holds_run):
        with pytest.raises(UserError, match=rf"cannot read .*{named}"):
            act(bucket)
    assert storage.writes[writes:] == []
    storage.calm()
    assert Run.read(bucket).config == CONFIG


# Rows: members of ensembles, names, runs that diverged, means over seeds


@pytest.mark.full
def test_members_of_an_ensemble_are_runs(tmp_path):
    members = [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.001}]
    folder = recorded_run.make(tmp_path / "both", member_settings=members)
    first, second = read_runs([str(folder)])
    assert (first.name, second.name) == ("seed=1", "seed=2+learning_rate=0.001")
    assert (first.config.seed, second.config.seed) == (1, 2)
    results = json.loads((folder / "results.json").read_text())
    for run in (first, second):
        scores = results["members"][run.name]["test"]
        assert run.row([])["test"] == pytest.approx(scores["perplexity"])
        assert {record["member"] for record in run.records} == {run.name}

    lone = recorded_run.make(tmp_path / "lone")
    names = [run.name for run in read_runs([str(folder), str(lone)])]
    assert names == ["both: seed=1", "both: seed=2+learning_rate=0.001", "lone"]


@pytest.mark.full
def test_directories_of_runs_are_read_and_equal_names_get_their_paths(tmp_path):
    for name in ("b", "a"):
        recorded_run.make(tmp_path / "sweep" / name, seed=ord(name))
    (tmp_path / "sweep" / "results.csv").write_text("")
    in_sweep = read_runs([str(tmp_path / "sweep"), str(tmp_path / "sweep" / "a")])
    assert [run.name for run in in_sweep] == ["a", "b"]

    paths = [str(tmp_path / "sweep" / "a"), str(recorded_run.make(tmp_path / "other" / "a"))]
    assert [run.name for run in read_runs(paths)] == paths


def test_a_run_that_diverged_says_so_and_its_scores_are_infinite(tmp_path):
    folder = recorded_run.make(tmp_path / "wild")
    results = json.loads((folder / "results.json").read_text())
    # exp(20.8) is 1.1e9, and exp(2154) no number.
    for split, loss in (("best_valid", 20.8), ("test", 2154.0)):
        results[split]["loss"] = loss
    (folder / "results.json").write_text(json.dumps(results))
    [run] = read_runs([str(folder)])
    row = run.row([])
    assert row["state"] == "diverged"
    assert row["best_valid"] == row["test"] == math.inf
    assert "| >1e9 | >1e9 |" in list(markdown([], [row]))[2]
    assert dataclasses.replace(run, measure=Measure.BPC).row([])["best_valid"] == math.inf


def test_means_omit_runs_that_have_not_finished_or_diverged():
    # "lr" and "seed" are the settings in which the runs differ: groups of seeds have the same lr.
    def finished(lr, seed, best_valid, test):
        row = {"lr": lr, "seed": seed, "state": "finished", "measure": "ppl"}
        return row | {"best_valid": best_valid, "test": test}

    stopped = {"lr": 2, "seed": 1, "state": "stopped after step 3", "measure": "ppl"}
    rows = [
        finished(1, 1, 10.0, 12.0),
        finished(1, 2, 14.0, 13.0),
        stopped | {"best_valid": 1.0},
        finished(2, 2, 5.0, 6.0),
        finished(2, 3, math.inf, math.nan),
    ]

    first, second = means(["lr", "seed"], rows)

    assert first["lr"] == 1
    assert first["best_valid"] == 12.0
    assert first["test"] == 12.5
    assert first["seeds"] == 2
    # The deviation of a sample, 10 and 14: sqrt((2**2 + 2**2) / (2 - 1)).
    assert first["best_valid_deviation"] == pytest.approx(math.sqrt(8))
    # One finite score is left, and has no deviation.
    assert second["best_valid"] == 5.0
    assert second["test"] == 6.0
    assert "best_valid_deviation" not in second
    # The headings name the measure before a run has finished.
    [unfinished] = means(["lr", "seed"], [stopped, stopped | {"seed": 2}])
    assert unfinished == {"lr": 2, "seeds": 0, "measure": "ppl"}
    assert means(["lr", "seed"], rows[1:3]) == [], "no two of these runs have the same lr"

    # In Markdown a name must not end its cell. The columns for steps and time are empty here.
    named_rows = [{"run": f"r|{number}"} | row for number, row in enumerate(rows)]
    lines = list(markdown(["lr", "seed"], named_rows))
    assert lines[0] == "| run | lr | seed | best valid (ppl) | test (ppl) | steps | time | state |"
    assert lines[2] == "| r\\|0 | 1 | 1 | 10.00 | 12.00 |  |  | finished |"
    assert lines[-2] == "| 1 | 12.00 ± 2.83 | 12.50 ± 0.71 | 2 |"


def test_a_table_names_the_measure_once_unless_runs_have_different_ones():
    rows = []
    for name, measure in (("a", Measure.BPB), ("b", Measure.BPB), ("c", Measure.BPC)):
        scores = {"best_valid": 2.0, "test": 3.0, "measure": str(measure)}
        rows.append({"run": name, "state": "finished", "steps": 1, "seconds": 1.0} | scores)
    # It has not been scored yet.
    rows.append({"run": "d", "state": "0 of 9 training steps", "steps": 0})

    of_bytes = list(markdown([], [*rows[:2], rows[3]]))
    assert of_bytes[0].startswith("| run | best valid (bits per byte) | test (bits per byte) |")
    assert of_bytes[2].startswith("| a | 2.0000 | 3.0000 |")
    assert of_bytes[4].startswith("| d |  |  |")

    mixed = list(markdown([], rows))
    assert mixed[0].startswith("| run | best valid | test |")
    assert mixed[2].startswith("| a | bits per byte 2.0000 | bits per byte 3.0000 |")
    assert mixed[4].startswith("| c | bpc 2.0000 | bpc 3.0000 |")
