"""Tests the readers on texts as they are published, in TXL_DATA_DIR: counts, vocabularies, first
tokens, and losses.

All other tests read miniatures. The files are the first bytes of enwik8 and text8, Penn Treebank as
Mikolov's three files, and the validation and test splits of WikiText-2.
"""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from support import tiny, tiny_run
from txl_jax.config import CorpusName, DataConfig, LineMark, Newlines, Tokenizer, TokenizerConfig
from txl_jax.data import prepare
from txl_jax.data.corpus import make_vocabulary, read_corpus
from txl_jax.data.published import CORPORA, default_data
from txl_jax.data.segments import evaluation_segments, training_segments
from txl_jax.data.text import Text, file_part
from txl_jax.evaluation.streaming import evaluate
from txl_jax.runs.build import build

WORDS = TokenizerConfig(kind=Tokenizer.WORD, line_mark=LineMark.EOS)


def read_bytes(data_dir, folder, name, file):
    """A part of a corpus of bytes, split 90/5/5, with its cache in `folder`."""
    config = dataclasses.replace(default_data(name), file=str(data_dir / file))
    return read_corpus(config, str(data_dir), str(folder))


def read_penn_treebank(data_dir, folder):
    """Penn Treebank's files as the user's own text, with a cache in `folder`."""
    paths = {}
    for split in ("train", "valid", "test"):
        paths[split] = (str(data_dir / "ptb" / f"ptb.{split}.txt"),)
    config = DataConfig(corpus=CorpusName.TEXT, tokenizer=WORDS, **paths)
    return read_corpus(config, str(data_dir), str(folder))


def most_frequent(tokens, vocabulary):
    """The three most frequent tokens' texts, and how often each occurs."""
    counts = np.bincount(tokens, minlength=vocabulary.size)
    ids = np.argsort(-counts)[:3]
    return [(vocabulary.decode([token]), counts[token]) for token in ids]


# `sizes` and `starts` are of the training, validation and test splits. `frequent` has the three
# most frequent bytes of the training split, counted in the file by Python's Counter.
@pytest.mark.parametrize(
    ("name", "file", "newlines", "sizes", "starts", "frequent"),
    [
        pytest.param(
            CorpusName.ENWIK8,
            "enwik8-4150k",
            Newlines.DROP,
            [3_693_409, 205_426, 204_603],
            [b"<mediawiki xmlns=", b"ong atheism=", b"y in air"],
            [(b" ", 501_009), (b"e", 295_889), (b"t", 227_840)],
            id="enwik8",
        ),
        pytest.param(
            CorpusName.TEXT8,
            "text8-4500k",
            Newlines.KEEP,
            [4_050_000, 225_000, 225_000],
            [b" anarchism originated as a term", b"n her bo", b" newly i"],
            [(b" ", 685_249), (b"e", 425_791), (b"t", 282_981)],
            id="text8",
        ),
    ],
)
def test_bytes_of_wikipedia(data_dir, tmp_path, name, file, newlines, sizes, starts, frequent):
    """The splits together are the file, without newlines for enwik8."""
    corpus = read_bytes(data_dir, tmp_path, name, file)

    splits = [corpus.train, corpus.valid, corpus.test]
    assert [len(split) for split in splits] == sizes
    for tokens, start in zip(splits, starts, strict=True):
        assert corpus.vocabulary.decode(tokens[: len(start)]) == start
    assert most_frequent(corpus.train, corpus.vocabulary) == frequent
    assert corpus.vocabulary.size == 256
    assert corpus.vocabulary.newlines == newlines

    content = (data_dir / file).read_bytes()
    if newlines is Newlines.DROP:
        content = content.replace(b"\n", b"")
    assert corpus.vocabulary.decode(np.concatenate(splits)) == content


def test_words_of_penn_treebank(data_dir, tmp_path):
    corpus = read_penn_treebank(data_dir, tmp_path)
    vocabulary = corpus.vocabulary

    # As published with the corpus, line ends included. 10,000 words with <eos> and <unk>.
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (929_589, 73_760, 82_430)
    assert vocabulary.size == 10_000
    assert vocabulary.words[:8] == ("<eos>", "the", "<unk>", "N", "of", "to", "a", "in")

    # The training text begins with words that occur only once. There are 30 such words, and they
    # are the last ones of the vocabulary.
    assert corpus.train[:4].tolist() == [9970, 9971, 9972, 9973]
    assert vocabulary.decode(corpus.train[:4]) == b"aer banknote berlitz calloway "
    assert corpus.valid[:8].tolist() == [1134, 93, 358, 5, 329, 51, 9586, 6]
    valid_start = b"consumers may want to move their telephones a "
    assert vocabulary.decode(corpus.valid[:8]) == valid_start
    assert corpus.test[:8].tolist() == [102, 14, 24, 32, 753, 381, 0, 29]
    assert vocabulary.decode(corpus.test[:8]) == b"no it was n't black monday \nbut "

    # Every word of validation and test is in the training split, so all counts are equal to the
    # counts of the files.
    for split, tokens in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test)):
        expected = collections.Counter()
        for line in (data_dir / "ptb" / f"ptb.{split}.txt").read_text().splitlines():
            expected.update(line.split())
            expected["<eos>"] += 1
        counts = np.bincount(tokens, minlength=10_000).tolist()
        assert collections.Counter(dict(zip(vocabulary.words, counts, strict=True))) == expected, (
            split
        )


def test_words_of_wikitext_2(data_dir):
    """Its empty lines are lines: each has a mark, as in the published counts."""
    valid = file_part(str(data_dir / "wikitext-2" / "valid.txt"))
    test = file_part(str(data_dir / "wikitext-2" / "test.txt"))
    # The training split is not in the directory, so the words are of the validation split.
    text = Text("text", "WikiText-2", "", {"train": (valid,)})

    vocabulary = make_vocabulary(WORDS, text)
    valid_ids = np.concatenate(list(vocabulary.blocks([valid])))
    test_ids = np.concatenate(list(vocabulary.blocks([test])))

    assert vocabulary.size == 13_777
    facts = CORPORA[CorpusName.WIKITEXT2].facts
    assert len(valid_ids) == facts["valid"].tokens == 217_646
    assert len(test_ids) == facts["test"].tokens == 245_569
    assert vocabulary.decode(valid_ids[:7]) == b"\n= Homarus gammarus = \n\n"
    assert vocabulary.decode(test_ids[:7]) == b"\n= Robert <unk> = \n\n"

    tally = prepare.Tally()
    for block in test.blocks():
        tally.add(block, words=True)
    assert tally.lines == 4_358
    assert tally.words == 241_211
    assert tally.lines + tally.words == 245_569


@pytest.mark.full
def test_penn_treebank_in_its_published_layout(data_dir, tmp_path):
    """It is found in the directory, checked by its sha256 and counts, and prepared. The ids are
    the same as if the files were the user's own text.
    """
    prepared = read_corpus(default_data(CorpusName.PTB), str(data_dir), str(tmp_path / "published"))
    expected = read_penn_treebank(data_dir, tmp_path / "own")
    assert prepared.vocabulary == expected.vocabulary
    for split in ("train", "valid", "test"):
        np.testing.assert_array_equal(
            getattr(prepared, split), getattr(expected, split), err_msg=split
        )


# Losses


def nats_per_token(components, params, tokens):
    """The loss on a text, by streaming evaluation."""
    weights = components.prepare_params(params)
    settings = components.config.eval
    reader = evaluation_segments(
        tokens, batch_size=settings.batch_size, segment_len=settings.segment_len
    )
    memory = components.init_memory(weights)
    totals = evaluate(components.eval_step, weights, memory, reader, place=components.place)
    return totals.nll


def unigram_log_p(tokens, size):
    """Log probabilities of tokens by their counts in a text, each counted once more."""
    counts = np.bincount(tokens, minlength=size) + 1.0
    return np.log(counts / counts.sum())


# Of the validation text, for losses: the first one is no target, so they have 20,000.
N_SCORED_TOKENS = 20_001

CONFIG = tiny.changed(
    tiny_run.CONFIG,
    model__d_model=32,
    model__d_head=16,
    model__d_inner=64,
    model__n_head=2,
    model__init_std=0.02,
    model__dropout__rate=0.0,
    optimizer__learning_rate=0.005,
    train__batch_size=16,
    train__segment_len=32,
    train__mem_len=32,
    train__steps=200,
    eval__batch_size=4,
    eval__segment_len=50,
    eval__mem_len=64,
)


# The expected losses were computed by a loop over the files with Python's Counter.
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "expected"), [("enwik8", 3.2504586252), ("ptb", 6.5480261197)], ids=["enwik8", "ptb"]
)
def test_a_model_of_frequencies_has_their_cross_entropy(data_dir, tmp_path, name, expected):
    """Without weights but a bias of the softmax, the loss is what NumPy computes only from the
    counts.
    """
    if name == "ptb":
        corpus = read_penn_treebank(data_dir, tmp_path)
    else:
        corpus = read_bytes(data_dir, tmp_path, CorpusName.ENWIK8, "enwik8-4150k")
    size = corpus.vocabulary.size
    tokens = np.asarray(corpus.valid[:N_SCORED_TOKENS])
    log_p = unigram_log_p(corpus.train, size)

    components = build(CONFIG, vocab_size=size)
    abstract_params = components.abstract_state.params
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params)
    params["softmax"]["bias"] = log_p.astype(np.float32)

    by_counts = -log_p[tokens[1:]].mean()
    assert by_counts == pytest.approx(expected, rel=1e-9)
    assert nats_per_token(components, params, tokens) == pytest.approx(by_counts, rel=1e-6)


@pytest.mark.full
def test_a_model_trained_on_real_text_has_the_recorded_loss(data_dir, tmp_path):
    """200 updates on enwik8, after which it knows more than the frequency of bytes."""
    corpus = read_bytes(data_dir, tmp_path, CorpusName.ENWIK8, "enwik8-4150k")
    tokens = np.asarray(corpus.valid[:N_SCORED_TOKENS])
    components = build(CONFIG, vocab_size=corpus.vocabulary.size)
    state = components.init_state()
    step = components.compile_step().program
    before = nats_per_token(components, state.params, tokens)

    reader = training_segments(corpus.train, batch_size=16, segment_len=32)
    per_call = CONFIG.train.segments_per_call
    for first in range(0, CONFIG.train.steps, per_call):
        state, _ = step(state, components.place(reader.segments(first, per_call)))
    after = nats_per_token(components, state.params, tokens)

    # A model with small random weights takes all 256 bytes for nearly equally likely.
    assert before == pytest.approx(np.log(256), abs=0.05)
    assert after == pytest.approx(2.863, abs=0.01)
    by_frequencies = -unigram_log_p(corpus.train, 256)[tokens[1:]].mean()
    assert after < by_frequencies - 0.3
