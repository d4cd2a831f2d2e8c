"""Tests warm starts: weights, vocabulary and settings of a trained run, the record, resuming, and
mistakes.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from support import drawn_run, runs, tiny_run
from support.cases import full_but
from txl_jax.config import InitVocabulary, Tokenizer, config_tree
from txl_jax.errors import UserError
from txl_jax.runs import warm_start
from txl_jax.runs.build import build
from txl_jax.runs.convert import TargetFormat, convert
from txl_jax.runs.ensemble import split_off
from txl_jax.runs.run import Run
from txl_jax.runtime import distributed
from txl_jax.training.hooks import Hook

pytestmark = pytest.mark.usefixtures("traces_kept")

TEXTS = {
    "old": b"the cat sat on the mat and the dog sat on the cat " * 40,
    "new": b"the dog ran and the owl sat under the mat with the cat " * 40,
}
STEPS = 4


@pytest.fixture(scope="module")
def text_of(tmp_path_factory):
    """Returns (config, corpus) of a text by its name, with some settings changed."""
    folders = {name: tmp_path_factory.mktemp(name) for name in TEXTS}

    def text_of(name, **changes):
        sizes = {
            "model__n_layer": 1,
            "model__dropout__rate": 0.1,
            "train__steps": STEPS,
            "train__log_every": 2,
            "train__eval_every": 2,
            "train__checkpoint_every": 2,
        }
        return drawn_run.on_text(folders[name], TEXTS[name], **sizes | changes)

    return text_of


def first_state(config, corpus, workdir):
    """Returns the weights that a run begins with, and the state before the first update."""
    components = build(config, vocab_size=corpus.vocabulary.size)
    weights = warm_start.load(components, corpus.vocabulary, workdir)
    return weights, jax.device_get(weights.state(components.init_params()))


def test_a_run_begins_with_the_weights_and_a_fresh_optimizer(text_of, tmp_path):
    _, parts = drawn_run.make(tmp_path / "old", *text_of("old"))
    config, corpus = text_of("new", init_from=str(tmp_path / "old"), average__start_step=0)
    weights, state = first_state(config, corpus, Run(tmp_path / "new"))
    tiny_run.assert_equal(state.params, tiny_run.params(parts.model))
    tiny_run.assert_equal(state.average.params, state.params)
    assert state.step == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))
    assert not np.any(state.memory.valid)
    assert weights.record["tokens"] == {"kept": 256, "new": 0, "dropped": 0, "moved": 0}
    assert weights.record["step"] == drawn_run.STEP


def test_a_run_begins_with_the_best_weights_of_a_run_that_is_scored_by_a_mean(text_of, tmp_path):
    """`eval.average_checkpoints` in its record belongs to its evaluation."""
    old, old_corpus = text_of("old", eval__average_checkpoints=2)
    _, parts = drawn_run.make(tmp_path / "old", old, old_corpus)
    config, corpus = text_of("new", init_from=str(tmp_path / "old"))

    _, state = first_state(config, corpus, Run(tmp_path / "new"))

    tiny_run.assert_equal(state.params, tiny_run.params(parts.model))


def test_training_lengths_are_compared_unless_the_weights_come_from_elsewhere(text_of, tmp_path):
    """Weights of another implementation bring the model's settings, and no training lengths."""
    old, old_corpus = text_of("old", model__compat__final_norm=False)
    drawn_run.make(tmp_path / "old", old, old_corpus)
    convert(tmp_path / "old", tmp_path / "theirs", to_format=TargetFormat.HUGGINGFACE)
    (tmp_path / "theirs" / "txl_jax.json").unlink()
    convert(tmp_path / "theirs", tmp_path / "converted")

    for name, has_lengths in (("old", True), ("converted", False)):
        config = config_tree.replace(
            old,
            {
                "init_from": str(tmp_path / name),
                "init_vocabulary": InitVocabulary.KEPT,
                "train.mem_len": old.train.mem_len + 1,
                "model.dropout.rate": 0.3,
            },
        )
        run = Run(tmp_path / f"from {name}")
        corpus = warm_start.read_corpus(config, run, "nowhere", str(tmp_path))
        start, _ = first_state(config, corpus, run)
        assert ("train.mem_len" in start.note) is has_lengths, name
        assert "model.dropout.rate 0.3 (was 0.1)" in start.note


WORDS = {"data__tokenizer__kind": Tokenizer.WORD, "model__cutoffs": (3, 6)}
CLUSTERS = {
    "untied": {"model__cutoffs": (), "model__tie_weight": False},
    "clusters": {"model__div_val": 1},
    "widths": {
        "model__div_val": 2,
        "model__tie_weight": False,
        "model__tie_projs": (True, False, True),
    },
}


@pytest.mark.parametrize("name", full_but(["widths"], CLUSTERS))
def test_words_are_matched_by_spelling(text_of, tmp_path, name):
    """Each word keeps its own vectors. A new word, and a word that is now in a cluster of another
    width, has the vectors of a new run.
    """
    old, old_corpus = text_of("old", **WORDS | CLUSTERS[name])
    new, corpus = text_of("new", **WORDS | CLUSTERS[name])
    _, parts = drawn_run.make(tmp_path / "old", old, old_corpus)
    config = dataclasses.replace(new, init_from=str(tmp_path / "old"))

    weights, state = first_state(config, corpus, Run(tmp_path / "new"))

    loaded = tiny_run.params(parts.model)
    fresh = jax.device_get(build(new, vocab_size=corpus.vocabulary.size).init_params())
    old_words = old_corpus.vocabulary.words
    has_widths = new.model.div_val > 1
    counts = {"kept": 0, "new": 0, "moved": 0}
    for token, word in enumerate(corpus.vocabulary.words):
        rows = rows_of_token(state.params, new, token)
        is_kept = word in old_words
        if is_kept and has_widths:
            old_cluster, _ = cluster_of_token(old, old_words.index(word))
            new_cluster, _ = cluster_of_token(new, token)
            if old_cluster != new_cluster:
                counts["moved"] += 1
                is_kept = False
        if is_kept:
            counts["kept"] += 1
            expected_rows = rows_of_token(loaded, old, old_words.index(word))
        else:
            counts["new"] += 1
            expected_rows = rows_of_token(fresh, new, token)
        for row, expected in zip(rows, expected_rows, strict=True):
            np.testing.assert_array_equal(row, expected, err_msg=word)

    assert weights.record["tokens"] == counts | {"dropped": len(old_words) - counts["kept"]}
    # Words that moved are among the new ones.
    assert counts["new"] - counts["moved"] == len(["ran", "owl", "under", "with"])
    assert counts["kept"] >= 2
    assert bool(counts["moved"]) == has_widths
    for part in fresh.keys() - {"embedding", "softmax"}:
        tiny_run.assert_equal(state.params[part], loaded[part])


def cluster_of_token(config, token):
    """Returns a token's cluster, and its place in the cluster."""
    starts = [0, *config.model.cutoffs]
    cluster = 0
    while cluster + 1 < len(starts) and starts[cluster + 1] <= token:
        cluster += 1
    return cluster, token - starts[cluster]


def rows_of_token(params, config, token):
    """Returns a token's bias, and its rows of the tables of embedding and softmax."""
    table = 0
    place = token
    if config.model.div_val > 1:
        table, place = cluster_of_token(config, token)
    rows = [params["softmax"]["bias"][token]]
    for part in ("embedding", "softmax"):
        if f"table_{table}" in params[part]:
            rows.append(params[part][f"table_{table}"][place])
    return rows


def test_a_kept_vocabulary_reads_the_text_in_its_words(text_of, tmp_path, monkeypatch):
    """Words that it lacks are unknown, and other settings of its tokens are an error.

    No collective is within another: a process that failed before the inner one would leave the
    others waiting.
    """
    old, old_corpus = text_of("old", **WORDS)
    new, _ = text_of("new", **WORDS)
    drawn_run.make(tmp_path / "old", old, old_corpus)
    inside = []

    def collective(act):
        assert not inside
        inside.append(act)
        try:
            return act()
        finally:
            inside.pop()

    # The collectives that read a file. In a single process they only call what they are passed.
    for name in ("run_on_all", "broadcast_from_primary"):
        monkeypatch.setattr(distributed, name, collective)
    config = config_tree.replace(
        new, {"init_from": str(tmp_path / "old"), "init_vocabulary": InitVocabulary.KEPT}
    )
    corpus = warm_start.read_corpus(config, Run(tmp_path / "new"), "nowhere", str(tmp_path))
    assert corpus.vocabulary == old_corpus.vocabulary
    assert corpus.vocabulary.unknown_id in corpus.train
    components = build(config, vocab_size=corpus.vocabulary.size)
    assert warm_start.load(components, corpus.vocabulary, Run(tmp_path / "new")) is not None
    other = config_tree.replace(config, {"data.tokenizer.line_mark": "none"})
    with pytest.raises(UserError, match=r"data\.tokenizer\.line_mark is none instead of eos"):
        warm_start.read_corpus(other, Run(tmp_path / "new"), "nowhere", str(tmp_path))


@pytest.mark.full
def test_a_warm_start_is_recorded_and_happens_once(text_of, tmp_path, capfd):
    """Later starts resume, even if the weights are gone; the numbers are those of a run without a
    stop.
    """
    drawn_run.make(tmp_path / "old", *text_of("old"))
    config, corpus = text_of("new", init_from=str(tmp_path / "old"), model__dropout__rate=0.2)
    workdir = Run(tmp_path / "new")
    # The third question stops the run before its end.
    stops = iter([False, False, True])
    runs.train(config, corpus, workdir, stop_requested=lambda: next(stops, True))

    record = json.loads(Path(workdir.path, "config.json").read_text())["warm_start"]
    assert record["path"] == str(tmp_path / "old")
    assert record["step"] == drawn_run.STEP
    out = capfd.readouterr().out
    assert re.search(rf"(?m)^init .*{record['sha256'][:12]}", out)
    assert "256 tokens kept, 0 new, 0 dropped" in out
    assert "model.dropout.rate 0.2 (was 0.1)" in out

    whole = runs.train(config, corpus, Run(tmp_path / "whole"))
    shutil.rmtree(tmp_path / "old")
    resumed = runs.train(config, corpus, workdir)
    assert "resuming" in capfd.readouterr().out
    assert resumed.results["test"] == whole.results["test"]
    assert resumed.results["warm_start"] == record
    assert json.loads(Path(workdir.path, "config.json").read_text())["warm_start"] == record


@pytest.mark.full
def test_every_member_of_an_ensemble_begins_with_the_weights(text_of, tmp_path):
    """New words are drawn by the member's own seed, and a member that is split off keeps the
    record.
    """
    old, old_corpus = text_of("old", **WORDS)
    _, parts = drawn_run.make(tmp_path / "old", old, old_corpus)
    config, corpus = text_of("new", init_from=str(tmp_path / "old"), **WORDS)
    members = [{"seed": 1}, {"seed": 2}]
    states = []
    # What the hook sees after the first update are the initial weights, since at this rate the
    # update is nothing.
    keep = Hook(1, lambda context: states.append(jax.device_get(context.state.params)))
    still = config_tree.replace(config, {"optimizer.learning_rate": 1e-30})

    runs.train(
        still, corpus, tmp_path / "both", members=members, hooks=[keep], stop_requested=lambda: True
    )

    # [members, V, D]
    table = states[0]["embedding"]["table_0"]
    loaded = tiny_run.params(parts.model)["embedding"]["table_0"]
    old_words = old_corpus.vocabulary.words
    for token, word in enumerate(corpus.vocabulary.words):
        first, second = table[:, token]
        if word in old_words:
            expected = loaded[old_words.index(word)]
            np.testing.assert_allclose(first, expected, rtol=1e-6, err_msg=word)
            np.testing.assert_allclose(second, expected, rtol=1e-6, err_msg=word)
        else:
            assert np.abs(first - second).max() > 1e-3, word
    split_off(tmp_path / "both", "seed=2", tmp_path / "alone")
    assert Run.read(tmp_path / "alone").warm_start == Run.read_all(tmp_path / "both").warm_start


def test_weights_that_changed_before_the_first_checkpoint_are_an_error(text_of, tmp_path):
    drawn_run.make(tmp_path / "old", *text_of("old"))
    config, corpus = text_of("new", init_from=str(tmp_path / "old"))
    workdir, _ = drawn_run.make(tmp_path / "new", config, corpus)
    # A start was killed before its first checkpoint, and had read weights of another digest.
    with Run.open(workdir.path) as run:
        run.record_start(config, corpus, warm_start={"sha256": "0" * 64, "step": 3})
    with pytest.raises(UserError, match="changed since"):
        runs.train(config, corpus, workdir)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__n_head": 5, "model__d_head": 3}, ["model.n_head", "model.d_head"]),
        # The number of clusters differs: the old model has one.
        ({"model__cutoffs": (100,)}, ["model.cutoffs"]),
        # Words and bytes are not matched by spelling. The error says what works.
        ({"data__tokenizer__kind": Tokenizer.WORD}, ["--init_vocabulary=kept"]),
    ],
    ids=["sizes", "clusters", "vocabulary"],
)
def test_incompatible_weights_are_an_error_before_anything_is_written(
    text_of, tmp_path, changes, named
):
    drawn_run.make(tmp_path / "old", *text_of("old"))
    with pytest.raises(UserError) as error:
        runs.train(*text_of("new", init_from=str(tmp_path / "old"), **changes), tmp_path / "new")
    for words in named:
        assert words in str(error.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.full
def test_a_mesh_has_the_same_weights(on_eight_devices):
    """Tables of odd sizes, of which each of eight devices reads its part."""
    on_one_device, on_mesh = on_eight_devices("-m", "support.eight_devices", "warm start")
    assert on_mesh == on_one_device
    # Some rows were initialized, and some words are in a cluster of another width.
    assert on_mesh["tokens"]["new"] > on_mesh["tokens"]["moved"] > 0
