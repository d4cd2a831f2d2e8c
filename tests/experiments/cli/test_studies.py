"""Tests the programs of studies: every plan is complete, processes must agree on it, and its order of checks."""

import dataclasses
import importlib
import sys

import pytest
from absl import flags

from experiments.cli import flag_tree, hosts, runner, studies
from support import ROOT
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import require, setting
from txl_jax.runtime import distributed

PROGRAMS = [path.stem for path in sorted((ROOT / "experiments" / "paper").glob("*.py")) if path.stem != "__init__"]


@dataclasses.dataclass(frozen=True)
class Plan:
    lengths: tuple[int, ...] = setting((1, 2), "Lengths.")
    out: str | None = setting(None, "Folder.", path=True)

    def validate(self):
        require(self.lengths, "no length was given; give one")

    def check(self, config):
        require(config.eval.mem_len, "there is no memory; give one")


@pytest.fixture
def start(monkeypatch):
    """Runs a program of a study with a command line; returns its exit code."""

    def start(entry, *words, **options):
        values = flags.FlagValues()
        for module in (runner, studies, hosts, flag_tree):
            if hasattr(module, "FLAGS"):
                monkeypatch.setattr(module, "FLAGS", values)
        for name in ("DEFINE_string", "DEFINE_integer"):
            define = getattr(flags, name)
            monkeypatch.setattr(flags, name, lambda *args, _d=define, **kw: _d(*args, **{"flag_values": values} | kw))
        for name in ("define", "define_plan", "build", "build_plan", "parse"):
            of_module = getattr(flag_tree, name)
            monkeypatch.setattr(flag_tree, name, lambda arg, _f=of_module, **kw: _f(arg, values, **kw))
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(SystemExit) as ended:
            entry(Plan, **options)
        return ended.value.code

    return start


def test_a_model_study_gets_the_config_and_the_plan_of_the_flags(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got = []
    defaults = config_tree.replace(ExperimentConfig(), {"eval.mem_len": 7})
    words = ["--lengths=3,4", "--out=here", "--model.n_layer=2"]
    code = start(studies.run_model_study, *words, run=lambda *given: got.append(given), defaults=defaults)
    assert code == 0
    assert got == [(config_tree.replace(defaults, {"model.n_layer": 2}), Plan((3, 4), str(tmp_path / "here")))]


def test_a_plan_is_checked_before_anything_is_run(start, capsys):
    code = start(studies.run_model_study, "--lengths=", run=pytest.fail, defaults=ExperimentConfig())
    assert code == 1 and capsys.readouterr().err == "error: no length was given; give one\n"


def test_a_training_study_checks_the_config_before_it_reads_a_text(start, capsys, monkeypatch):
    monkeypatch.setattr(studies, "read_corpus", pytest.fail)
    monkeypatch.setattr(studies.programs, "config_of_flags", lambda: flag_tree.build(ExperimentConfig()))
    words = ["--eval.mem_len=0", "--eval.same_length=false"]
    code = start(studies.run_training_study, *words, run=pytest.fail)
    assert code == 1 and capsys.readouterr().err == "error: there is no memory; give one\n"


def test_processes_agree_on_the_plan_but_for_its_paths(start, monkeypatch):
    compared = []
    monkeypatch.setattr(distributed, "assert_same_on_all", lambda value, complaint: compared.append(value))
    start(studies.run_model_study, "--out=here", run=lambda *given: None, defaults=ExperimentConfig())
    assert compared == ["--lengths=1,2"]


@pytest.mark.parametrize("name", [*(f"experiments.paper.{name}" for name in PROGRAMS), "experiments.temperature"])
def test_every_program_of_a_study_is_a_docstring_and_a_call(name):
    module = importlib.import_module(name)
    leaves = list(config_tree.leaves(module.Plan))
    assert leaves and all(len(leaf.setting.help) > 3 for leaf in leaves)
    assert not {leaf.name for leaf in leaves} & {leaf.name for leaf in config_tree.leaves()}
    assert callable(module.run) and callable(module.Plan.validate)
    statements = (ROOT / (name.replace(".", "/") + ".py")).read_text().split('"""')[2]
    assert len(statements.strip().splitlines()) <= 8 and f"python -m {name}" in module.__doc__
