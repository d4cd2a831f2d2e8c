"""Tests the folder of a run: what is written and read back, and the refusals of another text or vocabulary."""

import fcntl
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, Tokenizer, TokenizerConfig
from txl_jax.config import tree as config_tree
from txl_jax.data.vocabulary import dumps
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.runs.run import FORMAT, TextInfo, Workdir

CONFIG = ExperimentConfig(
    data=DataConfig(corpus=CorpusName.TEXT, file="a.txt", tokenizer=TokenizerConfig(kind=Tokenizer.WORD))
)
WORDS = WordVocabulary(("<eos>", "the", "<unk>", "cat"))
TEXT = TextInfo("text", "own text", "d" * 64, WORDS)


@pytest.fixture
def workdir(tmp_path):
    made = Workdir(tmp_path / "run").create()
    made.record(CONFIG, TEXT)
    return made


def test_what_was_recorded_is_loaded(workdir):
    assert workdir.load() == (CONFIG, TEXT)
    assert workdir.check_same_run(CONFIG, TEXT) == []


def test_a_setting_that_does_not_touch_training_may_change(workdir):
    [note] = workdir.check_same_run(config_tree.replace(CONFIG, {"train.log_every": 7}), TEXT)
    assert re.search(r"--train\.log_every\D*\b200\b\D*\b7\b", note)


def test_a_vocabulary_of_other_words_is_refused(workdir):
    """Ids would mean other words, and shapes would be the same."""
    exchanged = WordVocabulary(("<eos>", "the", "<unk>", "dog"))
    Path(workdir.vocabulary_file).write_text(dumps(exchanged))
    with pytest.raises(ValueError, match=r"vocabulary\.txt\b.*\b4\b"):
        workdir.load()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("the\ncat\n")])
def test_a_missing_or_damaged_vocabulary_is_named(workdir, damage):
    damage(Path(workdir.vocabulary_file))
    with pytest.raises(ValueError, match=r"vocabulary\.txt\b(?!.*\b4\b)"):
        workdir.load()


@pytest.mark.parametrize(
    ("digest", "words", "named"),
    [("e" * 64, WORDS.words, "own text"), (TEXT.digest, (*WORDS.words, "dog"), r"4\b.*\b5")],
)
def test_another_text_or_vocabulary_is_refused(workdir, digest, words, named):
    """The text's digest decides, whatever its description says; the vocabulary may be another file of words."""
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        workdir.check_same_run(CONFIG, TextInfo("text", "own text", digest, WordVocabulary(words)))


def test_settings_are_compared_before_a_text_is_read(workdir, tmp_path):
    workdir.check_same_settings(CONFIG)
    Workdir(tmp_path / "new").check_same_settings(CONFIG)
    with pytest.raises(ValueError, match=r"--data\.tokenizer\.min_count\D*\b1\b\D*\b2\b"):
        workdir.check_same_settings(config_tree.replace(CONFIG, {"data.tokenizer.min_count": 2}))
    warm = config_tree.replace(CONFIG, {"init_from": "old"})
    Workdir(tmp_path / "warm").create().record(warm, TEXT)
    for recorded, changed in ((workdir, warm), (Workdir(tmp_path / "warm"), CONFIG)):
        with pytest.raises(ValueError, match=r"init_from was .* and is now"):
            recorded.check_same_settings(changed)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 3, "config": {}}', '{"format": 3, "config": 7, "text": {}}', ""]
)
def test_a_damaged_config_is_named(workdir, text):
    Path(workdir.config_file).write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        workdir.load()


@pytest.mark.parametrize("number", [None, 2, "3", FORMAT + 1])
def test_a_record_of_another_format_is_refused_whatever_else_it_has(workdir, number):
    saved = {"config": {"model.n_later": 3}} | ({} if number is None else {"format": number})
    Path(workdir.config_file).write_text(json.dumps(saved))
    with pytest.raises(UserError, match=rf"config\.json has format {number or 1!r} and .* {FORMAT}; commit \w+"):
        workdir.check_same_settings(CONFIG)
    assert json.loads(Path(workdir.config_file).read_text()) == saved


def refusal(workdir):
    """The sentence with which a workdir is refused; empty if it opens."""
    try:
        workdir.load()
    except UserError as error:
        return str(error)
    return ""


def test_a_flipped_bit_in_what_is_recorded_is_named_or_harmless(workdir):
    for path in map(Path, (workdir.config_file, workdir.vocabulary_file)):
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            damaged = bytearray(whole)
            damaged[place] ^= (1, 32, 128)[place % 3]  # Other digits, other cases, no UTF-8.
            path.write_bytes(damaged)
            if error := refusal(workdir):
                assert error.startswith(f"{workdir.path}/") and "\n" not in error
        path.write_bytes(whole)


def test_a_lock_clears_what_killed_runs_began_and_nothing_else(workdir):
    ours = [
        ".probe-12",
        ".config.json.12.tmp",
        ".vocabulary.txt.12.tmp",
        ".metrics.jsonl.12.tmp",
        ".results.json.12.tmp",
    ]
    others = [".evaluation.json.12.tmp", ".lock", "config.json", "vocabulary.txt"]
    for name in (*ours, others[0]):
        (workdir.path / name).touch()
    for name, age in ((".seen-by-all-1", 7200), (".seen-by-all-2", 0)):
        (workdir.path / name).touch()
        os.utime(workdir.path / name, (time.time() - age,) * 2)
    others.append(".seen-by-all-2")
    with workdir.lock():
        assert sorted(path.name for path in workdir.path.iterdir()) == sorted(others)


def test_the_lock_of_a_process_that_is_gone_keeps_nobody_out(workdir):
    (workdir.path / ".lock").write_text("1")  # A process that is there, but does not hold it.
    with workdir.lock(), pytest.raises(UserError, match=rf"\b{os.getpid()}\b.*/run\b.*--workdir"):
        workdir.lock()


def test_a_check_of_the_lock_refuses_nobody(workdir):
    """A sweep checks whether a run is going on."""
    with open(workdir.path / ".lock", "a+") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, [handle, fcntl.LOCK_UN]).start()
        workdir.lock().close()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        Workdir(tmp_path).load()
