"""Tests runs that another version of the code began: the number of their format, and what a resumed run logs."""

import contextlib
import json
import shutil

import numpy as np
import pytest

from txl_jax.config import (
    CorpusName,
    DataConfig,
    DropoutConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.errors import UserError
from txl_jax.jobs import changes, ensemble, evaluate, generate, train
from txl_jax.jobs.split_off import split_off
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.runtime import format as file_format
from txl_jax.runtime.format import FORMAT
from txl_jax.runtime.metrics_log import read_metrics

pytestmark = pytest.mark.full

MEMBERS = ({"seed": 1}, {"seed": 2, "model.dropout.attention": 0.2})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], 600)))
    return read_corpus(DataConfig(corpus=CorpusName.TEXT, file=str(path)), "nowhere", str(path.parent))


@pytest.fixture(scope="module")
def config():
    return ExperimentConfig(
        model=ModelConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, dropout=DropoutConfig(attention=0.2)),
        data=DataConfig(corpus=CorpusName.TEXT, file="words.txt"),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
        train=TrainConfig(
            steps=8,
            batch_size=4,
            segment_len=6,
            mem_len=5,
            segments_per_call=2,
            log_every=2,
            eval_every=4,
            checkpoint_every=4,
        ),
        eval=EvalConfig(batch_size=1, segment_len=8, mem_len=9, clamp_len=None, segments_per_call=2, valid_tokens=200),
    )


class StopAfter:
    """Asks to stop at the `calls`-th question."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self):
        self.calls -= 1
        return self.calls <= 0


def rewrite(workdir, **values):
    """Changes the top of config.json; None takes an entry away."""
    saved = json.loads(workdir.config_file.read_text())
    changed = {name: value for name, value in (saved | values).items() if value is not None}
    workdir.config_file.write_text(json.dumps(changed))


def recorded(workdir, name="format"):
    return json.loads(workdir.config_file.read_text())[name]


@pytest.fixture(scope="module")
def templates(config, corpus, tmp_path_factory):
    """A run that was stopped after two updates, and the same when it has ended."""
    stopped, finished = (Workdir(tmp_path_factory.mktemp(name)) for name in ("stopped", "finished"))
    assert train.run(config, corpus, stopped, stop_requested=StopAfter(1)).step == 2
    shutil.copytree(stopped.path, finished.path, dirs_exist_ok=True)
    assert train.run(config, corpus, finished).finished
    return stopped, finished


@pytest.fixture
def stopped(templates, tmp_path):
    """A copy of the stopped run."""
    return Workdir(shutil.copytree(templates[0].path, tmp_path / "run"))


@pytest.fixture
def older(config, corpus, tmp_path):
    """A run of format 1 that was stopped after two updates."""
    workdir = Workdir(tmp_path / "older")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(file_format, "FORMAT", 1)
        train.run(config, corpus, workdir, stop_requested=StopAfter(1))
    rewrite(workdir, format=None)
    return workdir


def start_again(workdir, config, corpus, members=()):
    """The part of a start that compares with the one before and records itself; returns the lines that it would log."""
    with contextlib.ExitStack() as stack:
        return train.claim(workdir, config, TextInfo.of(corpus), stack, members)


def test_a_new_run_has_the_number_of_this_code_and_logs_nothing_when_it_resumes(templates, config, corpus):
    stopped, finished = templates
    assert recorded(stopped) == recorded(finished) == FORMAT == 2
    assert "format" not in (finished.path / "log.txt").read_text()
    assert start_again(finished, config, corpus) == []


def test_an_older_run_with_other_draws_continues_and_logs_once_what_changed(older, config, corpus, capsys):
    assert train.run(config, corpus, older).finished
    [line] = [line for line in capsys.readouterr().out.splitlines() if "format" in line]
    assert "the format was 1 and is now 2: dropout on attention probabilities draws other numbers" in line
    assert line in (older.path / "log.txt").read_text()
    assert start_again(older, config, corpus) == [] and recorded(older) == 2
    assert [record["step"] for record in read_metrics(older.path) if record["kind"] == "train"] == [2, 4, 6, 8]


def test_the_number_rises_with_the_first_checkpoint(older, config, corpus):
    for _ in range(2):  # Starts that end without one.
        assert len(start_again(older, config, corpus)) == 1 and recorded(older) == 1
    shutil.rmtree(older.latest)  # Nothing that was drawn is left.
    assert start_again(older, config, corpus) == [] and recorded(older) == 2


def test_an_older_run_without_these_draws_logs_nothing_and_gets_the_number(config, corpus, tmp_path):
    plain = config_tree.replace(config, {"model.dropout.attention": 0.0})
    workdir = Workdir(tmp_path).create()
    workdir.record(plain, TextInfo.of(corpus), format=1)
    assert start_again(workdir, plain, corpus) == [] and recorded(workdir) == 2


def test_an_older_run_is_scored_and_continued_in_text_as_ever(templates, config, corpus, tmp_path):
    found = []
    for name, number in (("new", 2), ("old", None)):
        workdir = Workdir(shutil.copytree(templates[1].path, tmp_path / name))
        rewrite(workdir, format=number)
        scores = evaluate.run(config, corpus, workdir, trained_on=TextInfo.of(corpus))["test"]
        asked = config_tree.replace(config, {"generate.length": 20})
        found.append((scores, generate.run(asked, corpus.vocabulary, workdir)))
        assert json.loads(workdir.config_file.read_text()).get("format") == number
    assert found[0] == found[1]


def test_a_newer_run_is_refused_in_one_sentence_and_stays_as_it_is(stopped, config, corpus):
    rewrite(stopped, format=FORMAT + 1, config={"model.n_later": 3})
    before = {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()}
    acts = (
        lambda: train.run(config, corpus, stopped),
        lambda: stopped.check_same_settings(config),
        lambda: Workdir(stopped.path).load(),
    )
    for act in acts:
        with pytest.raises(UserError) as error:
            act()
        assert f"config.json has format {FORMAT + 1} and" in str(error.value) and f"up to {FORMAT};" in str(error.value)
        assert "install a newer txl_jax" in str(error.value) and "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("number", [0, "2", 1.5])
def test_a_number_that_is_none_is_damage(stopped, number):
    rewrite(stopped, format=number)
    with pytest.raises(UserError, match=r"config\.json is damaged.*format"):
        stopped.load()


@pytest.mark.parametrize(
    ("rate", "members", "lines"), [(0.0, (), 0), (0.1, (), 1), (0.0, MEMBERS, 1), (0.1, MEMBERS, 1)]
)
def test_draws_of_one_member_are_enough(config, rate, members, lines):
    base = config_tree.replace(config, {"model.dropout.attention": rate})
    assert len(changes.of_draws(1, base, members)) == lines
    assert changes.of_draws(FORMAT, base, members) == []


def test_an_ensemble_logs_it_too_and_a_member_that_is_split_off_keeps_the_number(config, corpus, tmp_path):
    whole = Workdir(tmp_path / "ensemble")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(file_format, "FORMAT", 1)
        ensemble.run(config, MEMBERS, corpus, whole, stop_requested=StopAfter(1))
    assert recorded(whole) == 1 and set(recorded(whole, "attention")) == {"training", "evaluation"}
    made = split_off(whole.path, "seed=1", tmp_path / "one", log=lambda line: None)
    assert recorded(made) == 1 and recorded(made, "attention") == recorded(whole, "attention")
    for workdir, members in ((whole, MEMBERS), (made, ())):
        [line] = start_again(workdir, workdir.load()[0] if workdir is made else config, corpus, members)
        assert line.startswith("the format was 1 and is now 2: ") and recorded(workdir) == 1
