"""Tests the list of programs, `python -m txl_jax`: one line for each, none forgotten."""

from support import ROOT
from txl_jax.__main__ import PROGRAMS, main

NAMES = [name for programs in PROGRAMS.values() for name in programs]


def test_every_program_is_listed(capsys):
    files = [path for folder in ("experiments", "launch") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in files if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text()]
    assert sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found) == sorted(NAMES)
    main()
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in NAMES)
