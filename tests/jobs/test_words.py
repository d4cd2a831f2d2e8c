"""Tests a run on words: shuffled sentences and clusters through stop and resume, another text, prompts, perplexity."""

import json

import numpy as np
import pytest

from support import drawn_run
from support.run_records import StopAfter, numbers
from txl_jax.config import (
    CorpusName,
    DataConfig,
    EvalConfig,
    ExperimentConfig,
    GenerateConfig,
    LineMark,
    ModelConfig,
    Order,
    Tokenizer,
    TokenizerConfig,
    TrainConfig,
)
from txl_jax.config import tree as config_tree
from txl_jax.data.corpus import read_corpus
from txl_jax.jobs import evaluate, generate, train
from txl_jax.jobs.workdir import Workdir

STEPS = 40  # Of 18 a pass, so that sentences are shuffled three times.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three files of sentences, the second one with a word that the first one lacks."""
    path = tmp_path_factory.mktemp("words")
    rng = np.random.default_rng(0)
    text = "the a cat dog sat ran on under mat tree and then it was seen again"
    words = np.array(text.split())
    for name, lines in (("train", 150), ("valid", 30), ("test", 30)):
        drawn = (rng.choice(words, rng.integers(2, 9)) for _ in range(lines))
        (path / name).write_text("".join(" ".join(sentence) + "\n" for sentence in drawn))
    with open(path / "valid", "a") as file:
        file.write("the aardvark sat\n")
    return path


@pytest.fixture(scope="module")
def config(folder):
    return ExperimentConfig(
        model=ModelConfig(
            n_layer=2, d_model=12, n_head=3, d_head=5, d_inner=14, cutoffs=(6, 11), div_val=2, tie_projs=(True,) * 3
        ),
        data=DataConfig(
            corpus=CorpusName.TEXT,
            train=(str(folder / "train"),),
            valid=(str(folder / "valid"),),
            test=(str(folder / "test"),),
            tokenizer=TokenizerConfig(kind=Tokenizer.WORD, line_mark=LineMark.S),
            order=Order.SENTENCES,
        ),
        train=TrainConfig(
            steps=STEPS, batch_size=4, segment_len=11, mem_len=7, log_every=10, eval_every=20, checkpoint_every=10
        ),
        eval=EvalConfig(batch_size=2, segment_len=9, mem_len=13, clamp_len=None, segments_per_call=2, warmup_tokens=8),
        generate=GenerateConfig(length=12, top_k=5),
    )


@pytest.fixture(scope="module")
def corpus(config, folder):
    return read_corpus(config.data, "nowhere", str(folder / "cache"))


@pytest.fixture(scope="module")
def drawn(config, corpus, folder):
    """A run with drawn parameters."""
    return drawn_run.make(folder / "drawn", config, corpus)[0]


@pytest.fixture(scope="module")
def finished(config, corpus, folder):
    workdir = Workdir(folder / "run")
    assert train.run(config, corpus, workdir).finished
    return workdir


@pytest.mark.full
def test_a_stopped_run_goes_on_with_the_same_sentences(finished, config, corpus, tmp_path):
    workdir = Workdir(tmp_path)
    for calls in (14, 10):  # In the first pass, and across the border of the second.
        assert not train.run(config, corpus, workdir, stop_requested=StopAfter(calls)).finished
    assert train.run(config, corpus, workdir).finished
    assert numbers(workdir) == numbers(finished)
    results = json.loads((finished.path / "results.json").read_text())
    assert results["test"]["perplexity"] == pytest.approx(np.exp(results["test"]["loss"]))


def test_another_text_is_scored_in_the_runs_vocabulary(drawn, tmp_path):
    (tmp_path / "other").write_text("the zebra sat on the mat\n" * 40)
    trained, text = drawn.load()
    other = config_tree.replace(
        trained, {"data.train": (), "data.valid": (), "data.test": (), "data.file": str(tmp_path / "other")}
    )
    corpus = read_corpus(other.data, "nowhere", str(tmp_path), vocabulary=text.vocabulary)
    assert text.vocabulary.decode(corpus.test[1:8]) == b"the <unk> sat on the mat \n"
    assert np.isfinite(evaluate.run(other, corpus, drawn, trained_on=text, log=lambda line: None)["test"]["loss"])


@pytest.mark.parametrize(("prompt", "begins"), [("the  zebra\ncat", "the <unk> \ncat "), (" ", "")])
def test_prompts_are_words_and_may_be_unknown(drawn, config, corpus, prompt, begins):
    written = []
    asked = config_tree.replace(config, {"generate.prompt": prompt})
    generate.run(asked, corpus.vocabulary, drawn, log=lambda line: None, write=written.append)
    text = "".join(written)
    assert text.startswith(begins)
    assert len(text.removeprefix(begins).replace("\n", " <S> ").split()) >= 12
    assert set(text.split()) <= set(corpus.vocabulary.words)


def test_clusters_that_do_not_fit_the_vocabulary_are_refused(config, corpus, tmp_path):
    wide = config_tree.replace(config, {"model.cutoffs": (6, 18)})
    with pytest.raises(ValueError, match=r"model\.cutoffs\D*\b18\b\D*\b18\b"):
        train.run(wide, corpus, Workdir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
