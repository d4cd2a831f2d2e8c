"""Tests documents that the model learns from while it reads them, in Python and from a file.

tests/evaluation/test_dynamic.py compares `DynamicModel.score` of a single text with a plain loop.
Here each document is compared with `DynamicModel.score`.
"""

import dataclasses
import itertools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import txl_jax
from support import drawn_run, tiny_model, tiny_run
from support.cases import full_but
from txl_jax.config import DType, DynamicConfig, ExperimentConfig, config_tree
from txl_jax.data.segments import evaluation_segments
from txl_jax.errors import NonFiniteError, UserError
from txl_jax.evaluation import dynamic
from txl_jax.runs import score_input
from txl_jax.runs.build import build_for
from txl_jax.runs.dynamic import DynamicModel, built_with_rule
from txl_jax.runs.trained import TrainedModel

pytestmark = pytest.mark.usefixtures("traces_kept")

# `decay` pulls the parameters toward those that it began to learn with, so these matter too.
RULE = DynamicConfig(rule="rmsprop", learning_rate=0.02, decay=0.05)
SHARED = dataclasses.replace(RULE, shared=True)
# L = 5, M = 9: empty, one token, parts of a segment, past the memory. They are not in the order of
# their lengths, in which documents are read if nothing is learned.
LENGTHS = [0, 7, 1, 2, 40, 6, 0, 23]
FLOAT64: dict[str, Any] = {"model__dtype": DType.FLOAT64}


def learning(config: ExperimentConfig, params: Any, rule: DynamicConfig) -> DynamicModel:
    """A model at the lengths of `config`, built apart from the one that is tested."""
    config = config_tree.replace(config, {"eval.dynamic": rule})
    built = build_for(dynamic.training_config(config), tiny_model.VOCABULARY, uses=["training"])
    return DynamicModel(built_with_rule(built), jax.tree.map(jnp.asarray, params))


def alone(model: DynamicModel, ids: np.ndarray) -> np.ndarray:
    """The nats [T - 1] of a single text."""
    if len(ids) < 2:
        return np.zeros(0)
    nats = np.zeros(len(ids))
    model.score(ids, name="text", log=print, token_nats=nats)
    return nats[1:]


def one_pass(model: DynamicModel, documents: list[np.ndarray]) -> list[np.ndarray]:
    """The nats of documents that are learned one after the other, all by one call of the step."""
    segment_len = model.built.config.eval.segment_len
    blocks = []
    for ids in documents:
        if len(ids) > 1:
            reader = evaluation_segments(ids, batch_size=1, segment_len=segment_len)
            blocks.append(reader.segments(0, reader.n_segments))
    segments = jax.tree.map(lambda *arrays: np.concatenate(arrays), *blocks)
    assert segments.reset.sum() == len(blocks), "each document begins with an empty memory"
    _, losses = model.step(None, model.start(), model.built.place(segments))

    scored = np.asarray(losses.nll)[segments.weights > 0]
    lengths = [max(len(ids) - 1, 0) for ids in documents]
    ends = np.cumsum(lengths)
    return np.split(scored, ends[:-1])


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for number, (nats, expected_nats) in enumerate(zip(actual, expected, strict=True)):
        np.testing.assert_allclose(
            nats, expected_nats, rtol=0, atol=1e-9, err_msg=f"document {number}"
        )


@pytest.mark.parametrize("network", full_but(["transformer_xl"], ["transformer_xl", "lstm"]))
@pytest.mark.usefixtures("x64")
def test_each_document_is_learned_as_if_it_were_the_only_one(network):
    # A batch size and warm-up tokens, which are for a single text, have no effect on documents.
    lengths = {"eval__batch_size": 3, "eval__warmup_tokens": 10}
    model = tiny_model.make(model__network=network, **FLOAT64, **lengths)
    before = jax.tree.map(np.array, model.params)
    documents = tiny_model.documents(LENGTHS)

    nats_of = model.score(documents, per_token=True, dynamic=RULE)

    single = config_tree.replace(model.config, {"eval.batch_size": 1, "eval.warmup_tokens": 0})
    apart = learning(single, model.params, RULE)
    assert_same(nats_of, [alone(apart, ids) for ids in documents])
    assert {nats.dtype for nats in nats_of} == {np.dtype(np.float64)}

    # Order, batch size and other documents have no effect, and nothing was learned for good. The
    # first token of a document is not scored, and a token is a byte.
    again = model.score(documents[::-1], dynamic=RULE, batch_size=5)[::-1]
    assert [total.nats for total in again] == [nats.sum() for nats in nats_of]
    n_scored = [0, 6, 0, 1, 39, 5, 0, 22]
    assert [total.tokens for total in again] == n_scored
    assert [total.bytes for total in again] == n_scored
    tiny_run.assert_equal(jax.device_get(model.params), before)


@pytest.mark.usefixtures("x64")
def test_documents_that_share_parameters_are_one_pass_with_an_empty_memory_for_each():
    model = tiny_model.make(**FLOAT64)
    documents = tiny_model.documents(LENGTHS)

    nats_of = model.score(documents, per_token=True, dynamic=SHARED)

    apart = learning(model.config, model.params, SHARED)
    assert_same(nats_of, one_pass(apart, documents))
    # A second call begins with the trained parameters.
    again = list(model.score_stream(documents, per_token=True, dynamic=SHARED))
    assert_same(again, nats_of)
    # The longest document by itself has other losses.
    assert np.abs(nats_of[4] - alone(apart, documents[4])).max() > 1e-3


def test_a_token_before_each_document_is_learned_with_it():
    model = tiny_model.make()

    [nats, empty] = model.score(["abba cab", ""], per_token=True, first="\n", dynamic=RULE)

    [expected] = model.score(["\nabba cab"], per_token=True, dynamic=RULE)
    np.testing.assert_array_equal(nats, expected)
    assert empty.shape == (0,)


def test_a_result_comes_before_the_next_document_is_asked_for():
    model = tiny_model.make()
    asked = []

    def endless():
        for length in itertools.cycle([8, 0, 17]):
            asked.append(length)
            yield tiny_model.documents([length])[0]

    stream = model.score_stream(endless(), dynamic=RULE)
    for number, total in enumerate(itertools.islice(stream, 7), start=1):
        assert len(asked) == number
        assert total.tokens == max(asked[-1] - 1, 0)


def test_a_mistake_of_the_iterator_comes_after_the_results_before_it():
    model = tiny_model.make()

    stream = model.score_stream(["abba", "cab", "Z"], dynamic=RULE)

    assert [next(stream).tokens, next(stream).tokens] == [3, 2]
    # "Z" is byte 90, which the vocabulary does not have.
    with pytest.raises(UserError, match=r"\b90\b"):
        next(stream)


def test_a_loss_that_is_not_finite_names_document_segment_and_rate():
    model = tiny_model.make()
    # The first update of the second document ruins the parameters, so its segment 1, from 0, is the
    # first whose loss is not finite. The first document has one segment.
    rule = DynamicConfig(rule="sgd", learning_rate=1e30)

    stream = model.score_stream(["abba", "abba cab " * 3, "a"], dynamic=rule)

    assert next(stream).tokens == 3
    with pytest.raises(NonFiniteError, match=r"documents\[1\].*segment 1 .*1e\+30"):
        next(stream)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval__weight_dtype": "int8"}, r"eval\.weight_dtype.*rule=rmsprop.*int8"),
        ({"eval__cache_dtype": "bfloat16"}, r"eval\.cache_dtype.*rule=rmsprop.*bfloat16"),
        (
            {"eval__stride": 2, "eval__mem_len": 0, "eval__same_length": False},
            r"eval\.stride.*rule=rmsprop.*2",
        ),
    ],
    ids=["weights in int8", "a cache in bfloat16", "a sliding window"],
)
def test_models_that_cannot_learn_are_refused_by_name(changes, words):
    model = tiny_model.make(**changes)
    for score in (model.score, model.score_stream):
        with pytest.raises(UserError, match=words):
            score(["abba"], dynamic=RULE)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"rule": "sgd"}, r"DynamicConfig.*'sgd'"),
        (DynamicConfig(shared=True), r"sgd, rms, rmsprop.*rule=None"),
        (DynamicConfig(rule="rms"), r"eval\.dynamic\.rule=rms\b"),
    ],
    ids=["a dict", "without a rule", "without statistics"],
)
def test_mistakes_in_the_rule_are_refused(rule, words):
    with pytest.raises(UserError, match=words):
        tiny_model.make().score(["abba"], dynamic=rule)


def test_without_a_rule_nothing_is_learned():
    """Not even if the record of the run has a rule."""
    recorded = tiny_model.make(eval__dynamic=DynamicConfig(rule="sgd", learning_rate=0.5))
    texts = ["abba cab", "dab " * 5]

    expected = tiny_model.make().score(texts)

    assert recorded.score(texts) == expected
    # A `DynamicConfig` must have a rule: the recorded one does not take its place.
    with pytest.raises(UserError, match=r"rule.*sgd.*dynamic=None"):
        recorded.score(texts, dynamic=DynamicConfig(learning_rate=1e-3))
    assert recorded.score(texts, dynamic=recorded.config.eval.dynamic) != expected


# A run


LINES = ["the cat sat on the mat", "", "t", "and the dog ran away", "the cat"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose recorded evaluations learn, with documents read in three rows."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"eval__dynamic": RULE, "eval__batch_size": 3, "model__n_layer": 1}
    config, corpus = drawn_run.on_text(folder, bytes(range(256)) * 5, **changes)
    return drawn_run.make(folder / "run", config, corpus)[0]


def records(run, lines, rule: DynamicConfig, *, per_token=False, written=None):
    """The records of documents.

    `written` gets the lines of records, also the ones before a mistake. Lines are numbered from 11,
    so that the number of a line is not the number of its document.
    """
    if written is None:
        written = []
    config = config_tree.replace(run.config, {"eval.dynamic": rule})
    texts = ((number, line.encode()) for number, line in enumerate(lines, start=11))
    score_input.score_documents(
        TrainedModel.of(run, config),
        texts,
        name="book.txt",
        per_token=per_token,
        write=written.append,
    )
    return [json.loads(line) for line in "".join(written).splitlines()]


@pytest.mark.parametrize("rule", [RULE, SHARED], ids=["each", "shared"])
def test_the_documents_of_a_file_have_the_losses_of_score(run, rule):
    model = txl_jax.load(run.path)
    assert model.trained is not None
    assert model.trained.path == run.path

    per_document = records(run, LINES, rule)

    expected = model.score(LINES, dynamic=rule)
    assert [record["nats"] for record in per_document] == [total.nats for total in expected]
    # All bytes but the first of each line. A record of no tokens has no number of bytes.
    n_scored = [21, 0, 0, 19, 6]
    assert [record["tokens"] for record in per_document] == n_scored
    assert [record.get("bytes", 0) for record in per_document] == n_scored


@pytest.mark.parametrize(
    ("lines", "shared", "is_noted"),
    [(["the", "cat"], False, True), (["the", "cat"], True, False), (LINES, False, False)],
    ids=["one segment each", "shared", "more segments"],
)
def test_a_note_says_that_no_document_has_a_second_segment_to_learn_for(
    run, capsys, lines, shared, is_noted
):
    """Unless documents share what they learn. A segment has 5 tokens."""
    records(run, lines, dataclasses.replace(RULE, shared=shared))

    note = re.search(r"(?m)^note +nothing was learned\b.*shared=true", capsys.readouterr().out)
    assert (note is not None) == is_noted


def test_the_tokens_of_a_file_have_the_losses_before_they_are_learned(run):
    per_token = records(run, LINES, RULE, per_token=True)

    nats = txl_jax.load(run.path).score(LINES, per_token=True, dynamic=RULE)
    recorded = np.array([record["nats"] for record in per_token], np.float32)
    np.testing.assert_array_equal(recorded, np.concatenate(nats))
    text = "".join(line[1:] for line in LINES)
    assert "".join(record["token"] for record in per_token) == text


def test_a_loss_that_is_not_finite_names_line_segment_and_rate_after_the_records_before(run):
    rule = DynamicConfig(rule="sgd", learning_rate=1e30)
    written: list[str] = []

    with pytest.raises(NonFiniteError, match=r"line 12 of book\.txt.*segment 1 .*1e\+30"):
        records(run, ["the c", "the cat " * 3, "the"], rule, written=written)

    assert [json.loads(line)["tokens"] for line in written] == [4]


def test_a_run_whose_evaluations_learn_is_quantized_and_generates_as_ever(run, tmp_path):
    # A server can set these dtypes, with which a model cannot learn, but no rule. So it must start
    # though the record has a rule, which is dropped.
    for dtypes in ({"weight_dtype": "int8"}, {"cache_dtype": "bfloat16"}):
        quantized = txl_jax.load(run.path, **dtypes)
        assert quantized.config.eval.dynamic.rule is None

    learns = txl_jax.load(run.path)
    assert learns.config.eval.dynamic == RULE
    static_config = config_tree.replace(learns.config, {"eval.dynamic": DynamicConfig()})
    components = dataclasses.replace(learns.components, config=static_config)
    static = dataclasses.replace(learns, components=components)
    settings = txl_jax.GenerateConfig(length=20, seed=3)
    assert learns.generate(["the "], settings) == static.generate(["the "], settings)
    pairs = [("the cat", " sat")]
    assert learns.score_continuations(pairs) == static.score_continuations(pairs)
