"""Tests `python -m experiments.prepare`: that it does what the corpus's program will find done."""

import re
import subprocess

import pytest

from experiments import prepare
from support import miniature, programs
from txl_jax.config import CorpusName


def run(*arguments):
    """The exit code, what was printed, and the errors."""
    command = programs.command("support.prepare_miniatures", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", [CorpusName.LM1B, CorpusName.WIKITEXT2, CorpusName.TEXT8])
def test_a_corpus_is_read_and_encoded(name, tmp_path):
    (tmp_path / miniature.OFFICIAL[name]).write_bytes(miniature.official(name))
    flags = (f"--corpus={name}", f"--data_dir={tmp_path}", f"--cache_dir={tmp_path / 'made'}")
    code, printed, errors = run(*flags)
    assert code == 0, errors
    printed_values = dict(line.split(None, 1) for line in printed.splitlines()[1:])
    for split, text in miniature.texts(name).items():
        # One Billion Word has one more mark than lines.
        words = len(text.split()) + text.count(b"\n") + (name is CorpusName.LM1B)
        assert printed_values[split] == f"{len(text) if name is CorpusName.TEXT8 else words:,} tokens"
    assert printed_values["records"].startswith(f"{tmp_path / 'made' / 'tfds' / f'txl_{name}'} (0.")
    assert printed_values["tokens"].startswith(str(tmp_path / "made" / "tokens" / name.value))
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("*")}
    code, again, errors = run(*flags)
    assert code == 0, errors
    assert again.splitlines()[:-1] == printed.splitlines()[1:-1], "but for the first line and the time"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("*")} == stamps


def test_mistakes_are_answered_in_one_line(tmp_path):
    for flags, words in (
        ((), r"error: .*--corpus=.*\benwik8\b"),
        (("--corpus=ptb", "--data.file=a"), r"error: data\.file\b.*\bptb\b"),
        (("--corpus=ptb", f"--data_dir={tmp_path}"), rf"error: Penn Treebank\b.*{re.escape(str(tmp_path))}"),
    ):
        code, printed, errors = run(*flags)
        assert (code, printed) == (1, "")
        assert errors.count("\n") == 1 and re.match(words, errors)


def test_the_corpus_is_required():
    code, printed, errors = run("--corpus=enwki8")
    assert (code, printed) == (2, "") and re.search(r"enwki8\b.*did you mean enwik8\?", errors)
    code, printed, errors = run("--help")
    assert (code, errors) == (0, "")
    assert re.search(r"--corpus=NAME +Required\.", printed)
    assert "corpus=enwik8" not in printed


def test_every_published_corpus_is_read_as_its_program_reads_it():
    for name in miniature.NAMES:
        assert prepare.DEFAULTS[name].data.corpus is name
    assert (
        prepare.DEFAULTS[CorpusName.WIKITEXT2].data.tokenizer.line_mark
        == prepare.DEFAULTS[CorpusName.WIKITEXT103].data.tokenizer.line_mark
    )
