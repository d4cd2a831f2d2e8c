"""Tests that the commands and settings of README and docs exist, and the examples: in docstrings
and docs/examples.

Each model of docs/examples solves what the one without its part cannot.
"""

import doctest
import functools
import importlib
import re
import runpy
import shlex
import types

import numpy as np
import pytest

import txl_jax
from support import ROOT, drawn_run, programs
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import leaves
from txl_jax.config.experiment import evaluation_preset_names, preset_names

PAGES = [ROOT / name for name in ("README.md", "BUILD.md", "CONTRIBUTING.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
PLACEHOLDERS = {"FLAGS", "...", "NAME"}  # Of the pages.
SOURCES = [
    path for folder in ("txl_jax", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))
]
SETTINGS = {leaf.name: leaf for leaf in leaves(ExperimentConfig)}
EXAMPLES = [path.relative_to(ROOT) for path in SOURCES if ">>>" in path.read_text()]
assert len(EXAMPLES) > 10


def commands(page):
    """Yields the words of each command that starts a program of this project, without what follows
    a pipe.
    """
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m ((?:experiments|launch)\.[^\n`#]*)", text):
        if "$" not in line:
            yield shlex.split(re.split(r" 2>| \|", line)[0])


def test_commands_are_found_on_pages():
    """Else the next test passes on every page."""
    assert sum(len(list(commands(page))) for page in PAGES) > 60


@functools.cache
def flag_names(program):
    """The flags that a program's --help lists, and those that list and read them."""
    _, out, _ = programs.run(program, "--help")
    return {
        *re.findall(r"^ *--(?:\[no\])?([\w.]+)", out, flags=re.MULTILINE),
        "help",
        "helpfull",
        "flagfile",
    }


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page):
    for program, *words in commands(page):
        if program.startswith("launch.") or program == "experiments.NAME":
            continue  # tests/launch/test_docs.py runs those; NAME is a placeholder.
        for word in words:
            if word == "--":
                break
            if not word.startswith("--"):
                assert word in PLACEHOLDERS or not word.startswith("-"), (page.name, program, word)
                continue
            name, _, value = word.removeprefix("--").partition("=")
            assert name in flag_names(program), (page.name, program, word)
            if name == "flagfile" and value not in PLACEHOLDERS:
                known = preset_names() + evaluation_preset_names()
                assert value in known or "/" in value, (page.name, program, word)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name
)
def test_every_setting_of_a_page_exists(page):
    named = re.findall(
        r"--((?:model|data|optimizer|mesh|train|regularization|average|eval|generate)\.[\w.]*\w)",
        page.read_text(),
    )
    assert not {
        name for name in named if name not in SETTINGS and f"{name}." not in " ".join(SETTINGS)
    }


def test_the_page_of_settings_has_all_of_them():
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="settings.md"))
    fill = runpy.run_path(str(ROOT / ".ci" / "mkdocs_settings.py"))["on_page_markdown"]
    text = fill((ROOT / "docs/settings.md").read_text(), page=page)
    rows = re.findall(r"^\| `(?:--)?([\w.]+)`.* \| (.*) \| .* \| (.*) \|$", text, re.MULTILINE)
    assert {name for name, _, _ in rows} == {*SETTINGS} and len(rows) == len(SETTINGS)
    found = {name: (default, values) for name, default, values in rows}
    assert found["model.n_layer"] == ("12", "int at least 1") and found["train.same_length"] == (
        "false",
        "bool",
    )
    assert found["model.tie_projs"] == ("empty", "list of bool")
    assert found["average.ema_decay"] == ("none", "float above 0 and below 1 or none")
    assert found["data.tokenizer.newlines"] == (
        "keep",
        "keep, drop; only if `data.tokenizer.kind` is byte",
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_examples_in_docstrings(path):
    assert (
        doctest.testmod(importlib.import_module(".".join(path.with_suffix("").parts))).failed == 0
    )


def example(name):
    return runpy.run_path(str(ROOT / "docs" / "examples" / f"{name}.py"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["document_embeddings", "memory_policy", "speech_encoder"])
def test_an_example_runs(name):
    found = example(name)["main"](2)
    assert len(found) == 2 and np.all(np.isfinite([*found.values()]))


@pytest.mark.full
def test_streamed_embeddings_are_means_of_the_hidden_states(tmp_path):
    model = txl_jax.load(drawn_run.of_words(tmp_path / "run").path)
    lines = drawn_run.TEXT[:400].splitlines(keepends=True)
    found = np.stack(list(example("document_embeddings")["stream"](model, lines, length=5)))
    [hidden] = model.hidden_states([b"".join(lines)])
    assert len(hidden) > 5 * 9
    expected = [hidden[first : first + 5].mean(axis=0) for first in range(0, len(hidden), 5)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.nightly(part="long")
@pytest.mark.parametrize(
    ("name", "least", "chance", "atol"),
    # A mean over 30 updates of some 5,500 episodes in all, whose standard deviation is 0.007; and
    # over 30 of frames.
    [("memory_policy", 0.97, 0.5, 0.03), ("speech_encoder", 0.85, 0.125, 0.015)],
)
def test_only_the_whole_model_solves_the_task(name, least, chance, atol):
    whole, without = example(name)["main"]().values()
    assert whole > least and without == pytest.approx(chance, abs=atol)


@pytest.mark.nightly(part="long")
def test_memory_finds_the_topic_as_far_back_as_it_reaches():
    module = example("document_embeddings")
    within, without = module["main"]().values()
    reach, chance = (
        module["CONFIG"].n_layer * module["MEM_LEN"] // module["PASSAGE"],
        1 / module["TOPICS"],
    )
    assert within[: reach + 1].min() > 0.95
    # For 128 documents, a fraction of 1 in 8 has a standard deviation of 0.03; topics are the same
    # in all passages.
    assert within[reach + 1 :].mean() == pytest.approx(chance, abs=0.1)
    assert without[0] > 0.95 and without[1:].mean() == pytest.approx(chance, abs=0.1)
