"""Tests a report in a browser: no errors, no horizontal scrolling, values at the pointer, light and dark."""

import json
import os
import shutil

import pytest

from support import recorded_run
from txl_jax.run_report.page import make_page
from txl_jax.run_report.run_records import read_runs
from txl_jax.runtime.log import read_metrics

pytestmark = pytest.mark.nightly(part="browser")
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    for rate in (0.001, 0.004):
        for seed in (1, 2):
            name = f"optimizer.learning_rate={rate}+model.dropout.attention=0.0+seed={seed}"
            run = recorded_run.make(root / "runs" / name, seed=seed, optimizer__learning_rate=rate)
            (run / "sample-seed0.txt").write_text("w" * 300)
    recorded_run.make(root / "one")
    for name in ("runs", "one"):
        text = make_page(read_runs([str(root / name)]), command="python -m experiments.report " + "x" * 200)
        (root / f"{name}.html").write_text(text)
    return root


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    # Chromium of the system if there is one, else of playwright.
    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as started:
        found = started.chromium.launch(executable_path=own, args=SWITCHES)
        yield found
        found.close()


def opened(browser, path, *, width=1100, scheme="light"):
    """A page, and the list of its errors and of what it asks for."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    found = []
    page.on("console", lambda message: found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on(
        "request", lambda request: found.append(request.url) if not request.url.startswith(("file:", "data:")) else 0
    )
    page.goto(f"file://{path}")
    return page, found


@pytest.mark.parametrize("name", ["runs", "one"])
def test_nothing_is_wider_than_the_screen(browser, folder, name):
    page, found = opened(browser, folder / f"{name}.html")
    for details in page.query_selector_all("summary"):
        details.click()
    boxes = "[...document.querySelectorAll('td, tbody th, pre, .legend, h1')]"
    wider = f"{boxes}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 200))"
    for width in (320, 380, 720, 1100):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(wider) == []
    assert found == []
    page.close()


def test_the_pointer_shows_recorded_values(browser, folder):
    page, found = opened(browser, folder / "one.html")
    page.evaluate("document.querySelector('.plot').scrollIntoView()")
    box = page.query_selector(".plot").bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 50)
    shown = page.eval_on_selector(".tip", "tip => [...tip.querySelectorAll('span')].map(e => e.textContent)")
    at = {each["kind"]: each["perplexity"] for each in read_metrics(folder / "one") if each["step"] == 600}
    assert page.inner_text(".tip strong") == "600"
    values = dict(zip(shown[::2], (float(text.replace(",", "")) for text in shown[1::2]), strict=True))
    assert values == pytest.approx({"train": at["train"], "valid": at["valid"]}, abs=1e-4)
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] - 60)
    assert page.is_hidden(".tip") and found == []
    page.close()


def test_dark_screens_have_a_dark_page(browser, folder):
    colors = {}
    for scheme in ("light", "dark"):
        page, _ = opened(browser, folder / "one.html", scheme=scheme)
        colors[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        page.close()
    assert min(colors["light"]) > 200 and max(colors["dark"]) < 60


def test_figures_of_the_table_are_those_of_the_files(browser, folder):
    page, _ = opened(browser, folder / "one.html")
    cells = page.eval_on_selector_all(
        "section:nth-of-type(2) tbody tr:first-child td", "all => all.map(e => e.textContent)"
    )
    test = json.loads((folder / "one" / "results.json").read_text())["test"]["perplexity"]
    assert cells[2] == f"{test:.2f}"
    page.close()
    assert os.path.getsize(folder / "one.html") < 100_000
