"""Tests the list of programs, `python -m experiments`: none is forgotten, and each says what it does."""

from experiments.__main__ import HEADINGS, main, programs
from support import ROOT


def test_every_program_is_listed(capsys):
    files = [path for folder in ("experiments", "launch") for path in (ROOT / folder).rglob("*.py")]
    found = [path for path in files if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text()]
    listed = {name: text for folder in HEADINGS for name, text in programs(folder).items()}
    assert sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found) == sorted(listed)
    assert all(listed.values())
    main()
    out = capsys.readouterr().out
    assert all(f"  {name}\n      {text}" in out for name, text in listed.items())
