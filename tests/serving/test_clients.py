"""Tests the clients of OpenAI and of lm-evaluation-harness against the server."""

import numpy as np
import pytest

from support import tiny_model
from support.http_server import ask, joined, server
from txl_jax.config import GenerateConfig

DOCUMENTS = ["abc def gab", "a", "bad cafe fade " * 6]
PAIRS = [("abc", " def"), ("", "gab"), ("ab\ncd", "abcdef")]


def requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, arguments=each, idx=index) for index, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def harness():
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    with server() as (port, _):
        options = {
            "base_url": f"http://127.0.0.1:{port}/v1/completions",
            "tokenizer_backend": "remote",
        }
        # It reads the id 0 of `bos_token` as none.
        options |= {"custom_prefix_token_id": 0, "max_gen_toks": 9}
        yield LocalCompletionsAPI(model="tiny", batch_size=2, max_length=10_000, **options)


@pytest.mark.nightly(part="lm_eval")
def test_log_likelihoods_are_those_of_the_library(harness):
    model = tiny_model.make()
    first = int(model.vocabulary.start[0])
    found = harness.loglikelihood_rolling(
        requests("loglikelihood_rolling", *((text,) for text in DOCUMENTS))
    )
    np.testing.assert_allclose(
        found, [-each.nats for each in model.score(DOCUMENTS, first=first)], rtol=1e-5
    )
    greedy = [(text, model.generate([text], settings())[0]) for text in ("abc", "g")]
    found = harness.loglikelihood(requests("loglikelihood", *PAIRS, *greedy))
    expected = model.score_continuations([*PAIRS, *greedy])
    np.testing.assert_allclose(
        [each[0] for each in found], [each.logprob for each in expected], rtol=1e-5
    )
    assert (
        [each[1] for each in found]
        == [each.is_greedy for each in expected]
        == [False] * 3 + [True] * 2
    )


def settings(**changes):
    return GenerateConfig(**{"length": 9, "temperature": 0.0, "top_k": None, **changes})


@pytest.mark.nightly(part="lm_eval")
def test_generation_stops_at_its_strings(harness):
    model = tiny_model.make()
    stop = model.generate(["abc"], settings())[0][3:5]
    arguments = [
        ("abc", {"until": [stop], "max_gen_toks": 9}),
        ("abc", {"until": [], "temperature": 0.0}),
    ]
    found = harness.generate_until(requests("generate_until", *arguments))
    assert found == [
        model.generate(["abc"], settings(), stop=[stop])[0],
        model.generate(["abc"], settings())[0],
    ]


@pytest.mark.nightly(part="openai")
def test_it_reads_texts_scores_models_and_streams():
    import openai

    with (
        server(keys=("secret",)) as (port, _),
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0
        ) as client,
    ):
        assert [each.id for each in client.models.list()] == ["tiny"]
        given = {
            "model": "tiny",
            "prompt": ["abc", "h"],
            "n": 2,
            "max_tokens": 23,
            "seed": 1,
            "logprobs": 2,
        }
        whole = client.completions.create(**given)
        found = ask(port, "/v1/completions", given, key="secret")[1]
        assert [choice.model_dump() for choice in whole.choices] == found["choices"]
        stream = list(
            client.completions.create(**given, stream=True, stream_options={"include_usage": True})
        )
        assert (
            joined([event.model_dump() for event in stream]) == joined([found])
            and stream[-1].usage == whole.usage
        )
