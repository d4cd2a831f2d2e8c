"""Tests the record of a run's implementations of attention: kept on resume and in scoring, or the change is logged.

The tests choose what is there and what "auto" prefers; two tiles give other numbers in the last digits.
"""

import json
import shutil
import types
from pathlib import Path

import pytest

from support import runs, tiny_run
from txl_jax.config import CorpusName, DataConfig, ExperimentConfig, ModelConfig, config_tree
from txl_jax.ops.attention import Implementation, Implementations, Tile, choose
from txl_jax.runs import weights
from txl_jax.runs.build import AttentionChoice, Chosen, build
from txl_jax.runs.run import Run, check_same_attention
from txl_jax.runtime import distributed

SMALL, LARGE = Tile(4, 8), Tile(8, 16)


def test_a_start_with_other_settings_keeps_what_they_do_not_touch():
    run = Run("somewhere")
    assert run.attention_for(ExperimentConfig()) == Implementations("auto", "auto"), "a new run"
    run.is_new, run.config = False, ExperimentConfig()
    run.attention = {"training": "tiled 4x8", "evaluation": "reference"}
    tiled, reference = Implementation("tiled", tile=SMALL), Implementation("reference")
    for changes, kept in (
        ({"train.log_every": 7}, (tiled, reference)),
        ({"eval.mem_len": 12}, (tiled, "auto")),
        ({"model.attention": "reference"}, ("reference", "reference")),
    ):
        assert run.attention_for(config_tree.replace(run.config, changes)) == Implementations(*kept)
    run.attention = {"training": "fused triton 64x64", "evaluation": "fused cudnn"}
    assert run.attention_for(run.config) == Implementations("auto", "auto"), "kernels that are gone"


def test_hosts_that_choose_otherwise_are_refused(monkeypatch):
    """That what they compare reaches all of them is tested in runtime/test_distributed.py."""
    compared: list = []
    monkeypatch.setattr(distributed, "assert_same_on_all", lambda facts, advice: compared.append(facts))
    for training in ("tiled 4x8", "tiled 4x8", "fused mosaic_roll 64x128"):
        check_same_attention(AttentionChoice(*[Chosen(Implementation.parse(training), "a reason")] * 2))
    first, same, other = compared
    assert first == same != other and other["attention in training"] == "fused mosaic_roll 64x128"


SIZES = dict.fromkeys(("train.batch_size", "train.steps", "train.eval_every", "train.checkpoint_every"), 4)
SIZES |= {"train.segments_per_call": 2, "train.log_every": 2, "eval.valid_tokens": 200}
MODEL = ModelConfig(n_layer=1, d_model=8, n_head=2, d_head=4, d_inner=8, init_std=0.5)
DATA = DataConfig(corpus=CorpusName.TEXT, file="words.txt")
CONFIG = config_tree.replace(tiny_run.CONFIG, SIZES | {"data": DATA, "model": MODEL})


def choose_tiles(monkeypatch):
    """Returns what a test may change: the tile that is chosen now, and why tiles cannot serve."""
    given, real = types.SimpleNamespace(tile=SMALL, refusal=None), choose.refusal
    monkeypatch.setattr(choose, "refusal", lambda path, *rest: given.refusal if path == "tiled" else real(path, *rest))
    monkeypatch.setattr(choose, "tiles_are_faster", lambda problem: given.refusal is None)
    monkeypatch.setattr(choose, "default_tile", lambda problem: given.tile)
    return given


@pytest.fixture
def tiles(monkeypatch):
    return choose_tiles(monkeypatch)


@pytest.fixture(scope="module")
def both(corpus, tmp_path_factory):
    """The run with small tiles when it has ended, and stopped in the middle."""
    whole, stopped = (Run(tmp_path_factory.mktemp(name)) for name in ("whole", "stopped"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        choose_tiles(monkeypatch)
        assert runs.train(CONFIG, corpus, whole).finished
        assert not runs.train(CONFIG, corpus, stopped, stop_requested=lambda: True).finished
    return whole, stopped


@pytest.fixture
def stopped(both, tmp_path):
    return Run.read_all(shutil.copytree(both[1].path, tmp_path / "run"))


def recorded(workdir):
    return json.loads(Path(workdir.path, "config.json").read_text()).get("attention")


def rewrite(workdir, attention):
    path = Path(workdir.path, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention": attention}))


@pytest.mark.full
def test_a_resumed_run_keeps_its_tiles_and_equals_the_undisturbed_one(both, stopped, corpus, tiles):
    tiles.tile = LARGE
    assert runs.train(CONFIG, corpus, stopped).finished
    assert runs.numbers(stopped) == runs.numbers(both[0])
    assert recorded(stopped) == recorded(both[0]) == {"training": "tiled 4x8", "evaluation": "tiled 4x8"}
    logged = [line for line in Path(stopped.path, "log.txt").read_text().splitlines() if "attention training" in line]
    assert ["as in earlier starts" in line for line in logged] == [False, True]


def start_again(workdir, config, corpus):
    """The part of a start that chooses, compares and records; returns the lines that it would log."""
    with Run.open(workdir.path) as run:
        components = build(config, vocab_size=corpus.vocabulary.size, recorded=run.attention_for(config))
        run.begin(config, corpus, attention=components.attention)
        return run.notes


@pytest.mark.full
def test_what_cannot_serve_any_more_is_replaced_with_one_line(stopped, corpus, tiles):
    for gone in ("fused mosaic_roll 128x256", "fused triton 64x64", "fused cudnn"):
        rewrite(stopped, {"training": gone, "evaluation": "tiled 4x8"})
        [line] = start_again(stopped, CONFIG, corpus)
        assert f"training was {gone} and is now tiled 4x8 " in line and "evaluation" not in line
        assert recorded(stopped) == {"training": "tiled 4x8", "evaluation": "tiled 4x8"}
    tiles.refusal = "the head width is 4, below 8"
    [line] = start_again(stopped, CONFIG, corpus)
    assert "training was tiled 4x8 and is now reference, " in line
    assert "evaluation was tiled 4x8 and is now reference" in line
    assert recorded(stopped) == {"training": "reference", "evaluation": "reference"}
    assert start_again(stopped, CONFIG, corpus) == []
    components = weights.build_trained(CONFIG, Run.read(stopped.path), log=pytest.fail)
    assert str(components.model.attention.cached) == "reference"
    rewrite(stopped, {"training": "reference", "evaluation": "tiled 4x8"})
    lines = []
    weights.build_trained(CONFIG, Run.read(stopped.path), log=lines.append)
    assert len(lines) == 1 and "evaluation was tiled 4x8 and is now reference (" in lines[0]
