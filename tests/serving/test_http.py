"""Tests the server over HTTP: texts, scores, streams, sessions, mistakes, clients that leave."""

import asyncio
import concurrent.futures
import http.client
import json
import threading
from unittest import mock

import numpy as np
import pydantic
import pytest

from support import tiny_model
from support.http_server import ask, complete, events, joined, left, metrics, server, wait_idle
from support.serving import SECONDS, gate, ids, refused
from support.waiting import wait_until
from txl_jax.config import GenerateConfig
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.serving import protocol
from txl_jax.serving.app import make_app
from txl_jax.serving.engine import Piece, Prompt, ServerLimits

LIMITS = ServerLimits(
    body_bytes=70_000, tokens=20_000, new_tokens=4000, choices=8, stop_strings=3, stop_length=20
)


@pytest.fixture(scope="module")
def running():
    with server(limits=LIMITS, sessions=3) as found:
        yield found


@pytest.fixture(scope="module")
def port(running):
    return running[0]


def refusal(answer):
    status, found = answer
    return status, found["error"]["code"]


def test_a_text_is_the_one_that_the_library_writes(port):
    assert [each["id"] for each in ask(port, "/v1/models")[1]["data"]] == ["tiny"]
    limits = {"seed": 5, "temperature": 0.8, "top_p": 0.9}
    status, found = complete(
        port, model="tiny", prompt="abc def", max_tokens=30, logprobs=3, stop=["zz"], **limits
    )
    expected = tiny_model.make().generate(
        ["abc def"], GenerateConfig(length=30, top_k=None, **limits)
    )[0]
    assert status == 200 and found["object"] == "text_completion"
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (
        expected,
        "length",
    )
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 30, "total_tokens": 37}
    logprobs = found["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == expected and logprobs["text_offset"] == list(range(7, 37))
    for token, logprob, top in zip(
        *(logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert len(top) == 3 and top.get(token, logprob) == logprob <= max(top.values()) + 1e-5


def test_offsets_count_characters_whose_bytes_are_tokens():
    vocabulary = ByteVocabulary(bytes(range(256)))
    tokens = np.asarray(vocabulary.encode("äb€c".encode()), np.int32)
    writer = protocol.ChoiceWriter(
        0, Prompt(tokens, max_tokens=0, echo=True), vocabulary, logprobs=0
    )
    found = writer.json_of(
        [Piece("", tokens[:5], None, is_prompt=True), Piece("", tokens[5:], None, is_prompt=True)]
    )
    assert found["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 2, 3]


def test_a_stream_is_the_same_text_in_pieces(port):
    given = {"prompt": ["abc", "h"], "n": 2, "max_tokens": 23, "seed": 1, "echo": True}
    whole = complete(port, **given)[1]
    found = events(complete(port, **given, stream=True, stream_options={"include_usage": True})[1])
    texts = [text for text, _, _ in joined(found)]
    assert (
        joined(found) == joined([whole])
        and len(set(texts)) == 4
        and found[-1]["usage"] == whole["usage"]
    )
    assert whole["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4 * 23,
        "total_tokens": 4 * 24,
    }
    assert texts[0].startswith("abc") and texts[2].startswith("h")


def test_scores_of_prompts_are_those_of_the_library(port):
    """As lm-evaluation-harness asks for them: ids, echo, one token or none, and the most likely
    tokens.
    """
    model = tiny_model.make()
    prompts = [ids(40).tolist(), ids(70, seed=1).tolist()]
    for max_tokens in (0, 1):
        found = complete(
            port, prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=3, temperature=0
        )[1]
        for prompt, choice in zip(prompts, found["choices"], strict=True):
            logprobs = choice["logprobs"]
            assert (
                logprobs["token_logprobs"][0] is None
                and len(logprobs["tokens"]) == len(prompt) + max_tokens
            )
            expected = -model.score([prompt], per_token=True)[0]
            np.testing.assert_allclose(
                logprobs["token_logprobs"][1 : len(prompt)], expected, rtol=1e-5, atol=1e-5
            )
            assert logprobs["tokens"][: len(prompt)] == list(model.decode(prompt))
            assert logprobs["text_offset"] == list(range(len(prompt) + max_tokens))
            table = np.asarray(model.log_probabilities([prompt[:-1]], model.init_memory(1))[0][0])
            for row, top in zip(table, logprobs["top_logprobs"][1 : len(prompt)], strict=True):
                order = np.argsort(-row)[:3]
                assert list(top) == [model.decode([token]) for token in order]
                np.testing.assert_allclose(list(top.values()), row[order], rtol=1e-5, atol=1e-5)


def test_a_session_over_http(running):
    port, made = running
    created, session = ask(port, "/v1/sessions", {})
    name = session["id"]
    assert created == 201 and session["tokens"] == 0
    both = [
        complete(port, session=name, prompt=prompt, max_tokens=length, temperature=0)[1]["choices"][
            0
        ]["text"]
        for prompt, length in (("abc", 20), ("", 15))
    ]
    assert complete(port, max_tokens=35, temperature=0)[1]["choices"][0]["text"] == "".join(both)
    assert ask(port, f"/v1/sessions/{name}")[1]["tokens"] == 38
    assert [each["id"] for each in ask(port, "/v1/sessions")[1]["data"]] == [name]
    assert complete(port, session=name, n=2)[0] == 400
    others = [ask(port, "/v1/sessions", {})[1]["id"] for _ in range(2)]
    assert complete(port, session=others[0], prompt="")[0] == 400
    assert ask(port, "/v1/sessions", {})[0] == 201  # The one idle longest makes room.
    assert refusal(complete(port, session=name)) == (404, "session_not_found")
    name = ask(port, "/v1/sessions")[1]["data"][-1]["id"]
    for each in (name, *others):
        assert ask(port, f"/v1/sessions/{each}", method="DELETE")[1]["deleted"]
    assert (
        refusal(complete(port, session=name)) == (404, "session_not_found")
        and made.store.num_sessions == 0
    )


# The body, the status, and the code or the name of the field.
MISTAKES = {
    "no json": (b"{", 400, "malformed_json"),
    "no object": (b"[1]", 400, "malformed_json"),
    "no utf-8": (b'{"prompt": "\xff"}', 400, "malformed_json"),
    "nan": (b'{"temperature": NaN}', 400, "malformed_json"),
    "a key twice": (b'{"max_tokens": 1, "prompt": "a", "max_tokens": 2}', 400, "malformed_json"),
    "deep": (b"[" * 15_000, 400, "malformed_json"),
    "too long": (b" " * 80_000, 413, "body_too_large"),
    "unknown field": ({"promt": "a"}, 400, "unknown_parameter"),
    "another model": ({"model": "gpt"}, 404, "model_not_found"),
    "true for a number": ({"n": True}, 400, "n"),
    "too many tokens": ({"max_tokens": 4001}, 400, "max_tokens"),
    "nothing": ({"max_tokens": 0}, 400, "max_tokens"),
    "huge temperature": (b'{"temperature": 1e999}', 400, "temperature"),
    "top_p of 0": ({"top_p": 0}, 400, "top_p"),
    "penalty": ({"presence_penalty": 1}, 400, "presence_penalty"),
    "a fork of no session": ({"fork": True}, 400, "fork"),
    "usage without a stream": ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    "best of many": ({"best_of": 3}, 400, "best_of"),
    "many stops": ({"stop": ["a"] * 4}, 400, "stop"),
    "a long stop": ({"stop": "a" * 21}, 400, "stop"),
    "half a character as a name": (b'{"\\ud800": 1}', 400, "unknown_parameter"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', 400, "prompt"),
    "half a character to stop at": (b'{"stop": "\\ud800"}', 400, "stop"),
    "half a character among stops": (b'{"stop": ["x", "\\udfff"]}', 400, "stop"),
    "letters that it lacks": ({"prompt": "XYZ"}, 400, "prompt"),
    "ids out of range": ({"prompt": [1, 13]}, 400, "prompt"),
    "ids and texts": ({"prompt": [1, "a"]}, 400, "prompt"),
    "too many choices": ({"prompt": ["a"] * 5, "n": 2}, 400, "prompt"),
    "a long prompt": ({"prompt": [1] * 5000, "max_tokens": 4000, "n": 4}, 400, "too_many_tokens"),
    "many long texts": ({"max_tokens": 4000, "n": 6}, 400, "too_many_tokens"),
    "no such session": ({"session": "../../x"}, 404, "session_not_found"),
}


@pytest.mark.parametrize("odd", [{}, [], "a", None])
def test_a_body_of_many_mistakes_is_refused_at_the_first(odd):
    """An error of each of millions takes a minute."""
    with pytest.raises(pydantic.ValidationError) as raised:
        protocol.CompletionBody.model_validate({"prompt": [1, *[odd] * 1000]})
    assert raised.value.error_count() < 10
    many = json.dumps(dict.fromkeys(map(str, range(1000)), odd)).encode()
    assert len(str(refused(400, protocol.parse, many, protocol.CompletionBody))) < 400


@pytest.mark.parametrize(("body", "status", "named"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_get_their_status_and_are_named(port, body, status, named):
    found, content = ask(port, "/v1/completions", body)
    error = content["error"]
    assert found == status and named in (error["code"], error["param"])
    message = error["message"]
    assert 10 < len(message) < 400 and "Traceback" not in message and "\n" not in message


def test_other_paths_methods_and_types(port):
    assert refusal(ask(port, "/v1/chat/completions", {})) == (404, "not_found")
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/sessions", "GET, HEAD, POST"),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request(method, path)
        response = connection.getresponse()
        assert (response.status, response.getheader("Allow")) == (405, allowed)
        connection.close()
    assert (
        ask(port, "/v1/completions", {"prompt": "a"}, headers={"Content-Type": "text/plain"})[0]
        == 415
    )
    assert (
        ask(port, "/v1/models/other")[0] == 404 and ask(port, "/v1/models/tiny")[1]["id"] == "tiny"
    )
    assert ask(port, "/healthz") == (200, "ok\n") and ask(port, "/readyz") == (200, "ready\n")
    tokens = ask(port, "/tokenize", {"prompt": "abc"})[1]["tokens"]
    assert tokens == tiny_model.VOCABULARY.encode(b"abc").tolist()
    assert ask(port, "/detokenize", {"tokens": tokens})[1]["prompt"] == "abc"


def test_texts_of_too_many_tokens_are_not_taken_apart(port):
    for path, body in (
        ("/tokenize", {"prompt": "a" * 20_001}),
        ("/detokenize", {"tokens": [1] * 20_001}),
    ):
        assert refusal(ask(port, path, body)) == (400, "too_many_tokens")
    for path in ("/tokenize", "/detokenize"):
        assert (
            ask(port, path, b'{"prompt": "a", "prompt": "b"}')[0]
            == ask(port, path, {"prompt": 1})[0]
            == 400
        )


@pytest.mark.parametrize(
    ("function", "path", "body"),
    [
        ("parse", "/tokenize", {"prompt": "abc"}),
        ("tokenize", "/tokenize", {"prompt": "abc"}),
        ("detokenize", "/detokenize", {"tokens": [1]}),
        ("prompts_of", "/v1/completions", {"prompt": "abc", "max_tokens": 1}),
        ("ChoiceWriter.json_of", "/v1/completions", {"prompt": "abc", "max_tokens": 1}),
        (
            "ChoiceWriter.json_of",
            "/v1/completions",
            {"prompt": "abc", "max_tokens": 1, "stream": True},
        ),
    ],
)
def test_other_requests_are_answered_while_one_is_read_or_written(port, function, path, body):
    owner, name = (protocol.ChoiceWriter, "json_of") if "." in function else (protocol, function)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, gate(owner, name) as (reached, through):
        found = pool.submit(ask, port, path, body)
        assert reached.wait(SECONDS) and ask(port, "/healthz")[0] == 200 and not found.done()
        through.set()
        assert found.result()[0] in (200, 201)


def test_a_session_is_free_after_whatever_fails(running, monkeypatch):
    port, made = running
    name = ask(port, "/v1/sessions", {})[1]["id"]
    monkeypatch.setattr(made, "submit", mock.Mock(side_effect=OSError("no thread")))
    assert refusal(complete(port, session=name)) == (500, "internal")
    monkeypatch.undo()
    assert complete(port, session=name)[0] == 200
    assert ask(port, f"/v1/sessions/{name}", method="DELETE")[0] == 200


def test_a_session_is_deleted_while_a_request_continues_it(running):
    """As by a page that is closed while a text is written: the server may not have noticed that its
    reader has left.
    """
    port, made = running
    expected = complete(port, max_tokens=20, temperature=0)[1]["choices"]
    name = ask(port, "/v1/sessions", {})[1]["id"]
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        gate(made.step, "write") as (reached, through),
    ):
        other = pool.submit(complete, port, session=name, max_tokens=20, temperature=0)
        assert reached.wait(SECONDS)
        assert ask(port, f"/v1/sessions/{name}", method="DELETE")[0] == 200
        assert refusal(ask(port, f"/v1/sessions/{name}")) == (404, "session_not_found")
        through.set()
        assert other.result(SECONDS)[1]["choices"] == expected, "its request continues"
    assert refusal(complete(port, session=name)) == (404, "session_not_found")
    assert name not in {each["id"] for each in ask(port, "/v1/sessions")[1]["data"]}


def test_no_session_is_made_for_a_client_that_has_left(running):
    """As for a page that is left right after its first text was sent."""
    made = running[1]
    before = made.store.num_sessions, made.store.num_evicted
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{}"}]
    sent = []

    async def receive():
        return messages.pop()

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/sessions",
        "query_string": b"",
        "headers": headers,
    }
    asyncio.run(make_app(made, "tiny")(scope, receive, send))
    assert sent[0]["status"] == 499
    assert (made.store.num_sessions, made.store.num_evicted) == before


def test_a_text_begins_from_a_session_any_number_of_times(port):
    name = ask(port, "/v1/sessions", {})[1]["id"]
    first = complete(port, session=name, max_tokens=20, temperature=0)[1]["choices"][0]["text"]
    given = {"prompt": ["", "ab"], "n": 3, "max_tokens": 15, "seed": 4}
    assert refusal(complete(port, session=name, **given)) == (400, "invalid_request")
    found = complete(port, session=name, fork=True, **given)[1]["choices"]
    texts = ["abc" + first, "abc" + first + "ab"]
    assert found == complete(port, **given | {"prompt": texts})[1]["choices"]
    assert ask(port, f"/v1/sessions/{name}")[1]["tokens"] == 23
    assert ask(port, f"/v1/sessions/{name}", method="DELETE")[0] == 200


def test_a_body_that_does_not_come_ends_its_request():
    with server(limits=ServerLimits(body_seconds=0.1)) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        headers = {"Content-Type": "application/json", "Content-Length": "9"}
        connection.request("POST", "/v1/completions", headers=headers)
        assert connection.getresponse().status == 408
        connection.close()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "[::1", "localhost.evil.example", ""]
)
def test_a_name_of_another_site_is_refused(port, host):
    """As a browser asks for a page whose name was made to resolve to this address."""
    for own in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000"):
        assert ask(port, "/v1/models", headers={"Host": own})[0] == 200
    headers = {"Host": host, "Sec-Fetch-Site": "same-origin", "Origin": f"http://{host}"}
    for path, body in (
        ("/v1/sessions", {}),
        ("/v1/sessions", None),
        ("/", None),
        ("/metrics", None),
    ):
        assert refusal(ask(port, path, body, headers=headers)) == (421, "unknown_host"), path
    assert ask(port, "/v1/sessions")[1]["data"] == []
    assert ask(port, "/healthz", headers=headers) == (200, "ok\n")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"]
)
def test_a_page_of_another_site_is_refused(port, origin):
    for path, body in (
        ("/v1/sessions", {}),
        ("/v1/sessions", None),
        ("/v1/completions", {"prompt": "a"}),
    ):
        assert refusal(ask(port, path, body, headers={"Origin": origin})) == (403, "cross_site"), (
            path
        )
    own = {"Origin": f"http://127.0.0.1:{port}"}
    assert (
        complete(port, max_tokens=1)[0]
        == ask(port, "/v1/completions", {"prompt": "a"}, headers=own)[0]
        == 200
    )
    assert ask(port, "/v1/sessions", b"", headers={"Content-Type": "text/plain"})[0] == 415


def test_a_client_that_leaves_frees_its_rows(running):
    port, made = running
    before = made.counters.ended["cancelled"]
    for stream in (True, False):
        with left(port, {"prompt": "abc", "n": 4, "max_tokens": 4000, "stream": stream}):
            wait_until(lambda: made.num_busy == 4)
        wait_idle(port)
    assert made.counters.ended["cancelled"] == before + 8
    found = metrics(port)
    assert (found["txl_rows_busy"], found['txl_choices_ended_total{reason="cancelled"}']) == (
        0,
        before + 8,
    )


def test_keys_separate_clients():
    with server(keys=("first", "second")) as (port, made):
        for key in (None, "third", "firs"):
            assert refusal(ask(port, "/v1/models", key=key)) == (401, "invalid_api_key")
        assert (
            ask(port, "/healthz")[0] == 200
            and "<html" in ask(port, "/")[1]
            and ask(port, "/metrics")[0] == 401
        )
        name = ask(port, "/v1/sessions", {}, key="first")[1]["id"]
        body = {"prompt": "a", "session": name, "max_tokens": 2}
        assert ask(port, "/v1/completions", body, key="second")[0] == 404
        assert ask(port, f"/v1/sessions/{name}", method="DELETE", key="second")[0] == 404
        assert ask(port, "/v1/sessions", key="second")[1]["data"] == []
        body |= {"max_tokens": 4000}
        waiting = threading.Thread(
            target=ask, args=(port, "/v1/completions", body), kwargs={"key": "first"}
        )
        waiting.start()
        wait_until(lambda: made.num_busy)
        assert refusal(ask(port, "/v1/completions", body, key="first")) == (409, "session_busy")
        assert ask(port, f"/v1/sessions/{name}", method="DELETE", key="first")[0] == 200
        made.cut_off()
        waiting.join()
