"""Tests the programs of studies: processes must agree on a plan, and the order of its checks."""

import dataclasses
import sys

import pytest

from support import programs
from txl_jax.cli import flag_tree, studies
from txl_jax.config import ExperimentConfig
from txl_jax.config import tree as config_tree
from txl_jax.config.settings import require, setting
from txl_jax.runtime import distributed


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
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with programs.own_flags(), pytest.raises(SystemExit) as ended:
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
    assert code == 1 and "no length" in capsys.readouterr().err


def test_a_training_study_checks_the_config_before_it_reads_a_text(start, capsys, monkeypatch):
    monkeypatch.setattr(studies, "read_corpus", pytest.fail)
    monkeypatch.setattr(studies.programs, "config_of_flags", lambda: flag_tree.build(ExperimentConfig()))
    words = ["--eval.mem_len=0", "--eval.same_length=false"]
    code = start(studies.run_training_study, *words, run=pytest.fail)
    assert code == 1 and "no memory" in capsys.readouterr().err


def test_processes_agree_on_the_plan_but_for_its_paths(start, monkeypatch):
    compared = []
    monkeypatch.setattr(distributed, "assert_same_on_all", lambda value, complaint: compared.append(value))
    start(studies.run_model_study, "--out=here", run=lambda *given: None, defaults=ExperimentConfig())
    assert compared == ["--lengths=1,2"]
