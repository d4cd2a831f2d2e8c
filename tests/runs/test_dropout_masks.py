"""Tests the version of dropout masks in a run's record: who may resume, and what is recorded.

Steps are empty directories here, as nothing is trained. Real runs of version 1 are in
tests/old_runs.
"""

import contextlib
import json
from pathlib import Path

import pytest

from support import runs
from support.encoded_text import own_text
from txl_jax.config import ExperimentConfig, Tokenizer, config_tree
from txl_jax.data.word_tokens import WordVocabulary
from txl_jax.errors import UserError
from txl_jax.runs import ensemble
from txl_jax.runs.run import MASKS_VERSION, RESULTS, Run, TextInfo
from txl_jax.runtime.lock import NAME, is_held

# The fields of `DropoutConfig` that are rates.
RATES = ("rate", "attention", "input", "output", "qkv", "embedding")
STEPS = 12
# A config without dropout, and one with it. The file of the text is never read.
CONFIG = config_tree.replace(
    ExperimentConfig(data=own_text(file="a.txt", kind=Tokenizer.WORD)),
    {"model.dropout.rate": 0.0, "train.steps": STEPS},
)
WITH = config_tree.replace(CONFIG, {"model.dropout.rate": 0.1})
TEXT = TextInfo("text", "own text", "d" * 64, WordVocabulary(("<eos>", "the", "<unk>")))
# The step of the latest checkpoint, after which updates are left.
DONE = 8
assert DONE < STEPS
LATER_VERSION = MASKS_VERSION + 1
OTHERS = (1, LATER_VERSION)


def record_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def rewrite(folder: Path, version: int) -> None:
    """Changes the version in a record. Records of version 1 do not name it."""
    record = record_of(folder)
    del record["dropout_masks"]
    if version != 1:
        record["dropout_masks"] = version
    (folder / "config.json").write_text(json.dumps(record))


def make(folder: Path, config=WITH, *, version=1, done=DONE, members=()) -> Path:
    """Records a run with masks of a version, and with a checkpoint of step `done`."""
    runs.record(folder, config, TEXT, members)
    rewrite(folder, version)
    # The lock of the process that trained it, which is gone.
    (folder / NAME).write_text("1")
    if done:
        (folder / "checkpoints" / "latest" / str(done)).mkdir(parents=True)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    """Returns the bytes of each file below a directory, and None for each directory."""
    by_name: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        by_name[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return by_name


def start(folder: Path, config=WITH, members=()) -> int:
    """Starts a run up to its first update. Returns the version of its masks."""
    with Run.open(folder) as run:
        run.compare(config, members)
        assert is_held(folder)
        run.record_start(config, TEXT, members=members)
        return run.dropout_masks


@contextlib.contextmanager
def raises_without_writing(folder: Path, version: int, *words: str):
    """The block must raise an error that names the run and the versions, and write nothing."""
    before = contents(folder)
    with pytest.raises(UserError) as caught:
        yield
    for word in (str(folder), f"version {MASKS_VERSION}", f"version {version}", *words):
        assert word in str(caught.value)
    assert contents(folder) == before


def test_a_new_run_records_the_version_of_its_masks(tmp_path):
    """Version 2: with another number here, older runs with dropout could no longer resume."""
    runs.record(tmp_path / "run", WITH, TEXT)
    assert record_of(tmp_path / "run")["dropout_masks"] == MASKS_VERSION == 2
    assert start(tmp_path / "run") == MASKS_VERSION


@pytest.mark.parametrize(
    ("name", "version"), [*((name, 1) for name in RATES), ("rate", LATER_VERSION)]
)
def test_a_run_with_other_masks_is_not_trained_further(tmp_path, name, version):
    config = config_tree.replace(CONFIG, {f"model.dropout.{name}": 0.1})
    folder = make(tmp_path / "run", config, version=version)
    with raises_without_writing(folder, version, f"--init_from={folder}"), Run.open(folder) as run:
        run.compare(config)
    # It can be read, to be scored or sampled.
    assert Run.read(folder).dropout_masks == version


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize(
    ("config", "done"), [(CONFIG, DONE), (WITH, 0)], ids=["without dropout", "without steps"]
)
def test_a_run_that_has_drawn_no_masks_gets_those_of_this_version(tmp_path, version, config, done):
    folder = make(tmp_path / "run", config, version=version, done=done)
    assert start(folder, config) == MASKS_VERSION
    assert record_of(folder)["dropout_masks"] == MASKS_VERSION


@pytest.mark.parametrize("version", OTHERS)
def test_a_run_without_updates_left_keeps_its_version(tmp_path, version):
    """The same command shows its results again. With more steps it would be trained further."""
    config = config_tree.replace(WITH, {"train.steps": DONE})
    folder = make(tmp_path / "run", config, version=version)
    assert start(folder, config) == version
    assert record_of(folder).get("dropout_masks", 1) == version
    with raises_without_writing(folder, version), Run.open(folder) as run:
        run.compare(WITH)
    # A run that was stopped may end where it is.
    assert start(make(tmp_path / "stopped", version=version), config) == version


def test_with_patience_a_run_may_have_ended_before(tmp_path):
    config = config_tree.replace(WITH, {"train.patience": 2})
    folder = make(tmp_path / "run", config)
    with raises_without_writing(folder, 1), Run.open(folder) as run:
        run.compare(config)

    # The results say that it has ended at its checkpoint.
    results = {"steps": DONE, "eval": config_tree.to_dict(config.eval)}
    (folder / RESULTS).write_text(json.dumps(results))
    assert start(folder, config) == 1
    # With another patience, or by other evaluations, it may not have ended there.
    for changes in ({"train.patience": 3}, {"train.patience": None}, {"eval.mem_len": 7}):
        with raises_without_writing(folder, 1), Run.open(folder) as run:
            run.compare(config_tree.replace(config, changes))

    # Results of an earlier end, after which the run continued.
    (folder / RESULTS).write_text(json.dumps(results | {"steps": DONE - 1}))
    with raises_without_writing(folder, 1), Run.open(folder) as run:
        run.compare(config)


def test_the_rates_of_members_decide_not_those_of_their_base(tmp_path):
    """A member may have dropout though its base has none, and no member though their base has."""
    some = [{"seed": 1}, {"model.dropout.output": 0.5}]
    folder = make(tmp_path / "some", CONFIG, members=some)
    with raises_without_writing(folder, 1, "--mode=split"), Run.open(folder) as run:
        run.compare(CONFIG, some)

    none = [{"seed": 1, "model.dropout.rate": 0.0}, {"seed": 2, "model.dropout.rate": 0.0}]
    assert start(make(tmp_path / "none", members=none), WITH, none) == MASKS_VERSION


def test_a_member_that_is_split_off_has_the_masks_of_its_ensemble(tmp_path, monkeypatch):
    members = [{"seed": 1}, {"seed": 2}]
    folder = make(tmp_path / "both", members=members)
    # The checkpoint is an empty directory, so there is nothing to copy.
    for name in ("_copy_latest", "_copy_best", "_copy_records"):
        monkeypatch.setattr(ensemble, name, lambda *arguments: DONE)
    ensemble.split_off(str(folder), "seed=2", str(tmp_path / "alone"))
    assert Run.read(tmp_path / "alone").dropout_masks == 1


def test_a_record_that_changes_before_its_lock_is_not_used(tmp_path):
    """A run with masks of another version is locked by `compare`, not when it is opened."""
    folder = make(tmp_path / "run", CONFIG)
    with Run.open(folder) as run:
        before = (folder / "config.json").read_text()
        (folder / "config.json").write_text(f"{before} ")
        with pytest.raises(UserError, match=r"changed the record .*/run\b"):
            run.compare(CONFIG)


@pytest.mark.parametrize("version", ["2", 2.0, True, None, [2]])
def test_a_version_that_is_not_a_whole_number_is_named(tmp_path, version):
    runs.record(tmp_path, CONFIG, TEXT)
    (tmp_path / "config.json").write_text(
        json.dumps(record_of(tmp_path) | {"dropout_masks": version})
    )
    for read in (Run.read, Run.open):
        with pytest.raises(UserError, match=r"config\.json.*dropout_masks"):
            read(tmp_path)
