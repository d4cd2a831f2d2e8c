"""Tests of the model's part: it predicts as scoring does, and learns as dynamic evaluation does."""

import dataclasses
from unittest import mock

import jax
import numpy as np
import pytest

from support import drawn_run
from support.tiny_run import assert_equal
from txl_jax import trained_model
from txl_jax.compression import codec
from txl_jax.compression.file_format import Coding
from txl_jax.compression.predictor import Predictor
from txl_jax.compression.range_coder import integer_probabilities
from txl_jax.config import Newlines, Tokenizer
from txl_jax.errors import UserError
from txl_jax.runs.scoring_progress import Interrupted
from txl_jax.runs.trained import TrainedModel, open_weights

CODING = Coding(
    streams=3,
    segment_len=5,
    mem_len=9,
    learning_rate=1e-3,
    decay=1e-2,
    epsilon=1e-8,
    threads=2,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config, corpus = drawn_run.on_text(
        folder, drawn_run.letters(), model__n_layer=1, eval__same_length=True
    )
    run, _ = drawn_run.make(folder / "run", config, corpus)
    return open_weights(run.path)


@pytest.fixture(scope="module")
def predictor(trained):
    return Predictor(trained, CODING, log=print)


@pytest.fixture(scope="module")
def tokens(predictor):
    """Token ids [3, 31] of three streams: six segments of five, and the target of the last."""
    return predictor.vocabulary.encode(drawn_run.letters()[:93]).reshape(3, 31)


def nats(log_probabilities, symbols):
    return -log_probabilities[np.arange(len(symbols)), symbols]


def read(predictor, tokens, *, learns):
    """Returns the losses [R, T - 1] of all tokens except the first, and the last state.

    If it `learns`, an update follows each segment.
    """
    segment_len = predictor.coding.segment_len
    state = predictor.start()
    losses = []
    for place in range(tokens.shape[1] - 1):
        state, log_probabilities = predictor.predict(state, tokens[:, place])
        losses.append(nats(log_probabilities, tokens[:, place + 1]))
        if learns and (place + 1) % segment_len == 0:
            segment = tokens[:, place + 1 - segment_len : place + 2]
            state = predictor.learn(state, segment, np.ones(segment.shape, bool))
    return np.stack(losses, axis=1), state


def test_it_predicts_as_the_model_scores(trained, predictor, tokens):
    """It predicts token by token over its cache, each stream from an empty memory."""
    losses, _ = read(predictor, tokens, learns=False)

    model = trained_model.load(trained.path)
    expected = [totals.nats for totals in model.score(tokens.tolist())]
    np.testing.assert_allclose(losses.sum(axis=1), expected, rtol=1e-5)


def test_it_learns_as_dynamic_evaluation_does(predictor, tokens):
    """After six segments, parameters, rule and memory are the same, bit for bit."""
    _, state = read(predictor, tokens, learns=True)

    learner = predictor._learner
    expected = learner.start()
    built = learner.built
    for first in range(0, 30, 5):
        # A segment as evaluation reads it, with the tokens, shapes and flags of the streams.
        segment = built.evaluation_reader(tokens.reshape(-1)).segments(0, 1)
        segment = segment._replace(
            inputs=tokens[None, :, first : first + 5].astype(np.int32),
            targets=tokens[None, :, first + 1 : first + 6].astype(np.int32),
            weights=np.ones((1, 3, 5), np.float32),
            reset=np.zeros((1, 3), bool),
        )
        # The parameters that learn are part of the state, so the rule reads no others.
        expected, _ = learner.step(None, expected, built.place(segment))
    assert int(expected.step) == 6
    assert_equal(jax.device_get(state.learner), jax.device_get(expected))


def test_what_is_learned_changes_predictions(predictor, tokens):
    """They change from the sixth place on, the first after the update of five, and not before."""
    static, _ = read(predictor, tokens, learns=False)
    learning, _ = read(predictor, tokens, learns=True)

    np.testing.assert_array_equal(learning[:, :5], static[:, :5])
    assert (learning[:, 5] != static[:, 5]).all()


def test_the_end_of_a_stream_teaches_nothing(predictor, tokens):
    """Tokens behind the end, for which the coder's loop has zeros, do not reach the gradient."""
    is_known = np.ones((3, 6), bool)
    # The third stream ends after three tokens of the segment.
    is_known[2, 3:] = False

    def params_after(padding):
        segment = tokens[:, :6].copy()
        segment[2, 3:] = padding
        state = predictor.learn(predictor.start(), segment, is_known)
        return jax.device_get(state.learner.params)

    # An input behind the end may reach only later positions, none of which is scored.
    assert_equal(params_after(padding=0), params_after(padding=1))


def test_a_text_comes_back_from_another_predictor_of_the_same_run(trained, predictor):
    """Another process has another predictor."""
    text = drawn_run.letters()[:400]
    payload = codec.compress(text, predictor, progress=lambda done, totals: None)

    other = Predictor(trained, CODING, log=print)
    assert codec.decompress(payload, 400, other, progress=lambda done, totals: None) == text


def test_the_probe_depends_on_the_numbers(trained, predictor):
    """It is the same for the same model and settings, and differs for another learning rate."""
    probe = predictor.probe()
    assert predictor.probe() == probe

    faster = dataclasses.replace(CODING, learning_rate=2e-3)
    assert Predictor(trained, faster, log=print).probe() != probe


def test_the_probe_can_be_stopped(predictor):
    """It asks before each token, two segments of five here, because long segments take minutes."""
    stop_requested = mock.Mock(side_effect=[False] * 6 + [True])
    with pytest.raises(Interrupted):
        predictor.probe(stop_requested=stop_requested)
    assert stop_requested.call_count == 7


def test_a_models_predictions_become_integers_that_sum_to_the_total(predictor, tokens):
    """The coder's integers are in units of 2**-24, so their probabilities sum to 1."""
    _, log_probabilities = predictor.predict(predictor.start(), tokens[:, 0])
    integers = integer_probabilities(log_probabilities)
    assert (integers.sum(axis=1) == 1 << 24).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"data.tokenizer.kind": Tokenizer.WORD},
        {"data.tokenizer.kind": Tokenizer.CHAR},
        {"data.tokenizer.newlines": Newlines.DROP},
    ],
    ids=["words", "characters", "without newlines"],
)
def test_vocabularies_that_lose_something_are_an_error(tmp_path, changes):
    config, corpus = drawn_run.on_text(tmp_path, drawn_run.TEXT, **changes)
    run, _ = drawn_run.make(tmp_path / "run", config, corpus)
    with pytest.raises(UserError, match="compression requires byte tokens"):
        Predictor(TrainedModel.of_run(run), CODING, log=print)
