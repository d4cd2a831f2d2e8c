"""Tests that every program works on several hosts or refuses them, and that all compare their own flags."""

import inspect
import runpy
import sys

import pytest
from absl import flags

from support import ROOT, programs
from txl_jax.cli import flag_tree, other_hosts, program
from txl_jax.config import CorpusName, ExperimentConfig
from txl_jax.data.published import program_of
from txl_jax.errors import UserError
from txl_jax.runtime import distributed

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
BEGIN = inspect.signature(program.guarded).parameters["begin"].default

# Folders may lie elsewhere on another host; that all reach the same workdir is checked when it is opened.
FOLDERS = {"workdir", "data_dir", "cache_dir", "out", "compilation_cache"}


@pytest.fixture
def start(monkeypatch):
    """Starts a program up to its job, without running it; returns the job, what it does about hosts, and its flags."""

    def start(name, *words):
        guarded = []

        def record(job, *, begin=BEGIN):
            guarded.append((job, begin))
            return 0

        monkeypatch.setattr(program, "guarded", record)
        monkeypatch.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(PATHS[name]), run_name="__main__")
        assert ended.value.code == 0
        [(job, begin)] = guarded
        return job, begin, set(flags.FLAGS) - of_libraries

    with programs.own_flags() as of_libraries:
        yield start


@pytest.mark.parametrize("name", PATHS)
def test_every_program_works_on_several_hosts_or_refuses(start, name):
    _, begin, defined = start(name)
    assert begin is (other_hosts.join if name in JOIN else other_hosts.each if name in EACH else other_hosts.alone)
    assert set(other_hosts.FLAG_NAMES) <= defined if name in JOIN else not set(other_hosts.FLAG_NAMES) & defined


class ReadsTextError(Exception):
    """Raised where a program would begin to read."""


@pytest.mark.parametrize("name", sorted(JOIN))
def test_programs_of_several_hosts_compare_their_own_flags(start, monkeypatch, name):
    """Those that are no settings of `ExperimentConfig`: settings are compared when a job begins."""

    def stop(act):
        if compared:
            raise ReadsTextError
        return act()

    compared = set()
    monkeypatch.setattr(other_hosts, "check_same", lambda values: compared.update(values))
    monkeypatch.setattr(distributed, "run_on_all", stop)
    job, _, defined = start(name, "--workdir=nowhere") if "ablation" not in name else start(name, "--out=nowhere")
    with pytest.raises(ReadsTextError):
        job()
    settings = {leaf.name for leaf in flag_tree.setting_leaves(ExperimentConfig)} | {"compat"}
    aliases = {flag for flag in defined if (flags.FLAGS[flag].help or "").startswith("Alias for --")}
    own = {flag for flag in defined if not flag.startswith("no")} - settings - aliases - set(other_hosts.FLAG_NAMES)
    assert own - FOLDERS and compared == own - FOLDERS


def test_a_program_of_one_host_is_not_run_twice(monkeypatch):
    for name, value in {"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    with pytest.raises(UserError, match=r"one host.*\b2 processes"):
        other_hosts.alone()
    other_hosts.each()
