"""Tests that a report's page has the numbers of the runs' files, loads nothing, and is well formed."""

import html.parser
import json
import re

import pytest

from support import recorded_run
from txl_jax.data.byte_tokens import ByteVocabulary
from txl_jax.errors import UserError
from txl_jax.run_report.page import make_page
from txl_jax.run_report.run_records import read_runs
from txl_jax.runtime.log import read_metrics

pytestmark = pytest.mark.full
VOID = {"meta", "link", "wbr", "br", "path"}


class Page(html.parser.HTMLParser):
    """The texts of a page by tag, its attributes, and the data of its charts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.attributes, self.rows = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open:
            assert not data.strip()
            return
        self.texts.append((self.open[-1], data))
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def of(self, tag):
        return [text for found, text in self.texts if found == tag]

    @property
    def charts(self):
        titles, scripts = self.of("figcaption"), [text for text in self.of("script") if text.startswith("{")]
        return dict(zip(titles, map(json.loads, scripts), strict=True))

    def row(self, name):
        """The last cells of the rows that begin with a name."""
        return [row[1:] for row in self.rows if row and row[0] == name]


def page_of(*folders):
    return Page(make_page(read_runs([str(folder) for folder in folders]), command="python -m experiments.report"))


def test_the_numbers_of_one_run_are_those_of_its_files(tmp_path):
    folder = recorded_run.make(tmp_path / "mine")
    page = page_of(folder)
    records = read_metrics(folder)
    found = {series["name"]: series["points"] for series in page.charts["Perplexity"]["series"]}
    for kind in ("train", "valid"):
        assert found[kind] == [[each["step"], each["perplexity"]] for each in records if each["kind"] == kind]
    rates = [[each["step"], each["tokens_per_second"]] for each in records if each["kind"] == "train"]
    assert page.charts["Tokens per second"]["series"][0]["points"] == rates
    best = min((each["perplexity"], each["step"]) for each in records if each["kind"] == "valid")
    test = json.loads((folder / "results.json").read_text())["test"]["perplexity"]
    expected = [f"{best[0]:.2f}", f"{best[1]:,}", f"{test:.2f}", "2,146,832", "finished"]
    assert expected in page.row("mine")
    assert page.row("paper, 16 layers (ptb)") == [["", "", "54.52", "24M", ""]]
    assert "mine: Penn Treebank" in page.of("title")
    assert page.of("h2") == ["Learning curves", "Results", "Time and efficiency", "Sources"]


def test_a_sweep_has_means_over_seeds_and_a_chart_for_each_setting(tmp_path):
    for rate in (0.001, 0.002, 0.016):
        for seed in (1, 2, 3):
            recorded_run.make(tmp_path / f"{rate}+{seed}", seed=seed, optimizer__learning_rate=rate)
    page, runs = page_of(tmp_path), read_runs([str(tmp_path)])
    tests = [run.test for run in runs if run.config.optimizer.learning_rate == 0.002]
    mean = sum(tests) / 3
    deviation = (sum((test - mean) ** 2 for test in tests) / 2) ** 0.5
    [row] = page.row("learning_rate 0.002")
    assert row[1:3] == [f"{mean:.2f} ± {deviation:.2f}", "3"]
    chart = page.charts["learning_rate: best validation, perplexity"]
    assert [x for x, _ in chart["series"][0]["points"]] == [0.001, 0.002, 0.016] and chart["x"][2] is True
    curves = {series["name"]: series["points"] for series in page.charts["Validation, perplexity"]["series"]}
    assert len(curves) == 3
    at_end = [dict(run.scores("valid"))[1000] for run in runs if run.config.optimizer.learning_rate == 0.002]
    assert curves["learning_rate 0.002, mean of 3 seeds"][-1] == [1000, pytest.approx(sum(at_end) / 3)]


def test_a_page_loads_nothing_and_escapes_what_runs_hold(tmp_path):
    folder = recorded_run.make(tmp_path / "<b>&co")
    (folder / "sample-seed0.txt").write_text("</pre><script>alert(1)</script>")
    text = make_page(read_runs([str(folder)]), command="a < b")
    page = Page(text)
    assert "</pre><script>alert(1)</script>" in "".join(page.of("pre"))
    assert "<script>alert" not in text and "<b>" not in text
    loaded = [(tag, name, value) for tag, name, value in page.attributes if name in ("src", "href", "data", "action")]
    assert loaded == [("link", "href", "data:,")]
    assert not re.search(r"https?:|@import|url\(", text)


def test_runs_that_have_just_begun(tmp_path):
    page = page_of(recorded_run.make(tmp_path / "a", done=0), recorded_run.make(tmp_path / "b", done=0, seed=2))
    assert "0 of 1,000 updates" in page.row("a")[0]


def test_runs_of_two_measures_are_refused(tmp_path, monkeypatch):
    words = recorded_run.make(tmp_path / "words")
    monkeypatch.setattr(recorded_run, "VOCABULARY", ByteVocabulary(bytes(range(256))))
    characters = recorded_run.make(tmp_path / "bytes")
    with pytest.raises(UserError, match=r"words has ppl and bytes has bpc"):
        page_of(words, characters)
