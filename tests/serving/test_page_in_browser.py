"""Tests the server's page in a browser: it writes texts in a session, shows errors, and leaves no session behind."""

import shutil
import time

import pytest

from support.http_server import ask, server
from support.waiting import wait_until

pytestmark = pytest.mark.nightly(part="browser")
MILLISECONDS = 120_000


@pytest.fixture(scope="module")
def port():
    with server(keys=("secret",)) as (number, _):
        yield number


@pytest.fixture
def page(port):
    """The page with its key typed in; it has logged no error at the end."""
    from playwright import sync_api

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium, "there is no Chromium on the PATH"
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with sync_api.sync_playwright() as started:
        browser, errors = started.chromium.launch(executable_path=chromium, args=switches), []
        found = browser.new_page()
        found.set_default_timeout(MILLISECONDS)
        found.on("pageerror", lambda error: errors.append(str(error)))
        found.goto(f"http://127.0.0.1:{port}/")
        found.fill("#key", "secret")
        yield found
        assert errors == []
        browser.close()


def until(page, condition):
    """Waits for a condition in JavaScript; the page's policy allows no polling of strings in itself."""
    end = time.monotonic() + MILLISECONDS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < end, page.text_content("#state")
        page.wait_for_timeout(50)


def write(page, prompt, **settings):
    page.fill("#prompt", prompt)
    for name, value in settings.items():
        page.fill(f"#{name}", str(value))
    page.click("#write")


def test_texts_stream_and_go_on_in_a_session(page, port):
    write(page, "abc", max_tokens=30, temperature=0, top_p=1)
    until(page, "document.querySelector('#state').textContent === '30 tokens'")
    write(page, "")
    until(page, "document.querySelector('.written').textContent.length === 60")
    until(page, "!document.querySelector('#write').disabled")
    body = {"prompt": "abc", "max_tokens": 60, "temperature": 0}
    expected = ask(port, "/v1/completions", body, key="secret")[1]["choices"][0]["text"]
    assert page.text_content("#text") == "abc" + expected
    assert [*sessions(port).values()] == [63]
    page.click("#new")
    until(page, "document.querySelector('#text').textContent === ''")


def sessions(port):
    return {each["id"]: each["tokens"] for each in ask(port, "/v1/sessions", key="secret")[1]["data"]}


@pytest.mark.parametrize("leave", [lambda page: page.click("#new"), lambda page: page.reload()], ids=["new", "reload"])
def test_a_new_text_and_a_page_that_is_left_keep_no_session(page, port, leave):
    before = sessions(port).keys()
    write(page, "abc", max_tokens=4000, temperature=1)
    until(page, "document.querySelectorAll('.written').length > 0")
    assert len(sessions(port).keys() - before) == 1
    leave(page)
    until(page, "!document.querySelector('#write').disabled && !document.querySelector('#text').textContent")
    wait_until(lambda: not sessions(port).keys() - before)


def test_errors_are_shown(page):
    page.fill("#key", "wrong")
    write(page, "abc")
    until(page, "document.querySelector('#state.error') !== null")
    assert "API key" in page.text_content("#state")
    page.fill("#key", "secret")
    write(page, "letters THAT it lacks")
    until(page, "document.querySelector('#state').textContent.includes('cannot be read')")
