"""Tests programs as a user starts them: their list, prepared corpora, and folders given as URLs."""

import pytest

from experiments.__main__ import HEADINGS, main
from experiments.__main__ import programs as programs_in
from support import ROOT, miniature, programs
from txl_jax.config import CorpusName
from txl_jax.data import published


def test_every_program_is_listed(capsys):
    files = [path for folder in ("experiments", "launch") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in files if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text()]
    listed = {name: text for folder in HEADINGS for name, text in programs_in(folder).items()}
    assert sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found) == sorted(listed)
    assert all(listed.values())
    main()
    out = capsys.readouterr().out
    assert all(f"  {name}\n      {text}" in out for name, text in listed.items())


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


GCS = pytest.mark.full  # Without gcsfs, the error is that it is not installed.
TASK = ["--model_path=m", "--tasks=t"]


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        pytest.param("quickstart", ["--workdir=gs://bucket/run"], "gs://bucket/run, and the quick start", marks=GCS),
        pytest.param("lm_eval", [*TASK, "--include_path=gs://bucket"], "--include_path is gs://bucket", marks=GCS),
        ("lm_eval", [*TASK, "--output=ftp://host/out.json"], "ftp://host/out.json"),
        ("paper.ablation", ["--out=ftp://host/out"], "ftp://host/out"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_before_anything_is_done(program, words, named):
    code, out, err = programs.run(f"experiments.{program}", *words)
    assert code == 1 and out == "" and named in err
