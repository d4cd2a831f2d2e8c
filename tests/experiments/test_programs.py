"""Tests programs as a user starts them: their list, several hosts, prepared corpora, and folders
given as URLs.
"""

import runpy
import signal

import pytest

from experiments.__main__ import HEADINGS, main
from experiments.__main__ import programs as programs_in
from support import ROOT, miniature, programs
from txl_jax import cli
from txl_jax.cli import train_command
from txl_jax.config import CorpusName, config_tree
from txl_jax.data import published

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in ("experiments", "launch")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text()
}


def test_every_program_is_listed(capsys):
    listed = {name: text for folder in HEADINGS for name, text in programs_in(folder).items()}
    assert sorted(FILES) == sorted(listed)
    assert all(listed.values())
    handler = signal.getsignal(signal.SIGPIPE)
    try:
        main()
    finally:
        # The list may end its process when nobody reads it. This process has other tests to run.
        signal.signal(signal.SIGPIPE, handler)
    out = capsys.readouterr().out
    assert all(f"  {name}\n      {text}" in out for name, text in listed.items())


# Programs that join other hosts, and those that may run on each; all others refuse them.
JOIN = {
    *({published.program_of(name) for name in CorpusName} - {"quickstart"}),
    *("paper.ablation", "paper.context_length", "paper.continuation"),
}
# Folders may lie elsewhere on another host; that all reach the same workdir is checked when it is
# opened.
FOLDERS = {"workdir", "data_dir", "cache_dir", "out"}


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.startswith("experiments.")))
def test_every_program_works_on_several_hosts_or_refuses(monkeypatch, name):
    called = []
    for module in (cli, train_command):
        monkeypatch.setattr(
            module, "main", lambda run, plan, **options: called.append((plan, options))
        )
    with programs.own_flags():
        runpy.run_path(str(FILES[name]), run_name="__main__")
    [(plan, options)] = called
    own = name.removeprefix("experiments.")
    assert options.get("hosts", "alone") == (
        "join" if own in JOIN else "each" if own == "prepare" else "alone"
    )
    if own in JOIN:  # All settings but folders are compared.
        assert {leaf.name for leaf in config_tree.leaves(plan) if leaf.setting.path} <= FOLDERS


def test_a_corpus_is_read_and_encoded(tmp_path, monkeypatch):
    name, folder = CorpusName.TEXT8, tmp_path / "made"
    monkeypatch.setitem(published.CORPORA, name, miniature.corpus(name))
    (tmp_path / miniature.OFFICIAL[name]).write_bytes(miniature.official(name))
    command = (
        "experiments.prepare",
        f"--corpus={name}",
        f"--data_dir={tmp_path}",
        f"--cache_dir={folder}",
    )
    code, printed, errors = programs.run(*command)
    assert code == 0, errors
    values = dict(line.split(None, 1) for line in printed.splitlines()[1:])
    for split, text in miniature.texts(name).items():
        assert values[split] == f"{len(text):,} tokens"
    assert values["records"].startswith(f"{folder / 'tfds' / f'txl_{name}'} (0.")
    assert values["tokens"].startswith(str(folder / "tokens" / name.value))


GCS = pytest.mark.full  # Without gcsfs, the error is that it is not installed.
TASK = ["--model_path=m", "--tasks=t"]


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        pytest.param(
            "quickstart", ["--workdir=gs://bucket/run"], "text, got gs://bucket/run", marks=GCS
        ),
        pytest.param(
            "lm_eval",
            [*TASK, "--include_path=gs://bucket"],
            "local directory, got gs://bucket",
            marks=GCS,
        ),
        ("lm_eval", [*TASK, "--output=ftp://host/out.json"], "ftp://host/out.json"),
        ("paper.ablation", ["--out=ftp://host/out"], "ftp://host/out"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_before_anything_is_done(program, words, named):
    code, out, err = programs.run(f"experiments.{program}", *words)
    assert code == 1 and out == "" and named in err
