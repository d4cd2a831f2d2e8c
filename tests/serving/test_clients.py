"""Tests the clients of OpenAI and of lm-evaluation-harness against the server."""

import numpy as np
import pytest

from support import tiny_model
from support.http_server import ask, joined, server
from txl_jax.config import GenerateConfig

LENGTH = 9  # Tokens of a generated text.
GREEDY = GenerateConfig(length=LENGTH, temperature=0.0, top_k=None)

# The last document has 84 tokens, more than the server reads in one segment.
DOCUMENTS = ["abc def gab", "a", "bad cafe fade " * 6]
# (context, continuation), the second pair without a context.
PAIRS = [("abc", " def"), ("", "gab"), ("ab\ncd", "abcdef")]


def requests(kind, arguments):
    """The harness's requests of a kind, with the arguments of each."""
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments=words, idx=index) for index, words in enumerate(arguments)]


@pytest.fixture(scope="module")
def harness():
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with server() as (port, _):
        yield LocalCompletionsAPI(
            model="tiny",
            batch_size=2,
            max_length=10_000,  # Longer than all documents: none is cut.
            base_url=f"http://127.0.0.1:{port}/v1/completions",
            tokenizer_backend="remote",
            # It takes 0, the id of the server's `bos_token`, for no id.
            custom_prefix_token_id=0,
            max_gen_toks=LENGTH,
        )


@pytest.mark.nightly(part="lm_eval")
def test_rolling_log_likelihoods_are_those_of_the_library(harness):
    model = tiny_model.make()
    arguments = [(text,) for text in DOCUMENTS]
    rolling = harness.loglikelihood_rolling(requests("loglikelihood_rolling", arguments))

    totals = model.score(DOCUMENTS, first=int(model.vocabulary.start[0]))
    np.testing.assert_allclose(rolling, [-total.nats for total in totals], rtol=1e-5)


@pytest.mark.nightly(part="lm_eval")
def test_log_likelihoods_of_continuations_are_those_of_the_library(harness):
    model = tiny_model.make()
    pairs = list(PAIRS)
    # The continuations of the last two pairs are greedy ones.
    for text in ("abc", "g"):
        pairs.append((text, model.generate([text], GREEDY)[0]))

    answers = harness.loglikelihood(requests("loglikelihood", pairs))

    expected = model.score_continuations(pairs)
    logprobs = [logprob for logprob, _ in answers]
    np.testing.assert_allclose(logprobs, [score.logprob for score in expected], rtol=1e-5)
    assert [is_greedy for _, is_greedy in answers] == [False, False, False, True, True]
    assert [score.is_greedy for score in expected] == [False, False, False, True, True]


@pytest.mark.nightly(part="lm_eval")
def test_generation_stops_at_its_strings(harness):
    model = tiny_model.make()
    stop = model.generate(["abc"], GREEDY)[0][3:5]
    arguments = [
        ("abc", {"until": [stop], "max_gen_toks": LENGTH}),
        ("abc", {"until": [], "temperature": 0.0}),
    ]
    texts = harness.generate_until(requests("generate_until", arguments))
    assert texts == [
        model.generate(["abc"], GREEDY, stop=[stop])[0],
        model.generate(["abc"], GREEDY)[0],
    ]


@pytest.mark.nightly(part="openai")
def test_the_client_of_openai_reads_texts_scores_models_and_streams():
    """It reads the same as a plain request, at once and as a stream."""
    import openai

    body = {
        "model": "tiny",
        "prompt": ["abc", "h"],
        "n": 2,
        "max_tokens": 23,
        "seed": 1,
        "logprobs": 2,
    }
    with (
        server(keys=("secret",)) as (port, _),
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0
        ) as client,
    ):
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(**body)
        status, plain = ask(port, "/v1/completions", body, key="secret")
        stream = list(
            client.completions.create(**body, stream=True, stream_options={"include_usage": True})
        )

    assert status == 200, plain
    assert [choice.model_dump() for choice in whole.choices] == plain["choices"]
    assert joined([event.model_dump() for event in stream]) == joined([plain])
    assert stream[-1].usage == whole.usage
