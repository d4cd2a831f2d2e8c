"""Tests OpenAI's own client for completions against the server."""

import pytest

from support import tiny_model
from support.http_server import served
from support.serving import engine
from txl_jax.config import GenerateConfig
from txl_jax.serving.app import Settings

pytestmark = pytest.mark.nightly(part="openai")


@pytest.fixture(scope="module")
def client():
    import openai

    with (
        engine(start=False) as made,
        served(made, Settings("tiny", keys=("secret",))) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0) as found,
    ):
        yield found


def test_it_reads_texts_scores_and_models(client):
    assert [each.id for each in client.models.list()] == ["tiny"]
    drawn = {"seed": 5, "temperature": 0.8}
    found = client.completions.create(model="tiny", prompt="abc def", max_tokens=30, logprobs=2, **drawn)
    settings = GenerateConfig(length=30, top_k=None, **drawn)
    assert found.choices[0].text == tiny_model.make().generate(["abc def"], settings)[0]
    assert found.choices[0].finish_reason == "length" and found.object == "text_completion"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (7, 30, 37)
    assert "".join(found.choices[0].logprobs.tokens) == found.choices[0].text


def test_it_reads_a_stream(client):
    given = {"model": "tiny", "prompt": ["abc", "h"], "n": 2, "max_tokens": 23, "seed": 1, "echo": True}
    whole = client.completions.create(**given)
    texts, usage = [""] * 4, None
    for event in client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and usage == whole.usage
