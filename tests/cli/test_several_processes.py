"""Tests what each program does about several hosts, and which of its own flags they compare."""

import runpy

import pytest

from support import ROOT, programs
from txl_jax import cli
from txl_jax.cli import program
from txl_jax.config import CorpusName, config_tree
from txl_jax.data.published import program_of

PATHS = {
    ".".join(path.relative_to(ROOT / "experiments").with_suffix("").parts): path
    for path in sorted((ROOT / "experiments").rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text() and path.name != "__main__.py"
}
# Programs that join other hosts, and those that may run on each; all others refuse them.
JOIN = {
    *({program_of(name) for name in CorpusName} - {"quickstart"}),
    *("paper.ablation", "paper.context_length", "paper.continuation"),
}
EACH = {"prepare"}
# Folders may lie elsewhere on another host; that all reach the same workdir is checked when it is opened.
FOLDERS = {"workdir", "data_dir", "cache_dir", "out"}


@pytest.mark.parametrize("name", PATHS)
def test_every_program_works_on_several_hosts_or_refuses(monkeypatch, name):
    called = []
    for module in (cli, program):
        monkeypatch.setattr(module, "main", lambda run, plan, **options: called.append((plan, options)))
    with programs.own_flags():
        runpy.run_path(str(PATHS[name]), run_name="__main__")
    [(plan, options)] = called
    assert options.get("hosts", "alone") == ("join" if name in JOIN else "each" if name in EACH else "alone")
    if name in JOIN:  # All settings but folders are compared.
        assert {leaf.name for leaf in config_tree.leaves(plan) if leaf.setting.path} <= FOLDERS
