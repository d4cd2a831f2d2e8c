"""Tests `python -m experiments.prepare`: that it does what the corpus's program will find done."""

import pytest

from support import miniature, programs
from txl_jax.config import CorpusName
from txl_jax.data import published


@pytest.mark.parametrize("name", [CorpusName.TEXT8, CorpusName.LM1B])
def test_a_corpus_is_read_and_encoded(name, tmp_path, monkeypatch):
    monkeypatch.setitem(published.CORPORA, name, miniature.corpus(name))
    (tmp_path / miniature.OFFICIAL[name]).write_bytes(miniature.official(name))
    command = "experiments.prepare", f"--corpus={name}", f"--data_dir={tmp_path}", f"--cache_dir={tmp_path / 'made'}"
    code, printed, errors = programs.run(*command)
    assert code == 0, errors
    printed_values = dict(line.split(None, 1) for line in printed.splitlines()[1:])
    for split, text in miniature.texts(name).items():
        # One Billion Word has one more mark than lines.
        words = len(text.split()) + text.count(b"\n") + (name is CorpusName.LM1B)
        assert printed_values[split] == f"{len(text) if name is CorpusName.TEXT8 else words:,} tokens"
    assert printed_values["records"].startswith(f"{tmp_path / 'made' / 'tfds' / f'txl_{name}'} (0.")
    assert printed_values["tokens"].startswith(str(tmp_path / "made" / "tokens" / name.value))
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("*")}
    code, again, errors = programs.run(*command)
    assert code == 0, errors
    assert again.splitlines()[:-1] == printed.splitlines()[1:-1], "but for the first line and the time"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "made").rglob("*")} == stamps
