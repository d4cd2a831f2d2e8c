"""Tests that the commands of docs/launch.md can be typed."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launch import sweep, sweep_file
from support import recorded_run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "launch.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def commands(first):
    """The commands that begin with these words, as lists of words."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line.rpartition(" | ")[0] or line, comments=True) for line in lines if line.startswith(first)]
    assert found
    return found


@pytest.mark.parametrize("words", [*commands("launch/tpu.sh"), *commands("launch/slurm.sh")], ids=" ".join)
def test_the_scripts_take_what_is_shown(words):
    flags_begin = 1 if "slurm" in words[0] else 3
    asked = [*words[:flags_begin], "--dry_run", *words[flags_begin:]]
    done = subprocess.run(asked, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr
    if "--" in words:  # What the program is given is checked as for a run of a sweep.
        program = words[words.index("--") + 1 :]
        given = [word for word in program[3:] if not word.startswith("--workdir=")]
        sweep_file._config(program[2].removeprefix("experiments."), given)


SWEEPS = commands("python -m launch.sweep")


@pytest.mark.parametrize("words", [words for words in SWEEPS if "sweep.toml" in words], ids=" ".join)
def test_the_sweep_takes_what_is_shown(words, tmp_path, capsys):
    (tmp_path / "sweep.toml").write_text(blocks("toml")[0])
    words = [word.replace("sweep.toml", str(tmp_path / "sweep.toml")) for word in words[2:]]
    words += [] if any(word.startswith("--print") for word in words) else ["--dry_run"]
    out = [f"--out={tmp_path / 'runs'}"] if {"--out=runs/sweep", "--out=gs://my-bucket/sweep"} & set(words) else []
    assert sweep.main([*words, *out]) == 0
    out = capsys.readouterr().out
    assert out.count("experiments.ptb") == 12
    assert "/seed=1+dropout.rate=0.1" in out and "/no_memory+seed=3+dropout.rate=0.3" in out


def test_the_files_of_sweeps_can_be_read(tmp_path):
    """Those of this page, and the one of the page about runs."""
    example = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "report.md").read_text(), flags=re.DOTALL)
    found = []
    for text in [*blocks("toml"), *example]:
        (tmp_path / "sweep.toml").write_text(text)
        found.append(sweep_file.read(tmp_path / "sweep.toml", tmp_path / "runs"))
    assert [len(each.runs) for each in found] == [12, 40, 27, 3]
    assert [each.rungs for each in found] == [(), (), (290, 870, 2610), ()]


def test_the_table_of_any_runs_is_made(tmp_path, monkeypatch, capsys):
    [words] = [words[3:] for words in SWEEPS if "sweep.toml" not in words]
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        recorded_run.make(tmp_path / "runs" / name)
    assert sweep.main(["sweep", *(word for word in words if not word.startswith("gs:"))]) == 0
    assert (
        capsys.readouterr().out.count("| finished |") == 2 and (tmp_path / "runs" / "compared" / "results.csv").exists()
    )
