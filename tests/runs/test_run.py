"""Tests `Run`: what is recorded and read back, other texts and settings, its lock; and runs that
are read as rows.
"""

import dataclasses
import fcntl
import json
import math
import os
import re
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

CONFIG = ExperimentConfig(data=own_text(file="a.txt", kind=Tokenizer.WORD))
WORDS = WordVocabulary(("<eos>", "the", "<unk>", "cat"))
TEXT = TextInfo("text", "own text", "d" * 64, WORDS)


@pytest.fixture
def folder(tmp_path):
    runs.record(tmp_path / "run", CONFIG, TEXT)
    return tmp_path / "run"


@pytest.mark.parametrize("where", ["disk", pytest.param("bucket", marks=pytest.mark.full)])
def test_what_was_recorded_is_read_and_nothing_is_made_before(where, request, tmp_path):
    place = str(tmp_path / "run" if where == "disk" else request.getfixturevalue("bucket"))
    with Run.open(place) as run:
        assert (
            run.is_new
            and not holds_run(place)
            and (files.is_remote(place) or not os.path.exists(place))
        )
        with pytest.raises(UserError, match=r"config\.json"):
            Run.read(place)
        run.compare(CONFIG)
        run.record_start(CONFIG, TEXT)
        with pytest.raises(UserError, match="another run"):
            Run.open(place)
    found = Run.read(place)
    assert (found.config, found.text, found.is_new, found.member_names) == (CONFIG, TEXT, False, ())
    assert (
        {"config.json", "vocabulary.txt"}
        <= set(files.names(place))
        <= {"config.json", "vocabulary.txt", NAME}
    )


def test_of_two_starts_of_a_new_run_the_later_is_refused(tmp_path):
    with Run.open(tmp_path / "run") as late:
        runs.record(tmp_path / "run", CONFIG, TEXT)
        with pytest.raises(UserError, match="another process"):
            late.record_start(CONFIG, TEXT)


@pytest.mark.parametrize(
    ("digest", "words", "named"),
    [("e" * 64, WORDS.words, "own text"), (TEXT.digest, (*WORDS.words, "dog"), r"4\b.*\b5")],
)
def test_another_text_or_vocabulary_is_refused(folder, digest, words, named):
    """The text's digest decides, whatever its description says; the vocabulary may be another file
    of words.
    """
    with Run.open(folder) as run, pytest.raises(UserError, match=rf"\b{named}\b"):
        run.record_start(CONFIG, TextInfo("text", "own text", digest, WordVocabulary(words)))


def test_settings_are_compared_before_a_text_is_read(folder, tmp_path):
    warm = config_tree.replace(CONFIG, {"init_from": "old"})
    runs.record(tmp_path / "warm", warm, TEXT)
    minimum = config_tree.replace(CONFIG, {"data.tokenizer.min_count": 2, "train.log_every": 2})
    layers = config_tree.replace(minimum, {"model.n_layer": 3})
    for recorded, changed, message in (
        (folder, minimum, r"--data\.tokenizer\.min_count\D*\b1\b\D*\b2\b"),
        (
            folder,
            layers,
            r"(?=.*--model\.n_layer)(?=.*--data\.tokenizer\.min_count)(?!.*log_every)",
        ),
        (folder, warm, r"init_from was .* and is now"),
        (tmp_path / "warm", CONFIG, r"init_from was .* and is now"),
    ):
        with Run.open(recorded) as run, pytest.raises(UserError, match=message):
            run.compare(changed)


def test_members_are_compared_and_chosen(tmp_path):
    members = [{"seed": 1}, {"seed": 2, "optimizer.learning_rate": 0.5}]
    assert runs.record(tmp_path, CONFIG, TEXT, members).member_names == (
        "seed=1",
        "seed=2+learning_rate=0.5",
    )
    chosen = Run.read(tmp_path, member="seed=2+learning_rate=0.5")
    assert (chosen.config.seed, chosen.config.optimizer.learning_rate) == (2, 0.5)
    for other, now in ((members[:1], "seed=1"), (members[::-1], "seed=2"), ([], "none")):
        with (
            Run.open(tmp_path) as run,
            pytest.raises(UserError, match=rf"members .* seed=1; seed=2.* now {now}"),
        ):
            run.compare(CONFIG, other)
    alone = runs.record(tmp_path / "alone", CONFIG, TEXT).path
    for path, member, named in (
        (tmp_path, None, "seed=1"),
        (tmp_path, "seed=3", "'seed=3'.*seed=1"),
        (alone, "x", "'x'"),
    ):
        with pytest.raises(UserError, match=f"--ensemble_member.*{named}"):
            Run.read(path, member=member)


NOT_RECORDS = [
    "{",
    "[]",
    '{"format": 3, "config": {}}',
    '{"format": 3, "config": 7, "text": {}}',
    "",
]
CHANGES = [{"attention": {"training": "tild 4x8"}}, {"members": 3}, {"warm_start": 3, "text": {}}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("vocabulary.txt", None),
        ("vocabulary.txt", "the\ncat\n"),
        # Ids would mean other words.
        ("vocabulary.txt", dumps(WordVocabulary(("<eos>", "the", "<unk>", "dog")))),
        *(("config.json", text) for text in [*NOT_RECORDS, *CHANGES]),
    ],
)
def test_a_missing_or_damaged_file_is_named(folder, name, text):
    path = folder / name
    if isinstance(text, dict):  # A change of the record.
        text = json.dumps(json.loads(path.read_text()) | text)
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(UserError, match=re.escape(name)):
        Run.read(folder)


@pytest.mark.parametrize("number", [None, 2, "3", FORMAT + 1])
def test_a_record_of_another_format_is_refused_whatever_else_it_has(folder, number):
    saved = {"config": {"model.n_later": 3}} | ({} if number is None else {"format": number})
    (folder / "config.json").write_text(json.dumps(saved))
    with pytest.raises(
        UserError,
        match=rf"config\.json .*format must be {FORMAT}, got {number or 1!r}: use commit ",
    ):
        Run.open(folder)
    assert json.loads((folder / "config.json").read_text()) == saved


def test_a_lock_clears_what_killed_runs_began_and_nothing_else(folder):
    ours = [
        f".{name}.12.tmp"
        for name in ("config.json", "vocabulary.txt", "metrics.jsonl", "results.json")
    ]
    others = [".evaluation.json.12.tmp", NAME, "config.json", "vocabulary.txt"]
    for name in (".probe-12", *ours, others[0]):
        (folder / name).touch()
    with Run.open(folder):
        assert files.names(folder) == sorted(others)


def test_the_lock_of_a_process_that_is_gone_and_a_check_of_the_lock_keep_nobody_out(folder):
    (folder / NAME).write_text("1")  # A process that is there, but does not hold it.
    with Run.open(folder):
        (folder / ".results.json.12.tmp").touch()  # The run that holds the lock is writing it.
        before = {path: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(UserError, match=rf"\b{os.getpid()}\b.*/run\b.*--workdir"):
            Run.open(folder)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    with open(folder / NAME, "a+") as handle:  # A sweep checks whether a run is going on.
        fcntl.flock(handle, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, [handle, fcntl.LOCK_UN]).start()
        Run.open(folder).close()


@pytest.mark.full
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("status", "named"), [(401, "gcloud"), (403, "gcloud"), (503, "made by a test")]
)
def test_a_bucket_that_cannot_be_read_is_no_folder_without_a_run(bucket, storage, status, named):
    """Otherwise a second run, of other settings, would begin in the folder of the first."""
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
    runs = read_runs([str(folder)])
    assert [run.name for run in runs] == ["seed=1", "seed=2+learning_rate=0.001"]
    assert [run.config.seed for run in runs] == [1, 2]
    results = json.loads((folder / "results.json").read_text())
    for run in runs:
        assert run.row([])["test"] == pytest.approx(
            results["members"][run.name]["test"]["perplexity"]
        )
        assert {record["member"] for record in run.records} == {run.name}
    runs = read_runs([str(folder), str(recorded_run.make(tmp_path / "own"))])
    assert [run.name for run in runs] == ["both: seed=1", "both: seed=2+learning_rate=0.001", "own"]


@pytest.mark.full
def test_a_folder_of_runs_and_folders_of_the_same_name(tmp_path):
    for name in ("b", "a"):
        recorded_run.make(tmp_path / "sweep" / name, seed=ord(name))
    (tmp_path / "sweep" / "results.csv").write_text("")
    assert [
        run.name for run in read_runs([str(tmp_path / "sweep"), str(tmp_path / "sweep" / "a")])
    ] == ["a", "b"]
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
    assert (row["state"], row["best_valid"], row["test"]) == ("diverged", math.inf, math.inf)
    assert "| ppl >1e9 | ppl >1e9 |" in list(markdown([], [row]))[2]
    assert dataclasses.replace(run, measure=Measure.BPC).row([])["best_valid"] == math.inf


def test_means_leave_out_what_has_not_finished_or_diverged():
    rows = [
        {
            "lr": 1,
            "seed": 1,
            "state": "finished",
            "measure": "ppl",
            "best_valid": 10.0,
            "test": 12.0,
        },
        {
            "lr": 1,
            "seed": 2,
            "state": "finished",
            "measure": "ppl",
            "best_valid": 14.0,
            "test": 13.0,
        },
        {"lr": 2, "seed": 1, "state": "stopped after step 3", "measure": "ppl", "best_valid": 1.0},
        {"lr": 2, "seed": 2, "state": "finished", "measure": "ppl", "best_valid": 5.0, "test": 6.0},
        {
            "lr": 2,
            "seed": 3,
            "state": "finished",
            "measure": "ppl",
            "best_valid": math.inf,
            "test": math.nan,
        },
    ]
    first, second = means(["lr", "seed"], rows)
    assert (first["lr"], first["best_valid"], first["test"], first["seeds"]) == (1, 12.0, 12.5, 2)
    assert first["best_valid_deviation"] == pytest.approx(math.sqrt(8))
    assert (second["best_valid"], second["test"]) == (
        5.0,
        6.0,
    ) and "best_valid_deviation" not in second
    lines = list(markdown(["lr", "seed"], [{"run": f"r|{i}"} | row for i, row in enumerate(rows)]))
    assert lines[2] == "| r\\|0 | 1 | 1 | ppl 10.00 | ppl 12.00 |  |  | finished |"
    assert lines[-2] == "| 1 | ppl 12.00 ± 2.83 | ppl 12.50 ± 0.71 | 2 |"
    assert means(["lr", "seed"], rows[1:3]) == []
