"""Tests pages in a browser: the server's page writes texts, and a page of another site gets nothing
from the server.
"""

import contextlib
import shutil
import time

import pytest

from support.http_server import ask, server
from support.serving import SECONDS, gate
from support.waiting import wait_until
from txl_jax.serving.middleware import LOOPBACK

pytestmark = pytest.mark.nightly(part="browser")
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks",  # So that the server has to defend itself.
)
MILLISECONDS = 120_000  # Longer is a hang.


@pytest.fixture(scope="module")
def running():
    """The port of a server, and its engine."""
    with server(keys=("secret",)) as port_and_engine:
        yield port_and_engine


@pytest.fixture(scope="module")
def port(running):
    return running[0]


@pytest.fixture(scope="module")
def browser():
    from playwright import sync_api

    names = ("chromium", "chromium-browser", "google-chrome")
    programs = [path for path in map(shutil.which, names) if path is not None]
    assert programs, f"none of {names} is on the PATH"
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=programs[0], args=SWITCHES)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, port):
    """The page with its key typed in. At the end of the test it has logged no error."""
    opened = browser.new_page()
    opened.set_default_timeout(MILLISECONDS)
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(f"http://127.0.0.1:{port}/")
    opened.fill("#key", "secret")
    yield opened
    assert errors == []
    opened.close()


def until(page, condition):
    """Waits for a condition in JavaScript. The page's policy allows it no polling of strings."""
    end = time.monotonic() + MILLISECONDS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, page.text_content("#state")
        page.wait_for_timeout(50)


def write(page, prompt, **settings):
    page.fill("#prompt", prompt)
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    page.click("#write")


@contextlib.contextmanager
def writing(page, made):
    """Writes a text that waits in the engine after its first pieces, which the page shows.

    It continues at the end.
    """
    with gate(made.step, "write", call=3) as (reached, through):
        write(page, "abc", max_tokens=4000, temperature=1)
        until(page, "document.querySelectorAll('.written').length > 0")
        assert reached.wait(SECONDS)
        yield through


def test_texts_stream_and_go_on_in_a_session(page, port):
    write(page, "abc", max_tokens=30, temperature=0, top_p=1)
    until(page, "document.querySelector('#state').textContent === '30 tokens'")
    write(page, "")
    # The page shows both texts as one, of 30 letters each.
    until(page, "document.querySelector('.written').textContent.length === 60")
    until(page, "!document.querySelector('#write').disabled")

    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0}
    status, answer = ask(port, "/v1/completions", body, key="secret")
    assert status == 200, answer
    assert page.text_content("#text") == "abc" + answer["choices"][0]["text"]
    assert [*sessions(port).values()] == [3 + 60]
    page.click("#new")
    until(page, "document.querySelector('#text').textContent === ''")


def test_pieces_are_shown_while_more_come_and_stop_ends_them(page, running):
    port, made = running
    with writing(page, made):
        assert page.text_content("#state") == "writing"
        page.click("#stop")
        until(page, "document.querySelector('#state').textContent.startsWith('stopped')")
        shown = len(page.text_content(".written"))
        assert 0 < shown < 4000
    wait_until(lambda: "txl_rows_busy 0.0" in ask(port, "/metrics", key="secret")[1])
    assert len(page.text_content(".written")) == shown


def sessions(port):
    """The number of tokens of each session, by its name."""
    status, answer = ask(port, "/v1/sessions", key="secret")
    assert status == 200, answer
    return {session["id"]: session["tokens"] for session in answer["data"]}


# How a text ends before it is written: (what is done to its page, whether the page is still there).
ENDS = {
    "new": (lambda page: page.click("#new"), True),
    "reload": (lambda page: page.reload(), True),
    "another page": (lambda page: page.goto("about:blank"), False),
    "closed": (lambda page: page.close(run_before_unload=True), False),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("stopped", [False, True], ids=["writing", "stopped"])
def test_a_new_text_and_a_page_that_is_left_keep_no_session(page, running, end, stopped):
    """Also while the server has not noticed yet that nobody reads the text."""
    port, made = running
    act, stays = ENDS[end]
    before = sessions(port).keys()
    with writing(page, made):
        assert len(sessions(port).keys() - before) == 1
        if stopped:
            page.click("#stop")
        act(page)
        if stays:
            until(
                page,
                "!document.querySelector('#write').disabled && "
                "!document.querySelector('#text').textContent",
            )
        wait_until(lambda: not sessions(port).keys() - before)


def test_a_stopped_text_and_a_lost_session_do_not_hinder_the_next_text(page, running):
    """The server may not have noticed yet that the text was stopped.

    It may have evicted the session.
    """
    port, made = running
    with writing(page, made) as through:
        [name] = sessions(port)
        page.click("#stop")
        with page.expect_response(lambda response: response.status == 409):
            write(page, "abc", max_tokens=10)
        through.set()
        until(page, "document.querySelector('#state').textContent === '10 tokens'")
    assert sessions(port) == {name: 3 + 10}, "the stopped text is not in its memory"

    assert ask(port, f"/v1/sessions/{name}", method="DELETE", key="secret")[0] == 200
    write(page, "abc")
    until(page, "document.querySelector('#state.error') !== null")
    assert name in page.text_content("#state")
    page.click("#write")
    until(page, "document.querySelector('#state').textContent === '10 tokens'")
    assert [*sessions(port).values()] == [3 + 10]
    page.click("#new")
    wait_until(lambda: not sessions(port))


def test_a_session_that_stays_in_use_is_an_error(page, running):
    """For example, a copy of the page in another tab uses it, whose text is long."""
    with writing(page, running[1]):
        page.click("#stop")
        write(page, "abc", max_tokens=10)
        until(page, "document.querySelector('#state.error') !== null")
        assert "used by another request" in page.text_content("#state")
        assert page.input_value("#prompt") == "abc", "it can be sent again"
    page.click("#new")


def test_errors_are_shown(page):
    page.fill("#key", "wrong")
    write(page, "abc")
    until(page, "document.querySelector('#state.error') !== null")
    assert "API key" in page.text_content("#state")
    page.fill("#key", "secret")
    write(page, "letters THAT it lacks")
    until(page, "document.querySelector('#state').textContent.includes('cannot be read')")


# The statuses of a page's requests to an address, 0 for an answer that it cannot read.
TRIES = """address => {
  const headers = {"Content-Type": "application/json"};
  const tries = [
    ["/v1/sessions", {}], ["/metrics", {}], ["/", {}], ["/v1/sessions/x", {method: "DELETE"}],
    ["/v1/sessions", {method: "POST", headers, body: "{}"}],
    ["/v1/sessions", {method: "POST", mode: "no-cors", body: "{}"}],
  ];
  return Promise.all(
    tries.map(([path, how]) => fetch(address + path, how).then(found => found.status, () => 0))
  );
}"""


# The answers that a page reads from an address: their texts, or the error.
READS = """([address, key]) => {
  const headers = {"Content-Type": "application/json", Authorization: "Bearer " + key};
  const body = JSON.stringify({prompt: "abc", max_tokens: 5});
  const asked = fetch(address + "/v1/completions", {method: "POST", headers, body});
  return asked.then(found => found.text(), error => String(error));
}"""


def test_a_page_with_an_allowed_name_reads_its_answers(browser):
    hosts = (*LOOPBACK, "app.example")
    with server(keys=("secret",), hosts=hosts) as (port, _):
        page = browser.new_page()
        page.route(
            "**/page",
            lambda route: route.fulfill(content_type="text/html", body="<title>page</title>"),
        )
        address = f"http://127.0.0.1:{port}"
        for name, is_allowed in (("app.example", True), ("evil.example", False)):
            page.goto(f"http://{name}/page")
            assert ("text_completion" in page.evaluate(READS, [address, "secret"])) == is_allowed
        page.goto("http://app.example/page")
        assert "invalid_api_key" in page.evaluate(READS, [address, "wrong"])
        page.close()


def test_another_page_cannot_show_the_page_in_a_frame(browser, port):
    page = browser.new_page()
    frame = f"<iframe src='http://127.0.0.1:{port}/'></iframe>"
    page.route("**/page", lambda route: route.fulfill(content_type="text/html", body=frame))
    page.goto("http://evil.example/page", wait_until="load")
    inner = page.frames[1]
    inner.wait_for_load_state("load")
    assert not inner.query_selector("#write")
    page.close()


def test_a_page_of_another_site_gets_nothing(browser):
    """It asks at the server's address, at a name for it, and under its own name.

    Its own name then means the server's address.
    """
    with server() as (port, made):
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/")
        # The server's own page gets answers. Its fifth request makes a session.
        assert page.evaluate(TRIES, "") == [200, 200, 200, 404, 201, 415]
        assert made.store.num_sessions == 1

        page.route(
            "**/page",
            lambda route: route.fulfill(content_type="text/html", body="<title>evil</title>"),
        )
        page.goto("http://evil.example/page")
        for address in (
            f"http://127.0.0.1:{port}",
            f"http://localhost:{port}",
            f"http://evil.example:{port}",
        ):
            assert page.evaluate(TRIES, address) == [0] * 6, address
        page.goto(f"http://evil.example:{port}/page")
        # To the browser it is now the server's own page, but the server does not have this name.
        assert page.evaluate(TRIES, "") == [421] * 6
        assert made.store.num_sessions == 1
        page.close()
