"""Tests that shellcheck finds nothing in the project's shell scripts."""

from pathlib import Path

import pytest

from support import shell

ROOT = Path(__file__).parents[2]
SCRIPTS = [*(ROOT / "launch").rglob("*.sh"), ROOT / ".ci" / "run", *(Path(__file__).parent / "fake").iterdir()]


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_found(script):
    assert not shell.findings(script.read_text())
