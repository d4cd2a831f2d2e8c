"""Tests the server over HTTP: OpenAI's own client, scores, streams, sessions, mistakes, clients that leave."""

import http.client
import json
import re
import threading
import time

import numpy as np
import openai
import pytest

from support import tiny_model
from support.http_server import ask, served
from support.serving import engine, ids, make_store
from txl_jax.config import GenerateConfig
from txl_jax.serving.app import Settings
from txl_jax.serving.requests import Limits

LIMITS = Limits(body_bytes=20_000, prompt_tokens=500, new_tokens=4000, choices=8, stop_strings=3, stop_length=20)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The engine of the server."""
    store = make_store(limit=3, folder=tmp_path_factory.mktemp("sessions"))
    with engine(store=store, limits=LIMITS, start=False) as stopped:
        yield stopped


@pytest.fixture(scope="module")
def port(made):
    with served(made, Settings("tiny", limits=LIMITS)) as number:
        yield number


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as made:
        yield made


def complete(port, **body):
    return ask(port, "/v1/completions", {"prompt": "abc", **body})


def test_the_openai_client_gets_what_the_library_writes(client):
    model = tiny_model.make()
    assert [each.id for each in client.models.list()] == ["tiny"]
    found = client.completions.create(model="tiny", prompt="abc def", max_tokens=30, seed=5, temperature=0.8, top_p=0.9)
    settings = GenerateConfig(length=30, top_k=None, seed=5, temperature=0.8, top_p=0.9)
    assert found.choices[0].text == model.generate(["abc def"], settings)[0]
    assert found.choices[0].finish_reason == "length" and found.object == "text_completion"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (7, 30, 37)


def test_a_stream_is_the_same_text_in_pieces(client):
    given = {"model": "tiny", "prompt": ["abc", "h"], "n": 2, "max_tokens": 23, "seed": 1, "echo": True}
    whole = client.completions.create(**given)
    texts, usage = [""] * 4, None
    for event in client.completions.create(**given, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and len(set(texts)) == 4
    assert usage == whole.usage and usage.completion_tokens == 4 * 23 and usage.prompt_tokens == 4
    assert texts[0].startswith("abc") and texts[2].startswith("h")


def test_scores_of_prompts_are_those_of_the_library(client):
    """As lm-evaluation-harness asks for them: ids or text, echo, one token or none, and the likeliest token."""
    model = tiny_model.make()
    prompts = [ids(40).tolist(), ids(70, seed=1).tolist()]
    for max_tokens in (0, 1):
        found = client.completions.create(
            model="tiny", prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0
        )
        for prompt, choice in zip(prompts, found.choices, strict=True):
            logprobs = choice.logprobs
            assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) == len(prompt) + max_tokens
            expected = -model.score([prompt], per_token=True)[0]
            np.testing.assert_allclose(logprobs.token_logprobs[1 : len(prompt)], expected, rtol=1e-5, atol=1e-5)
            assert logprobs.tokens[: len(prompt)] == list(model.decode(prompt))
            assert logprobs.text_offset == list(range(len(prompt) + max_tokens))
            table, _ = model.log_probabilities([prompt[:-1]], model.init_memory(1))
            likeliest = [model.decode([token]) for token in np.argmax(table[0], axis=-1)]
            assert [next(iter(top)) for top in logprobs.top_logprobs[1 : len(prompt)]] == likeliest
    text = client.completions.create(model="tiny", prompt=model.decode(prompts[0]), max_tokens=0, echo=True, logprobs=1)
    np.testing.assert_allclose(
        sum(text.choices[0].logprobs.token_logprobs[1:]), -model.score(prompts[:1])[0].nats, 1e-5
    )


def test_logprobs_of_written_tokens(port):
    status, found = complete(port, max_tokens=12, logprobs=3, seed=1, stop=["zz"])
    logprobs = found["choices"][0]["logprobs"]
    assert status == 200 and "".join(logprobs["tokens"]) == found["choices"][0]["text"]
    assert logprobs["text_offset"][0] == 3 and all(len(top) == 3 for top in logprobs["top_logprobs"])
    for token, logprob, top in zip(*(logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top.get(token, logprob) == pytest.approx(logprob, abs=1e-5) and logprob <= max(top.values()) + 1e-5


def test_a_session_over_http(port, made):
    created, session = ask(port, "/v1/sessions", {})
    name = session["id"]
    assert created == 201 and session["tokens"] == 0
    first = complete(port, session=name, prompt="abc", max_tokens=20, temperature=0)[1]["choices"][0]["text"]
    second = complete(port, session=name, prompt="", max_tokens=15, temperature=0)[1]["choices"][0]["text"]
    assert complete(port, prompt="abc", max_tokens=35, temperature=0)[1]["choices"][0]["text"] == first + second
    assert ask(port, f"/v1/sessions/{name}")[1]["tokens"] == 38
    status, session = ask(port, f"/v1/sessions/{name}/save", b"")
    assert status == 200 and session["saved"], session
    assert [each["id"] for each in ask(port, "/v1/sessions")[1]["data"]] == [name]
    assert complete(port, session=name, n=2)[0] == 400
    others = [ask(port, "/v1/sessions", {})[1]["id"] for _ in range(2)]
    assert complete(port, session=others[0], prompt="")[0] == 400
    assert ask(port, "/v1/sessions", {})[0] == 429
    for each in (name, *others):
        assert ask(port, f"/v1/sessions/{each}", method="DELETE") == (
            200,
            {"id": each, "object": "session", "deleted": True},
        )
    status, found = complete(port, session=name)
    assert status == 404 and found["error"]["code"] == "session_not_found" and made.store.num_sessions == 0


def test_a_full_disk_is_one_sentence_and_the_session_stays(port, made, monkeypatch):
    name = ask(port, "/v1/sessions", {})[1]["id"]
    text = complete(port, session=name, max_tokens=5, temperature=0)[1]["choices"][0]["text"]

    def full(*unused):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        status, found = ask(port, f"/v1/sessions/{name}/save", b"")
    assert status == 507 and "No space left" in found["error"]["message"]
    more = complete(port, session=name, prompt="", max_tokens=5, temperature=0)[1]["choices"][0]["text"]
    assert complete(port, max_tokens=10, temperature=0)[1]["choices"][0]["text"] == text + more
    assert ask(port, f"/v1/sessions/{name}", method="DELETE")[0] == 200


MISTAKES = {
    "an empty body": (b"", 400, "malformed_json"),
    "no json": (b"{", 400, "malformed_json"),
    "no object": (b"[1]", 400, "malformed_json"),
    "no utf-8": (b'{"prompt": "\xff"}', 400, "malformed_json"),
    "nan": (b'{"temperature": NaN}', 400, "malformed_json"),
    "a key twice": (b'{"max_tokens": 1, "prompt": "a", "max_tokens": 2}', 400, "malformed_json"),
    "deep": (b"[" * 15_000, 400, "malformed_json"),
    "too long": (b" " * 30_000, 413, "body_too_large"),
    "unknown field": ({"promt": "a"}, 400, "unknown_parameter"),
    "another model": ({"model": "gpt"}, 404, "model_not_found"),
    "text for a number": ({"max_tokens": "many"}, 400, "invalid_request"),
    "a part of a token": ({"max_tokens": 1.5}, 400, "invalid_request"),
    "true for a number": ({"n": True}, 400, "invalid_request"),
    "a number for text": ({"session": 5}, 400, "invalid_request"),
    "text for true": ({"echo": "yes"}, 400, "invalid_request"),
    "null in place of an object": (b"null", 400, "malformed_json"),
    "a list of options": ({"stream_options": []}, 400, "invalid_request"),
    "too many tokens": ({"max_tokens": 4001}, 400, "invalid_request"),
    "nothing": ({"max_tokens": 0}, 400, "invalid_request"),
    "negative temperature": ({"temperature": -1}, 400, "invalid_request"),
    "huge temperature": (b'{"temperature": 1e999}', 400, "invalid_request"),
    "top_p of 0": ({"top_p": 0}, 400, "invalid_request"),
    "huge seed": ({"seed": 1 << 70}, 400, "invalid_request"),
    "penalty": ({"presence_penalty": 1}, 400, "invalid_request"),
    "best of many": ({"best_of": 3}, 400, "invalid_request"),
    "stop of numbers": ({"stop": [1]}, 400, "invalid_request"),
    "many stops": ({"stop": ["a"] * 4}, 400, "invalid_request"),
    "a long stop": ({"stop": "a" * 21}, 400, "invalid_request"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', 400, "invalid_request"),
    "a surrogate as stop": (b'{"stop": "\\ud800"}', 400, "invalid_request"),
    "letters that it lacks": ({"prompt": "XYZ"}, 400, "invalid_request"),
    "ids out of range": ({"prompt": [1, 13]}, 400, "invalid_request"),
    "huge ids": ({"prompt": [1 << 80]}, 400, "invalid_request"),
    "negative ids": ({"prompt": [-1]}, 400, "invalid_request"),
    "ids and texts": ({"prompt": [1, "a"]}, 400, "invalid_request"),
    "an empty list": ({"prompt": []}, 400, "invalid_request"),
    "too many choices": ({"prompt": ["a"] * 5, "n": 2}, 400, "invalid_request"),
    "a long prompt": ({"prompt": [1] * 501}, 400, "prompt_too_long"),
    "no such session": ({"session": "../../x"}, 404, "session_not_found"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_their_status_and_one_sentence(port, name):
    body, status, code = MISTAKES[name]
    found = ask(port, "/v1/completions", body)
    assert (found[0], found[1]["error"]["code"]) == (status, code)
    message = found[1]["error"]["message"]
    assert 10 < len(message) < 400 and "Traceback" not in message and "\n" not in message
    assert not re.search(r"\b(NoneType|str|dict|bool|True|False|None)\b", message), "the words of JSON"


def test_other_paths_methods_and_types(port):
    status, found = ask(port, "/v1/chat/completions", {})
    assert (status, found["error"]["code"]) == (404, "not_found") and "/v1/completions" in found["error"]["message"]
    status, found = ask(port, "/v1/completions", method="GET")
    assert (status, found["error"]["code"]) == (405, "method_not_allowed")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/v1/completions")
    assert connection.getresponse().getheader("Allow") == "POST"
    connection.close()
    assert ask(port, "/v1/completions", {"prompt": "a"}, headers={"Content-Type": "text/plain"})[0] == 415
    headers = {"Sec-Fetch-Site": "cross-site"}
    status, found = ask(port, "/v1/sessions", b"", headers=headers)
    assert (status, found["error"]["code"]) == (403, "cross_site")
    assert ask(port, "/v1/models", headers=headers)[0] == 200
    assert ask(port, "/v1/models/other")[0] == 404 and ask(port, "/v1/models/tiny")[1]["id"] == "tiny"
    assert ask(port, "/healthz") == (200, "ok\n") and ask(port, "/readyz") == (200, "ready\n")


def test_a_client_that_leaves_frees_its_rows(port, made):
    before = made.counters.ended["cancelled"]
    for stream in (True, False):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = json.dumps({"prompt": "abc", "n": 4, "max_tokens": 4000, "stream": stream})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        if stream:
            connection.getresponse().read(200)
        else:
            while made.num_busy < 4:
                time.sleep(0.01)
        connection.sock.close()
        connection.close()
    until = time.monotonic() + 60
    while made.num_busy or made.num_waiting:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert made.counters.ended["cancelled"] == before + 8
    metrics = ask(port, "/metrics")[1]
    assert "txl_rows_busy 0.0" in metrics and 'txl_choices_ended_total{reason="cancelled"} 8.0' in metrics


def test_keys_separate_clients():
    settings = Settings("tiny", keys=("first", "second"), limits=LIMITS)
    with engine(start=False) as made, served(made, settings) as port:
        for key in (None, "third", "firs"):
            status, found = ask(port, "/v1/models", key=key)
            assert status == 401 and found["error"]["code"] == "invalid_api_key"
        assert ask(port, "/healthz")[0] == 200 and "<html" in ask(port, "/")[1]
        name = ask(port, "/v1/sessions", {}, key="first")[1]["id"]
        body = {"prompt": "a", "session": name, "max_tokens": 2}
        assert ask(port, "/v1/completions", body, key="second")[0] == 404
        assert ask(port, f"/v1/sessions/{name}", method="DELETE", key="second")[0] == 404
        assert ask(port, "/v1/sessions", key="second")[1]["data"] == []
        body |= {"max_tokens": 4000}
        waiting = threading.Thread(target=ask, args=(port, "/v1/completions", body), kwargs={"key": "first"})
        waiting.start()
        while not made.num_busy:
            time.sleep(0.01)
        assert ask(port, "/v1/completions", body, key="first")[1]["error"]["code"] == "session_busy"
        made.cut_off()
        waiting.join()
