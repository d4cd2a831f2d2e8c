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

# Small enough for the tests of mistakes, which exceed each of them.
LIMITS = ServerLimits(
    body_bytes=70_000, tokens=20_000, new_tokens=4000, choices=8, stop_strings=3, stop_length=20
)


@pytest.fixture(scope="module")
def running():
    """The port of a server, and its engine."""
    with server(limits=LIMITS, sessions=3) as port_and_engine:
        yield port_and_engine


@pytest.fixture(scope="module")
def port(running):
    return running[0]


def ok(answer):
    """The content of an answer with status 200."""
    status, content = answer
    assert status == 200, (status, content)
    return content


def refusal(answer):
    """The status and the code of an error."""
    status, content = answer
    assert status >= 400, (status, content)
    return status, content["error"]["code"]


def new_session(port, **key):
    status, session = ask(port, "/v1/sessions", {}, **key)
    assert status == 201, (status, session)
    assert session["tokens"] == 0
    return session["id"]


def delete(port, name, **key):
    return ask(port, f"/v1/sessions/{name}", method="DELETE", **key)


def choices(port, **body):
    return ok(complete(port, **body))["choices"]


def text(port, **body):
    """The text of the only choice."""
    [choice] = choices(port, **body)
    return choice["text"]


def test_a_text_is_the_one_that_the_library_writes(port):
    assert [model["id"] for model in ok(ask(port, "/v1/models"))["data"]] == ["tiny"]
    limits = {"seed": 5, "temperature": 0.8, "top_p": 0.9}
    settings = GenerateConfig(length=30, top_k=None, **limits)
    expected = tiny_model.make().generate(["abc def"], settings)[0]

    # The vocabulary's tokens are letters, without the one of the stop string.
    answer = ok(
        complete(
            port, model="tiny", prompt="abc def", max_tokens=30, logprobs=3, stop=["zz"], **limits
        )
    )

    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 30, "total_tokens": 7 + 30}
    assert choice["text"] == expected
    assert choice["finish_reason"] == "length"
    assert "".join(logprobs["tokens"]) == expected
    assert logprobs["text_offset"] == list(range(7, 7 + 30))
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 30
    for number, token in enumerate(logprobs["tokens"]):
        logprob = logprobs["token_logprobs"][number]
        top = logprobs["top_logprobs"][number]
        assert len(top) == 3, f"token {number}"
        assert top.get(token, logprob) == logprob <= max(top.values()) + 1e-5, f"token {number}"


def test_offsets_count_characters_whose_bytes_are_tokens():
    """A token's offset is the number of characters that are complete before it.

    Here the three bytes of the euro sign are parted by the end of a piece.
    """
    vocabulary = ByteVocabulary(bytes(range(256)))
    tokens = np.asarray(vocabulary.encode("äb€c".encode()), np.int32)
    prompt = Prompt(tokens, max_tokens=0, echo=True)
    first = Piece("", tokens[:5], None, is_prompt=True)
    second = Piece("", tokens[5:], None, is_prompt=True)

    writer = protocol.ChoiceWriter(0, prompt, vocabulary, logprobs=0)
    answer = writer.json_of([first, second])

    assert answer["logprobs"]["text_offset"] == [0, 0, 1, 2, 2, 2, 3]


def test_a_stream_is_the_same_text_in_pieces(port):
    body = {"prompt": ["abc", "h"], "n": 2, "max_tokens": 23, "seed": 1, "echo": True}

    whole = ok(complete(port, **body))
    stream = ok(complete(port, **body, stream=True, stream_options={"include_usage": True}))

    parts = events(stream)
    texts = [text for text, _, _ in joined(parts)]
    assert joined(parts) == joined([whole])
    assert parts[-1]["usage"] == whole["usage"]
    assert whole["usage"] == {
        "prompt_tokens": 3 + 1,
        "completion_tokens": 4 * 23,
        "total_tokens": 3 + 1 + 4 * 23,
    }
    # The samples differ, and those of a prompt come one after the other.
    assert len(set(texts)) == 4
    assert texts[0].startswith("abc")
    assert texts[2].startswith("h")


def check_top_logprobs(top_logprobs, model, prompt):
    """Compares the three most likely tokens after each token of a prompt with the library's."""
    log_p, _ = model.log_probabilities([prompt[:-1]], model.init_memory(1))
    for row, top in zip(np.asarray(log_p)[0], top_logprobs, strict=True):
        order = np.argsort(-row)[:3]
        assert list(top) == [model.decode([token]) for token in order]
        np.testing.assert_allclose(list(top.values()), row[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_of_prompts_are_those_of_the_library(port, max_tokens):
    """As lm-evaluation-harness asks for them: ids, echo, one token or none, and the most likely
    tokens.
    """
    model = tiny_model.make()
    # The server reads the second prompt in more than one segment, of at most 64 tokens.
    prompts = [ids(40).tolist(), ids(70, seed=1).tolist()]

    answered = choices(
        port, prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=3, temperature=0
    )

    for prompt, choice in zip(prompts, answered, strict=True):
        n_prompt = len(prompt)
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == n_prompt + max_tokens
        assert logprobs["tokens"][:n_prompt] == list(model.decode(prompt))
        assert logprobs["text_offset"] == list(range(n_prompt + max_tokens))
        assert logprobs["token_logprobs"][0] is None
        expected = -model.score([prompt], per_token=True)[0]
        np.testing.assert_allclose(
            logprobs["token_logprobs"][1:n_prompt], expected, rtol=1e-5, atol=1e-5
        )
        check_top_logprobs(logprobs["top_logprobs"][1:n_prompt], model, prompt)


def test_a_session_continues_its_text(port):
    name = new_session(port)
    first = text(port, session=name, prompt="abc", max_tokens=20, temperature=0)
    second = text(port, session=name, prompt="", max_tokens=15, temperature=0)
    assert text(port, max_tokens=35, temperature=0) == first + second
    assert ok(ask(port, f"/v1/sessions/{name}"))["tokens"] == 3 + 20 + 15
    assert ok(delete(port, name))["deleted"]


def test_sessions_are_made_listed_evicted_and_deleted(running):
    """The server keeps three."""
    port, made = running
    oldest = new_session(port)
    assert [session["id"] for session in ok(ask(port, "/v1/sessions"))["data"]] == [oldest]
    assert complete(port, session=oldest, n=2)[0] == 400, "a session continues as one text"
    second = new_session(port)
    third = new_session(port)
    assert complete(port, session=second, prompt="")[0] == 400, "there is nothing to continue"

    fourth = new_session(port)  # The session idle longest makes room.
    assert refusal(complete(port, session=oldest)) == (404, "session_not_found")
    assert ok(ask(port, "/v1/sessions"))["data"][-1]["id"] == fourth

    for name in (second, third, fourth):
        assert ok(delete(port, name))["deleted"]
    assert refusal(complete(port, session=fourth)) == (404, "session_not_found")
    assert made.store.num_sessions == 0


@pytest.mark.parametrize("odd", [{}, [], "a", None])
def test_a_body_of_many_mistakes_is_refused_at_the_first(odd):
    """With an error of each, a body of millions of mistakes would take a minute."""
    # One error at most for each type that a prompt may have.
    with pytest.raises(pydantic.ValidationError) as raised:
        protocol.CompletionBody.model_validate({"prompt": [1, *[odd] * 1000]})
    assert raised.value.error_count() < 10
    # Of a thousand unknown names the error repeats one.
    many = json.dumps(dict.fromkeys(map(str, range(1000)), odd)).encode()
    assert len(str(refused(400, protocol.parse, many, protocol.CompletionBody))) < 400


ONE_TOKEN = {"prompt": "abc", "max_tokens": 1}


# The body, the status, and the code or the name of the field. A body may lack the prompt: the text
# then begins with the token that texts start after.
@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        pytest.param(b"{", 400, "malformed_json", id="no json"),
        pytest.param(b"[1]", 400, "malformed_json", id="no object"),
        pytest.param(b'{"prompt": "\xff"}', 400, "malformed_json", id="no utf-8"),
        pytest.param(b'{"temperature": NaN}', 400, "malformed_json", id="nan"),
        pytest.param(
            b'{"max_tokens": 1, "prompt": "a", "max_tokens": 2}',
            400,
            "malformed_json",
            id="a key twice",
        ),
        pytest.param(b"[" * 15_000, 400, "malformed_json", id="deep"),
        pytest.param(b" " * 80_000, 413, "body_too_large", id="too long"),
        pytest.param({"promt": "a"}, 400, "unknown_parameter", id="unknown field"),
        pytest.param({"model": "gpt"}, 404, "model_not_found", id="another model"),
        pytest.param({"n": True}, 400, "n", id="true for a number"),
        pytest.param({"max_tokens": 4001}, 400, "max_tokens", id="too many tokens"),
        pytest.param({"max_tokens": 0}, 400, "max_tokens", id="nothing"),
        pytest.param(b'{"temperature": 1e999}', 400, "temperature", id="huge temperature"),
        pytest.param({"top_p": 0}, 400, "top_p", id="top_p of 0"),
        pytest.param({"presence_penalty": 1}, 400, "presence_penalty", id="penalty"),
        pytest.param({"fork": True}, 400, "fork", id="a fork of no session"),
        pytest.param(
            {"stream_options": {"include_usage": True}},
            400,
            "stream_options",
            id="usage without a stream",
        ),
        pytest.param({"best_of": 3}, 400, "best_of", id="best of many"),
        pytest.param({"stop": ["a"] * 4}, 400, "stop", id="many stops"),
        pytest.param({"stop": "a" * 21}, 400, "stop", id="a long stop"),
        pytest.param(b'{"\\ud800": 1}', 400, "unknown_parameter", id="half a character as a name"),
        pytest.param(b'{"prompt": "\\ud800"}', 400, "prompt", id="a lone surrogate"),
        pytest.param(b'{"stop": "\\ud800"}', 400, "stop", id="half a character to stop at"),
        pytest.param(b'{"stop": ["x", "\\udfff"]}', 400, "stop", id="half a character among stops"),
        pytest.param({"prompt": "XYZ"}, 400, "prompt", id="letters that it lacks"),
        pytest.param({"prompt": [1, 13]}, 400, "prompt", id="ids out of range"),
        pytest.param({"prompt": [1, "a"]}, 400, "prompt", id="ids and texts"),
        pytest.param({"prompt": ["a"] * 5, "n": 2}, 400, "prompt", id="too many choices"),
        pytest.param(
            {"prompt": [1] * 5000, "max_tokens": 4000, "n": 4},
            400,
            "too_many_tokens",
            id="a long prompt",
        ),
        pytest.param({"max_tokens": 4000, "n": 6}, 400, "too_many_tokens", id="many long texts"),
        pytest.param({"session": "../../x"}, 404, "session_not_found", id="no such session"),
    ],
)
def test_mistakes_get_their_status_and_are_named(port, body, status, named):
    actual_status, content = ask(port, "/v1/completions", body)
    assert actual_status == status, content
    error = content["error"]
    assert named in (error["code"], error["param"])
    assert 10 < len(error["message"]) < 400, "it neither lacks words nor repeats the body"
    assert "Traceback" not in error["message"]
    assert "\n" not in error["message"]


def test_other_paths_methods_and_types(port):
    assert refusal(ask(port, "/v1/chat/completions", {})) == (404, "not_found")
    for method, path, allowed in (
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/sessions", "GET, HEAD, POST"),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == 405, path
        assert response.getheader("Allow") == allowed, path
        connection.close()

    plain = {"Content-Type": "text/plain"}
    assert ask(port, "/v1/completions", {"prompt": "a"}, headers=plain)[0] == 415
    assert ask(port, "/v1/models/other")[0] == 404
    assert ok(ask(port, "/v1/models/tiny"))["id"] == "tiny"
    assert ask(port, "/healthz") == (200, "ok\n")
    assert ask(port, "/readyz") == (200, "ready\n")


def test_a_text_is_taken_apart_and_put_together(port):
    tokens = ok(ask(port, "/tokenize", {"prompt": "abc"}))["tokens"]
    assert tokens == tiny_model.VOCABULARY.encode(b"abc").tolist()
    assert ok(ask(port, "/detokenize", {"tokens": tokens}))["prompt"] == "abc"


TOO_MANY = LIMITS.tokens + 1


@pytest.mark.parametrize(
    ("path", "too_long"),
    [
        ("/tokenize", {"prompt": "a" * TOO_MANY}),
        ("/detokenize", {"tokens": [1] * TOO_MANY}),
    ],
    ids=["tokenize", "detokenize"],
)
def test_texts_of_too_many_tokens_are_not_taken_apart(port, path, too_long):
    """Nor malformed bodies."""
    assert refusal(ask(port, path, too_long)) == (400, "too_many_tokens")
    assert ask(port, path, b'{"prompt": "a", "prompt": "b"}')[0] == 400
    assert ask(port, path, {"prompt": 1})[0] == 400


# A function that reads a body or writes an answer, and a request that calls it.
@pytest.mark.parametrize(
    ("owner", "function", "path", "body"),
    [
        pytest.param(protocol, "parse", "/tokenize", {"prompt": "abc"}, id="parse"),
        pytest.param(protocol, "tokenize", "/tokenize", {"prompt": "abc"}, id="tokenize"),
        pytest.param(protocol, "detokenize", "/detokenize", {"tokens": [1]}, id="detokenize"),
        pytest.param(protocol, "prompts_of", "/v1/completions", ONE_TOKEN, id="prompts_of"),
        pytest.param(protocol.ChoiceWriter, "json_of", "/v1/completions", ONE_TOKEN, id="json_of"),
        pytest.param(
            protocol.ChoiceWriter,
            "json_of",
            "/v1/completions",
            ONE_TOKEN | {"stream": True},
            id="json_of, stream",
        ),
    ],
)
def test_other_requests_are_answered_while_one_is_read_or_written(
    port, owner, function, path, body
):
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        gate(owner, function) as (reached, through),
    ):
        request = pool.submit(ask, port, path, body)
        assert reached.wait(SECONDS)
        assert ask(port, "/healthz")[0] == 200
        assert not request.done()
        through.set()
        ok(request.result())


def test_a_session_is_free_after_whatever_fails(running, monkeypatch):
    port, made = running
    name = new_session(port)
    monkeypatch.setattr(made, "submit", mock.Mock(side_effect=OSError("no thread")))
    assert refusal(complete(port, session=name)) == (500, "internal")
    monkeypatch.undo()
    ok(complete(port, session=name))
    ok(delete(port, name))


def test_a_session_is_deleted_while_a_request_continues_it(running):
    """A page does so that is closed while a text is written: the server may not have noticed that
    the reader has left.
    """
    port, made = running
    expected = choices(port, max_tokens=20, temperature=0)
    name = new_session(port)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        gate(made.step, "write") as (reached, through),
    ):
        request = pool.submit(complete, port, session=name, max_tokens=20, temperature=0)
        assert reached.wait(SECONDS)
        ok(delete(port, name))
        assert refusal(ask(port, f"/v1/sessions/{name}")) == (404, "session_not_found")
        through.set()
        assert ok(request.result(SECONDS))["choices"] == expected, "its request continues"

    assert refusal(complete(port, session=name)) == (404, "session_not_found")
    names = [session["id"] for session in ok(ask(port, "/v1/sessions"))["data"]]
    assert name not in names


def test_no_session_is_made_for_a_client_that_has_left(running):
    """For example, a page that is left right after its first text was sent."""
    _, made = running
    before = (made.store.num_sessions, made.store.num_evicted)
    # The last one is received first: the body has come, and then the client has left.
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
    name = new_session(port)
    first = text(port, session=name, max_tokens=20, temperature=0)
    body = {"prompt": ["", "ab"], "n": 3, "max_tokens": 15, "seed": 4}
    assert refusal(complete(port, session=name, **body)) == (400, "invalid_request")

    of_session = choices(port, session=name, fork=True, **body)

    whole = body | {"prompt": ["abc" + first, "abc" + first + "ab"]}
    assert of_session == choices(port, **whole)
    # The session still has its prompt and its first text.
    assert ok(ask(port, f"/v1/sessions/{name}"))["tokens"] == 3 + 20
    ok(delete(port, name))


def test_a_body_that_does_not_come_ends_its_request():
    with server(limits=ServerLimits(body_seconds=0.1)) as (port, _):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        headers = {"Content-Type": "application/json", "Content-Length": "9"}
        connection.request("POST", "/v1/completions", headers=headers)
        assert connection.getresponse().status == 408
        connection.close()


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000"])
def test_names_of_this_machine_are_accepted(port, host):
    ok(ask(port, "/v1/models", headers={"Host": host}))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "[::1", "localhost.evil.example", ""]
)
def test_a_name_of_another_site_is_refused(port, host):
    """A browser asks so for a page whose name was made to resolve to this address."""
    headers = {"Host": host, "Sec-Fetch-Site": "same-origin", "Origin": f"http://{host}"}
    for path, body in (
        ("/v1/sessions", {}),
        ("/v1/sessions", None),
        ("/", None),
        ("/metrics", None),
    ):
        assert refusal(ask(port, path, body, headers=headers)) == (421, "unknown_host"), path
    assert ok(ask(port, "/v1/sessions"))["data"] == []
    assert ask(port, "/healthz", headers=headers) == (200, "ok\n")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1"]
)
def test_a_page_of_another_site_is_refused(port, origin):
    headers = {"Origin": origin}
    for path, body in (
        ("/v1/sessions", {}),
        ("/v1/sessions", None),
        ("/v1/completions", {"prompt": "a"}),
    ):
        assert refusal(ask(port, path, body, headers=headers)) == (403, "cross_site"), path


def test_the_page_of_the_server_is_accepted(port):
    headers = {"Origin": f"http://127.0.0.1:{port}"}
    ok(ask(port, "/v1/completions", {"prompt": "a"}, headers=headers))


def test_a_body_that_any_page_may_send_is_refused(port):
    """A browser lets a page send plain text to any address, without asking the server first."""
    assert ask(port, "/v1/sessions", b"", headers={"Content-Type": "text/plain"})[0] == 415


def test_a_client_that_leaves_frees_its_rows(running):
    port, made = running
    before = made.counters.ended["cancelled"]
    for stream in (True, False):
        with left(port, {"prompt": "abc", "n": 4, "max_tokens": 4000, "stream": stream}):
            wait_until(lambda: made.num_busy == 4)
        wait_idle(port)
    # Four choices of each of the two requests.
    assert made.counters.ended["cancelled"] == before + 8
    figures = metrics(port)
    assert figures["txl_rows_busy"] == 0
    assert figures['txl_choices_ended_total{reason="cancelled"}'] == before + 8


def test_keys_separate_clients():
    with server(keys=("first", "second")) as (port, made):
        for key in (None, "third", "firs"):  # The last is the beginning of a key.
            assert refusal(ask(port, "/v1/models", key=key)) == (401, "invalid_api_key"), key
        assert ask(port, "/healthz")[0] == 200
        assert "<html" in ok(ask(port, "/"))
        assert ask(port, "/metrics")[0] == 401

        name = new_session(port, key="first")
        body = {"prompt": "a", "session": name, "max_tokens": 4000}
        assert ask(port, "/v1/completions", body, key="second")[0] == 404
        assert delete(port, name, key="second")[0] == 404
        assert ok(ask(port, "/v1/sessions", key="second"))["data"] == []

        waiting = threading.Thread(
            target=ask, args=(port, "/v1/completions", body), kwargs={"key": "first"}
        )
        waiting.start()
        wait_until(lambda: made.num_busy)
        assert refusal(ask(port, "/v1/completions", body, key="first")) == (409, "session_busy")
        ok(delete(port, name, key="first"))
        made.cut_off()
        waiting.join()
