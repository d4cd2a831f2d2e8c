"""Tests commands as a user starts them: their list, multiple hosts, prepared corpora, and
directories that are URLs.
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


def find_programs():
    """Returns the files of all programs, by module."""
    files = {}
    for folder in ("experiments", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text():
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                files[module] = path
    return files


FILES = find_programs()
PACKAGE = "experiments."
EXPERIMENTS = sorted(module.removeprefix(PACKAGE) for module in FILES if module.startswith(PACKAGE))


def test_every_program_is_listed_with_a_sentence(capsys):
    sentences = {}
    for folder in HEADINGS:
        sentences |= programs_in(folder)
    assert sorted(FILES) == sorted(sentences)

    handler = signal.getsignal(signal.SIGPIPE)
    try:
        main()
    finally:
        # `main` lets SIGPIPE end its process when nobody reads the list. This process has other
        # tests to run.
        signal.signal(signal.SIGPIPE, handler)

    out = capsys.readouterr().out
    for module, sentence in sentences.items():
        assert sentence, module
        assert f"  {module}\n      {sentence}" in out


# Programs that join other hosts. The quickstart trains on one corpus of `CorpusName`, but alone.
JOIN = {published.program_of(name) for name in CorpusName} - {"quickstart"}
JOIN |= {"paper.ablation", "paper.context_length", "paper.continuation"}
# Programs that may run on each host by themselves. All others refuse other hosts.
EACH = {"prepare"}
# The settings of programs that join that are paths, and so may differ between hosts. Whether all
# hosts reach the same workdir is checked when it is opened.
FOLDERS = {"workdir", "data_dir", "cache_dir", "out"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_program_works_on_several_hosts_or_refuses(monkeypatch, name):
    calls = []

    def note(run, plan, **options):
        calls.append((plan, options))

    monkeypatch.setattr(cli, "main", note)
    monkeypatch.setattr(train_command, "main", note)
    with programs.own_flags():
        runpy.run_path(str(FILES[PACKAGE + name]), run_name="__main__")
    [(plan, options)] = calls

    expected = "alone"
    if name in JOIN:
        expected = "join"
    if name in EACH:
        expected = "each"
    assert options.get("hosts", "alone") == expected
    if name in JOIN:
        # All other settings are compared between the hosts, so that another path, such as an input,
        # would differ unnoticed.
        assert {leaf.name for leaf in config_tree.leaves(plan) if leaf.setting.path} <= FOLDERS


def test_a_corpus_is_read_and_encoded(tmp_path, monkeypatch):
    name = CorpusName.TEXT8
    folder = tmp_path / "made"
    monkeypatch.setitem(published.CORPORA, name, miniature.corpus(name))
    (tmp_path / miniature.OFFICIAL[name]).write_bytes(miniature.official(name))

    # The miniature replaces the published corpus, and its archive is in --data_dir already.
    code, out, err = programs.run(
        "experiments.prepare",
        f"--corpus={name}",
        f"--data_dir={tmp_path}",
        f"--cache_dir={folder}",
    )

    assert code == 0, err
    # The first line says where the text is from. The others have a name and a value.
    printed = {}
    for line in out.splitlines()[1:]:
        key, value = line.split(None, 1)
        printed[key] = value
    for split, text in miniature.texts(name).items():
        assert printed[split] == f"{len(text):,} tokens", split
    assert printed["records"].startswith(f"{folder / 'tfds' / f'txl_{name}'} (0.")
    assert printed["tokens"].startswith(str(folder / "tokens" / name.value))


GCS = pytest.mark.full  # Without gcsfs, the error is that it is not installed.
TASK = ["--model_path=m", "--tasks=t"]  # Required, and read later than the URLs.


@pytest.mark.parametrize(
    ("program", "words", "named"),
    [
        pytest.param(
            "quickstart",
            ["--workdir=gs://bucket/run"],
            "text, got gs://bucket/run",
            marks=GCS,
            id="a quickstart in a bucket",
        ),
        pytest.param(
            "lm_eval",
            [*TASK, "--include_path=gs://bucket"],
            "local directory, got gs://bucket",
            marks=GCS,
            id="tasks in a bucket",
        ),
        pytest.param(
            "lm_eval",
            [*TASK, "--output=ftp://host/out.json"],
            "ftp://host/out.json",
            id="results on FTP",
        ),
        pytest.param(
            "paper.ablation", ["--out=ftp://host/out"], "ftp://host/out", id="an ablation on FTP"
        ),
    ],
)
def test_urls_that_cannot_be_used_are_refused_before_anything_is_done(program, words, named):
    code, out, err = programs.run(f"experiments.{program}", *words)
    assert code == 1
    assert out == ""
    assert named in err
