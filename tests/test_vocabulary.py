"""Tests of the vocabulary: the first words of docstrings, and metaphors in code, comments and pages."""

import ast

import pytest

from support import ROOT
from support.vocabulary import QUESTIONS, metaphors

FOLDERS = ("txl_jax", "experiments", "launch", "tests", "docs")
SUFFIXES = (".py", ".sh", ".md", ".flags")
ITSELF = (ROOT / "tests" / "test_vocabulary.py", ROOT / "tests" / "support" / "vocabulary.py")
PATHS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")))
    if path.suffix in SUFFIXES and path not in ITSELF
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def first_words(source: str) -> list[tuple[str, str]]:
    """Lists the names of modules ("module"), classes and functions, each with the first word of its docstring."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED))
    docstrings = ((getattr(node, "name", "module"), ast.get_docstring(node)) for node in nodes)
    return [(name, text.split()[0]) for name, text in docstrings if text]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_metaphor_in_place_of_a_term(folder):
    paths = [path for path in PATHS if path.is_relative_to(ROOT / folder)]
    assert len(paths) > 5
    found = {str(path.relative_to(ROOT)): metaphors(path.read_text()) for path in paths}
    assert not {path: words for path, words in found.items() if words}


def test_no_metaphor_in_the_pages_of_the_root():
    found = {path.name: metaphors(path.read_text()) for path in PATHS if path.parent == ROOT}
    assert "README.md" in found and not {path: words for path, words in found.items() if words}


def test_docstrings_begin_with_a_verb_or_a_noun():
    sources = {path.relative_to(ROOT): path.read_text() for path in PATHS if path.suffix == ".py"}
    found = [(str(path), *words) for path, source in sources.items() for words in first_words(source)]
    assert len(found) > 1000
    assert not [words for words in found if words[-1] in QUESTIONS]


def test_the_search_finds_what_it_is_for():
    """Words inside names count; words of other libraries do not."""
    assert metaphors("def test_mistakes_are_told(): pass  # It says so.") == ["told", "says"]
    assert metaphors("class HouseRules: FLOOR_PLAN = os.walk('.')") == ["House", "FLOOR"]
    assert metaphors("standard storeys, tally: a unit norm") == []
    assert first_words('"""What it is."""\n\ndef f():\n    """Computes."""\n') == [
        ("module", "What"),
        ("f", "Computes."),
    ]
