"""Tests the client of OpenAI against the server."""

import pytest

from support.http_server import ask, joined, server


@pytest.mark.nightly(part="openai")
def test_it_reads_texts_scores_models_and_streams():
    import openai

    with (
        server(keys=("secret",)) as (port, _),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0) as client,
    ):
        assert [each.id for each in client.models.list()] == ["tiny"]
        given = {"model": "tiny", "prompt": ["abc", "h"], "n": 2, "max_tokens": 23, "seed": 1, "logprobs": 2}
        whole = client.completions.create(**given)
        found = ask(port, "/v1/completions", given, key="secret")[1]
        assert [choice.model_dump() for choice in whole.choices] == found["choices"]
        stream = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
        assert joined([event.model_dump() for event in stream]) == joined([found]) and stream[-1].usage == whole.usage
