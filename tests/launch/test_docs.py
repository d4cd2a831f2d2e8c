"""Tests that the commands of docs/launch.md can be typed, and that shellcheck finds nothing in the
shell scripts.
"""

import re
import shlex
import subprocess

import pytest

from launch import sweep, sweep_file
from support import ROOT, shell

TEXT = (ROOT / "docs" / "launch.md").read_text()


def blocks(language):
    """The code blocks in a language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def commands(first):
    """The commands that begin with these words, as lists of words."""
    shown = []
    for line in "".join(blocks("sh")).replace("\\\n", " ").splitlines():
        if line.startswith(first):
            # What comes after a pipe is another command.
            line = line.rpartition(" | ")[0] or line
            shown.append(shlex.split(line, comments=True))
    assert shown, f"no command begins with {first}"
    return shown


@pytest.mark.full
@pytest.mark.parametrize(
    "words", [*commands("launch/tpu.sh"), *commands("launch/slurm.sh")], ids=" ".join
)
def test_the_scripts_take_what_is_shown(words):
    """Also the program in it, whose flags are checked as for a run of a sweep."""
    # The flags of tpu.sh are behind a command and the TPU's name.
    flags_begin = 1 if "slurm" in words[0] else 3
    command = [*words[:flags_begin], "--dry_run", *words[flags_begin:]]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout, done.stderr

    if "--" in words and "launch.sweep" not in words:
        program = words[words.index("--") + 1 :]
        flags = [word for word in program[3:] if not word.startswith("--workdir=")]
        sweep_file.config_of(program[2].removeprefix("experiments."), flags)


def shown_sweeps():
    """The commands with the sweep of the first example, except for tasks of SkyPilot."""
    shown = []
    for words in commands("python -m launch.sweep"):
        if "sweep.toml" in words and "--print=sky" not in words:
            shown.append(words)
    return shown


@pytest.mark.parametrize("words", shown_sweeps(), ids=" ".join)
def test_the_sweep_takes_what_is_shown(words, tmp_path, capsys):
    path = tmp_path / "sweep.toml"
    path.write_text(blocks("toml")[0])
    flags = [word.replace("sweep.toml", str(path)) for word in words[2:] if word != "--table"]

    assert sweep.main([*flags, "--dry_run", f"--out={tmp_path / 'runs'}"]) == 0

    # The sweep has two kinds of runs, each with three seeds and two rates of dropout.
    out = capsys.readouterr().out
    assert out.count("experiments.ptb") == 12
    assert "/seed=1+dropout.rate=0.1" in out
    assert "/no_memory+seed=3+dropout.rate=0.3" in out


SCRIPTS = [
    *(ROOT / "launch").rglob("*.sh"),
    ROOT / ".ci" / "run",
    *(ROOT / "tests/launch/fake").iterdir(),
]


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_shellcheck_finds_nothing(script):
    assert not shell.findings(script.read_text())
