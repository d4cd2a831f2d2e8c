"""Tests that the commands and settings in README and docs exist, and that the examples run, in
docstrings and docs/examples.

Each model of docs/examples solves a task that it cannot solve without the part that is shown.
"""

import doctest
import functools
import importlib
import re
import runpy
import shlex

import numpy as np
import pytest

import txl_jax
from support import ROOT, drawn_run, programs
from txl_jax.config import ExperimentConfig
from txl_jax.config.config_tree import leaves
from txl_jax.config.experiment import evaluation_preset_names, preset_names

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "BUILD.md", ROOT / "CONTRIBUTING.md", *DOCS]
PLACEHOLDERS = {"FLAGS", "...", "NAME"}  # Words of the pages for what a reader fills in.
SETTINGS = {leaf.name for leaf in leaves(ExperimentConfig)}
SECTIONS = "model|data|optimizer|mesh|train|regularization|average|eval|generate"


def modules_with_examples():
    """Returns the paths of modules that have a doctest, relative to the root."""
    paths = []
    for package in ("txl_jax", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>>" in path.read_text():
                paths.append(path.relative_to(ROOT))
    assert len(paths) > 10, "examples are found"
    return paths


def commands(page):
    """Yields the words of each command that starts a program of this project.

    Without what follows a pipe or a redirection of errors.
    """
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"python -m ((?:experiments|launch)\.[^\n`#]*)", text):
        if "$" not in line:  # Words that only a shell can read.
            yield shlex.split(re.split(r" 2>| \|", line)[0])


def test_commands_are_found_on_pages():
    """Else the next test passes on every page."""
    assert sum(len(list(commands(page))) for page in PAGES) > 60


@functools.cache
def flag_names(program):
    """The flags that a program's --help lists, and the flags of every program."""
    _, out, _ = programs.run(program, "--help")
    listed = re.findall(r"^ *--(?:\[no\])?([\w.]+)", out, flags=re.MULTILINE)
    return {*listed, "help", "helpfull", "flagfile"}


def flags_of(words):
    """Yields the words up to `--` that are flags. The others must not look like flags."""
    for word in words:
        if word == "--":
            return
        if word.startswith("--"):
            yield word
        else:
            assert word in PLACEHOLDERS or not word.startswith("-"), word


@pytest.mark.full
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_can_be_typed(page):
    flagfiles = preset_names() + evaluation_preset_names()
    for program, *words in commands(page):
        if program.startswith("launch.") or program == "experiments.NAME":
            continue  # tests/launch/test_docs.py runs those. NAME is a placeholder.
        for flag in flags_of(words):
            name, _, value = flag.removeprefix("--").partition("=")
            assert name in flag_names(program), (page.name, program, flag)
            if name == "flagfile" and value not in PLACEHOLDERS:
                assert value in flagfiles or "/" in value, (page.name, program, flag)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_every_setting_of_a_page_exists(page):
    """A page may also name a group of settings, such as `model.dropout`."""
    for name in re.findall(rf"--((?:{SECTIONS})\.[\w.]*\w)", page.read_text()):
        is_group = any(f"{name}." in setting for setting in SETTINGS)
        assert name in SETTINGS or is_group, name


@pytest.mark.parametrize("path", modules_with_examples(), ids=str)
@pytest.mark.usefixtures("compiled_calls")
def test_examples_in_docstrings(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    assert doctest.testmod(module).failed == 0


def example(name):
    return runpy.run_path(str(ROOT / "docs" / "examples" / f"{name}.py"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["document_embeddings", "memory_policy", "speech_encoder"])
def test_an_example_runs(name):
    results = example(name)["main"](2)  # Two updates.
    assert len(results) == 2
    assert np.all(np.isfinite([*results.values()]))


@pytest.mark.full
def test_streamed_embeddings_are_means_of_the_hidden_states(tmp_path):
    model = txl_jax.load(drawn_run.of_words(tmp_path / "run").path)
    lines = drawn_run.TEXT[:400].splitlines(keepends=True)
    [hidden] = model.hidden_states([b"".join(lines)])
    assert len(hidden) > 5 * 9, "several passages of five tokens"

    embeddings = np.stack(list(example("document_embeddings")["stream"](model, lines, length=5)))

    expected = [hidden[first : first + 5].mean(axis=0) for first in range(0, len(hidden), 5)]
    np.testing.assert_allclose(embeddings, expected, rtol=0, atol=2e-5)


@pytest.mark.nightly(part="long")
@pytest.mark.parametrize(
    ("name", "least", "chance", "atol"),
    [
        # A mean over 30 updates, of some 5,500 episodes in all. Its standard deviation is 0.007.
        pytest.param("memory_policy", 0.97, 0.5, 0.03, id="memory_policy"),
        # A mean over 30 updates, of frames.
        pytest.param("speech_encoder", 0.85, 0.125, 0.015, id="speech_encoder"),
    ],
)
def test_only_the_whole_model_solves_the_task(name, least, chance, atol):
    """A model without the memory, or without the future, guesses."""
    whole, without = example(name)["main"]().values()
    assert whole > least
    assert without == pytest.approx(chance, abs=atol)


@pytest.mark.nightly(part="long")
def test_memory_finds_the_topic_as_far_back_as_it_reaches():
    module = example("document_embeddings")
    within, without = module["main"]().values()
    reach = module["CONFIG"].n_layer * module["MEM_LEN"] // module["PASSAGE"]
    chance = 1 / module["TOPICS"]

    assert within[: reach + 1].min() > 0.95
    # For 128 documents, a fraction of 1 in 8 has a standard deviation of 0.03. A document has the
    # same topic in all passages.
    assert within[reach + 1 :].mean() == pytest.approx(chance, abs=0.1)
    assert without[0] > 0.95
    assert without[1:].mean() == pytest.approx(chance, abs=0.1)
