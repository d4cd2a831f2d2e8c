"""Tests that shellcheck finds nothing in the project's shell scripts."""

import pytest

from support import ROOT, shell

SCRIPTS = [*(ROOT / "launch").rglob("*.sh"), ROOT / ".ci" / "run", *(ROOT / "tests/launch/fake").iterdir()]


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_found(script):
    assert not shell.findings(script.read_text())
