"""Tests the record of a run's implementations of attention: kept on resume and in scoring, or the change is logged.

The implementation in tiles is replaced here by the reference, off by a part in 100,000 for each key of its tile, so
that two tiles give other numbers, and the test chooses what is there and what "auto" prefers.
"""

import contextlib
import json
import shutil

import numpy as np
import pytest

from support import processes
from txl_jax.assemble import assemble
from txl_jax.config import (
    CorpusName,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    ModelConfig,
    Network,
    OptimizerConfig,
    TrainConfig,
)
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.errors import UserError
from txl_jax.jobs import attention_record, restore, train
from txl_jax.jobs.workdir import TextInfo, Workdir
from txl_jax.ops.attention import Tile, cached, choice, dispatch, kernels
from txl_jax.ops.attention.tiled import limits
from txl_jax.runtime.metrics_log import read_metrics

SMALL, LARGE = Tile(4, 8), Tile(8, 16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], 600)))
    return read_corpus(DataConfig(corpus=CorpusName.TEXT, file=str(path)), "nowhere", str(path.parent))


CONFIG = ExperimentConfig(
    model=ModelConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, init_std=0.5),
    data=DataConfig(corpus=CorpusName.TEXT, file="words.txt"),
    optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
    train=TrainConfig(
        steps=4,
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


def changed(**values):
    return config_tree.replace(CONFIG, {name.replace("__", "."): value for name, value in values.items()})


class Tiles:
    """A substitute for the implementation in tiles: the tile that is chosen now, and why it cannot serve."""

    def __init__(self, tile):
        self.tile = tile
        self.refusal = None

    def patch(self, monkeypatch):
        refusal_of = choice.refusal_of
        monkeypatch.setattr(
            choice, "refusal_of", lambda path, problem: self.refusal if path == "tiled" else refusal_of(path, problem)
        )
        monkeypatch.setattr(limits, "is_faster", lambda problem: self.refusal is None)
        monkeypatch.setattr(limits, "default_tile", lambda problem: self.tile)
        monkeypatch.setattr(kernels, "training", self._training)
        monkeypatch.setattr(kernels, "cached", self._cached)
        return self

    def _training(self, implementation):
        def compute(*, visibility, dropout, **arrays):
            return dispatch._reference(arrays, visibility, dropout) * (1 + 1e-5 * implementation.tile.key)

        return compute

    def _cached(self, implementation):
        return lambda *arguments: cached.cached_attention(*arguments) * (1 + 1e-5 * implementation.tile.key)


@pytest.fixture
def tiles(monkeypatch):
    return Tiles(SMALL).patch(monkeypatch)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """The run with small tiles when it has ended, and stopped in the middle."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        Tiles(SMALL).patch(monkeypatch)
        for name, stops in (("stopped", True), ("whole", False)):
            found[name] = Workdir(tmp_path_factory.mktemp(name))
            assert train.run(CONFIG, corpus, found[name], stop_requested=lambda: stops).finished is not stops  # noqa: B023
    return found


@pytest.fixture
def stopped(runs, tmp_path):
    return Workdir(shutil.copytree(runs["stopped"].path, tmp_path / "run"))


def recorded(workdir):
    return json.loads(workdir.config_file.read_text()).get("attention")


def rewrite(workdir, attention):
    """Changes the record of a run; None takes it away."""
    saved = json.loads(workdir.config_file.read_text())
    del saved["attention"]
    workdir.config_file.write_text(json.dumps(saved | ({} if attention is None else {"attention": attention})))


def lines(out, word="attention"):
    return [line for line in out.splitlines() if line.startswith((word, f"note      {word}"))]


def losses(workdir):
    return [(record["kind"], record["step"], record["loss"]) for record in read_metrics(workdir.path)]


def test_a_run_records_what_it_chose_and_logs_it_once_with_the_reason(runs):
    assert recorded(runs["whole"]) == {"training": "tiled 4x8", "evaluation": "tiled 4x8"}
    [line] = lines((runs["whole"].path / "log.txt").read_text())
    assert "attention training tiled 4x8, evaluation tiled 4x8 (no kernels for the platform cpu; tiles are" in line


def test_a_resumed_run_keeps_its_tiles_and_equals_the_undisturbed_one(runs, stopped, corpus, tiles, capsys):
    tiles.tile = LARGE
    assert train.run(CONFIG, corpus, stopped).finished
    assert losses(stopped) == losses(runs["whole"])
    assert recorded(stopped) == recorded(runs["whole"])
    [line] = lines(capsys.readouterr().out)
    assert line.startswith("attention training tiled 4x8, evaluation tiled 4x8 (as the run was begun)")


def test_without_the_record_the_numbers_would_be_others(runs, stopped, corpus, tiles, monkeypatch):
    tiles.tile = LARGE
    monkeypatch.setattr(attention_record, "kept", lambda record, old, new: {})
    assert train.run(CONFIG, corpus, stopped).finished
    assert losses(stopped) != losses(runs["whole"])
    found, expected = ([loss for *_, loss in losses(each)] for each in (stopped, runs["whole"]))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def start_again(workdir, config, corpus):
    """The part of a start that chooses, compares and records; returns the lines that it would log."""
    recorded = restore.recorded_attention(workdir, config)
    components = assemble(config, vocab_size=corpus.vocabulary.size, recorded_attention=recorded)
    with contextlib.ExitStack() as stack:
        return train.claim(workdir, config, TextInfo.of(corpus), stack, attention=components.attention)


def test_what_cannot_serve_any_more_is_replaced_with_one_line(stopped, corpus, tiles):
    tiles.refusal = "the head width is 4, below 8"
    [line] = start_again(stopped, CONFIG, corpus)
    assert line.startswith("attention: training was tiled 4x8 and is now reference, ")
    assert "evaluation was tiled 4x8 and is now reference" in line
    assert recorded(stopped) == {"training": "reference", "evaluation": "reference"}
    assert start_again(stopped, CONFIG, corpus) == []


def test_kernels_of_another_platform_are_replaced_with_one_line(stopped, corpus, tiles):
    rewrite(stopped, {"training": "fused mosaic_roll 128x256", "evaluation": "tiled 4x8"})
    [line] = start_again(stopped, CONFIG, corpus)
    assert line.startswith("attention: training was fused mosaic_roll 128x256 and is now tiled 4x8 (no kernels for the")
    assert "evaluation" not in line and recorded(stopped) == {"training": "tiled 4x8", "evaluation": "tiled 4x8"}


def test_another_setting_is_a_new_choice_and_is_announced(stopped, corpus, tiles):
    setting, found = start_again(stopped, changed(model__attention="reference"), corpus)
    assert setting == "--model.attention was auto and is now reference"
    assert found.startswith("attention: training was tiled 4x8 and is now reference, evaluation was tiled 4x8 and is")
    assert recorded(stopped) == {"training": "reference", "evaluation": "reference"}
    tiles.tile = LARGE
    _, choice = start_again(stopped, changed(model__attention="tiled"), corpus)
    assert choice.startswith("attention: training was reference and is now tiled 8x16, ")
    tiles.tile = SMALL  # A tile is kept too where the path was asked for.
    assert start_again(stopped, changed(model__attention="tiled"), corpus) == []
    assert recorded(stopped) == {"training": "tiled 8x16", "evaluation": "tiled 8x16"}


def test_other_lengths_of_evaluation_choose_anew_and_training_stays(stopped, corpus, tiles):
    tiles.tile = LARGE
    setting, choice = start_again(stopped, changed(eval__mem_len=12), corpus)
    assert setting == "--eval.mem_len was 9 and is now 12"
    assert choice.startswith("attention: evaluation was tiled 4x8 and is now tiled 8x16 (")
    assert recorded(stopped) == {"training": "tiled 4x8", "evaluation": "tiled 8x16"}


def test_a_run_from_before_the_record_keeps_the_reference_in_training(stopped, corpus, tiles):
    rewrite(stopped, None)
    assert start_again(stopped, CONFIG, corpus) == []
    assert recorded(stopped) == {"training": "reference", "evaluation": "tiled 4x8"}


@pytest.mark.parametrize("damage", [{"training": "tild 4x8"}, {"training": 7}, ["tiled 4x8"], "tiled"])
def test_a_damaged_record_is_named(stopped, damage):
    rewrite(stopped, damage)
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        stopped.load()


def test_an_lstm_has_no_attention_to_record(corpus, tmp_path):
    workdir = Workdir(tmp_path)
    lstm = changed(model__network=Network.LSTM)
    assert start_again(workdir, lstm, corpus) == [] and recorded(workdir) is None
    assert start_again(workdir, lstm, corpus) == []


# Scoring


def assembled(workdir, config, corpus):
    """The implementation that a trained run is scored with, and the lines about it."""
    logged = []
    components = restore.assemble_trained(config, workdir, vocab_size=corpus.vocabulary.size, log=logged.append)
    assert components.model.attention.cached == components.attention.evaluation.implementation
    return str(components.attention.evaluation.implementation), logged


def test_a_trained_run_is_scored_with_what_it_recorded(runs, corpus, tiles):
    tiles.tile = LARGE
    assert assembled(runs["whole"], CONFIG, corpus) == ("tiled 4x8", [])


def test_scoring_otherwise_is_logged(stopped, corpus, tiles):
    tiles.tile = LARGE
    found, [line] = assembled(stopped, changed(eval__segment_len=16), corpus)
    assert found == "tiled 8x16" and line.startswith("attention: evaluation tiled 8x16 (")
    found, [line] = assembled(stopped, changed(model__attention="reference"), corpus)
    assert found == "reference" and line.startswith("attention: evaluation reference (by model.attention")
    rewrite(stopped, {"training": "fused triton 64x64", "evaluation": "fused triton 64x64"})
    found, [line] = assembled(stopped, CONFIG, corpus)
    assert found == "tiled 8x16"
    assert line.startswith("attention: evaluation was fused triton 64x64 and is now tiled 8x16 (no kernels for the")


# Hosts

SCRIPT = """
import jax

from experiments.cli import hosts
from txl_jax.attention_choice import AttentionChoice, Chosen
from txl_jax.jobs import attention_record
from txl_jax.ops.attention import Implementation

hosts._given = dict  # No flags here.
hosts.join()
for own in ("tiled 4x8", "tiled 4x8" if jax.process_index() == 0 else "fused triton 64x64"):
    chosen = Chosen(Implementation.parse(own), "a test")
    try:
        attention_record.check_same_on_all(AttentionChoice(chosen, chosen))
        print("same", flush=True)
    except ValueError as error:
        if jax.process_index() == 0:
            print(error, flush=True)
"""


def test_hosts_that_choose_otherwise_are_refused_together():
    (code, out, err), (other_code, _, other_err) = processes.finish(processes.start("-c", SCRIPT, devices=1))
    assert (code, other_code) == (0, 0), err + other_err
    same, refused = out.splitlines()
    assert same == "same" and refused.startswith("process 1: it would compute attention by fused triton 64x64 in train")
    assert "process 0 by tiled 4x8 in training, tiled 4x8 in evaluation" in refused and "--model.attention" in refused
